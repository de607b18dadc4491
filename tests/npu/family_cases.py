"""Every family as cases of the npu platform, and how near log probabilities are where tokens differ."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cann.environment import has_real_cann
from tests.families import FAMILIES, sees_images
from tests.full_set import is_fast
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL

emulated = pytest.mark.skipif(has_real_cann(), reason="a device's attention takes no float32: compared in bfloat16")


def cases_of(model_type: str, checkpoint: Any, mode: str, **settings: Any) -> list[Case]:
    """One for each config that the family has there. Batches of up to seven: the largest graph is for four, above it
    steps run eagerly."""
    graphs: dict[str, Any] = {} if mode == "eager" else {"graph_batch_sizes": [4]}
    if mode == "max-autotune":
        graphs["use_graph_cache"] = False
    prompts, count = ("images", 6) if sees_images(model_type) else ("texts", 7)
    if mode == "eager" and is_fast:
        count = 3
    return [Case(str(checkpoint(model_type, **changes)), {"graph_mode": mode, **SMALL, **FLOAT32, **graphs, **settings},
                 prompts, count) for changes in FAMILIES[model_type].npu]


def tiny(model_type: str, checkpoint: Any, mode: str, **settings: Any) -> Case:
    """The first of them."""
    return cases_of(model_type, checkpoint, mode, **settings)[0]


def assert_close_at_the_first_divergence(ours: dict[str, Any], reference: dict[str, Any], most: float = 0.25) -> None:
    """Up to and at the first different token the most probable ones have nearly the same log probabilities."""
    for mine, theirs, my_top, their_top in zip(ours["tokens"], reference["tokens"], ours["logprobs"],
                                               reference["logprobs"], strict=True):
        for place in range(len(mine)):
            shared = set(my_top[place]) & set(their_top[place])
            assert len(shared) >= 4, (place, my_top[place], their_top[place])
            worst = max(abs(my_top[place][token] - their_top[place][token]) for token in shared)
            assert worst < most, (place, worst)
            if mine[place] != theirs[place]:
                gap = their_top[place][str(theirs[place])] - their_top[place].get(str(mine[place]), float("-inf"))
                assert gap < most, (place, gap)
                break
