"""No n-gram comes twice on the npu platform either: tokens are those of the cpu platform, and no operator of the ban
leaves the AI core."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.full_set import only_full
from tests.npu.family_cases import emulated, tiny
from tests.npu.running import assert_graphs_are_whole, on_cpu, on_npu

pytestmark = [pytest.mark.npu, pytest.mark.slow]
RULE: dict[str, Any] = {"no_repeat_ngram_size": 2, "no_repeat_ngram_window": 12, "n": 2,
                        "no_repeat_ngram_exempt_ids": list(range(0, 128, 2))}  # fmt: skip


@emulated
@pytest.mark.parametrize("mode", ["eager", *only_full(
    "the ban runs behind a step, whatever made its logits; eager steps stay", "reduce-overhead", "max-autotune")])
def test_every_mode(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    assert_tokens_equal_cpu(mode, checkpoint, tmp_path)


def assert_tokens_equal_cpu(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    """Two prompts with two answers each: the graph of four runs all decode steps. A length that is wrong by one changes
    tokens: one less leaves out the newest key, one more reads a stale one."""
    free = dataclasses.replace(tiny("qwen3", checkpoint, mode), count=2, max_tokens=24, stale=8.0)
    case = dataclasses.replace(free, sampling=RULE)
    (result,) = on_npu([case], tmp_path)
    assert result["tokens"] == on_cpu(case)["tokens"] != on_cpu(free)["tokens"]
    assert result["after"].get("fallbacks", {}) == {}
    if mode != "eager":
        assert_graphs_are_whole(result, [4])
