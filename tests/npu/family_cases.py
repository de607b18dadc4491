"""Every family as cases of the npu platform, and how near log probabilities are where tokens differ."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
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


def returning_states(checkpoint: Any, mode: str) -> Case:
    """Hidden states of layers, and the logits that are left to be sampled from, with steps under way."""
    case = tiny("qwen3", checkpoint, mode, hidden_state_layers=[0, -1], logprobs_mode="processed_logits",
                async_scheduling=True)
    sampling = {"return_hidden_states": True, "top_p": 0.9, "temperature": 0.8, "seed": 5, "repetition_penalty": 1.2}
    return dataclasses.replace(case, count=3, max_tokens=6, logprobs=4, sampling=sampling)


def assert_returns_the_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Tokens, and what else the requests ask for."""
    assert found["tokens"] == expected["tokens"]
    for ours, theirs in zip(found["hidden_states"], expected["hidden_states"], strict=True):
        assert ours.keys() == theirs.keys()
        for layer, states in theirs.items():
            np.testing.assert_allclose(ours[layer], states, rtol=0, atol=1e-4)
    for ours, theirs in zip(found["logprobs"], expected["logprobs"], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.keys() == other.keys()
            assert [*one.values()] == pytest.approx([*other.values()], abs=1e-4)
    assert found["memory"]["used"] == found["memory"]["total_bytes"] - found["memory"]["free_bytes"]
    assert 0 < found["memory"]["allocated_bytes"] <= found["memory"]["used"] < found["memory"]["total_bytes"]
    assert expected["memory"] is None, "the host's memory is no device's"


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
