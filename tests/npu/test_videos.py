"""Videos on the npu platform: the tokens of the cpu platform, and patches of pairs cut where images' are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import has_real_cann
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, on_cpu, on_npu

pytestmark = [pytest.mark.npu, pytest.mark.slow]
emulated = pytest.mark.skipif(has_real_cann(), reason="a device's attention takes no float32: compared in bfloat16")


@pytest.mark.full("a process over the emulation; images go the same way there, videos on the cpu")
@emulated
def test_tokens_equal_cpu(checkpoint: Any, tmp_path: Path) -> None:
    cases = [Case(str(checkpoint(family)), {"graph_mode": "reduce-overhead", "graph_batch_sizes": [1, 4],
                                            **SMALL, **FLOAT32}, "videos", 4)
             for family in ("qwen3_vl", "qwen3_5")]  # fmt: skip
    for case, result in zip(cases, on_npu(cases, tmp_path), strict=True):
        assert result["tokens"] == on_cpu(case)["tokens"]
        assert result["after"].get("fallbacks", {}) == {}, "nothing leaves the AI core, nor sorts indices"
