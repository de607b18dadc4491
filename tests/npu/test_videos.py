"""Videos on the npu platform: the tokens of the cpu platform, and patches of pairs cut where images' are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import has_real_cann
from tests.families import FAMILIES, accepts_videos
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, assert_graphs_are_whole, on_cpu, on_npu

pytestmark = [pytest.mark.npu, pytest.mark.slow]
emulated = pytest.mark.skipif(has_real_cann(), reason="a device's attention takes no float32: compared in bfloat16")

MODES = ["eager", "reduce-overhead", "max-autotune"]
# Each way to show a video (VideoForm) has one; of GLM's families all, and Gated DeltaNet behind a tower.
DENSE = [name for name, family in FAMILIES.items() if accepts_videos(name) and not family.has_experts]


@pytest.mark.full("a process over the emulation for each; images go the same way there, videos on the cpu")
@emulated
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", DENSE)
def test_tokens_equal_cpu(family: str, mode: str, checkpoint: Any, tmp_path: Path) -> None:
    assert_tokens_equal_cpu([family], mode, checkpoint, tmp_path)


def assert_tokens_equal_cpu(families: Sequence[str], mode: str, checkpoint: Any, tmp_path: Path) -> None:
    graphs: dict[str, Any] = {} if mode == "eager" else {"graph_batch_sizes": [4]}
    if mode == "max-autotune":
        graphs["use_graph_cache"] = False
    cases = [Case(str(checkpoint(family, **FAMILIES[family].npu[0])),
                  {"graph_mode": mode, **graphs, **SMALL, **FLOAT32}, "videos", 4) for family in families]
    for case, result in zip(cases, on_npu(cases, tmp_path), strict=True):
        assert result["tokens"] == on_cpu(case)["tokens"], case.model
        assert result["after"].get("fallbacks", {}) == {}, "nothing leaves the AI core, nor sorts indices"
        if mode != "eager":
            assert_graphs_are_whole(result, [4])
