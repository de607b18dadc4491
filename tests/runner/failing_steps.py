"""Makes steps of a real engine fail: at a token, or at an operator behind the forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from npu_runner import LLM
from tests.oracle.running import runner_of
from tests.runner.sampler_steps import MemoryRunsOut

POISON = "Z"


def poison_of(llm: LLM) -> int:
    return int(llm.engine.processor.tokenizer.token_to_id(POISON))


@contextmanager
def failing(llm: LLM, fault: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """`fault` sees the token ids of every step and may raise."""
    model: Any = runner_of(llm).model
    embed = model.embed

    def poisoned(ids: torch.Tensor) -> torch.Tensor:
        fault(ids)
        result: torch.Tensor = embed(ids)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "embed", poisoned)
        yield


def raise_at_poison(llm: LLM, error: Exception) -> Callable[[torch.Tensor], None]:
    poison = poison_of(llm)

    def fault(ids: torch.Tensor) -> None:
        if (ids == poison).any():
            raise error

    return fault


def failing_behind_the_forward(steps: Any, at_step: int, at_operator: int) -> MemoryRunsOut:
    """Of that step, the operator of that number behind the forward that takes memory fails, and no later one."""
    failing, num_steps = MemoryRunsOut(at_operator), itertools.count(1)
    launch, submit = type(steps).launch.__get__(steps), type(steps)._submit.__get__(steps)
    is_inside = False

    def launch_and_watch(step: Any) -> Any:
        nonlocal is_inside
        launched = launch(step)
        if next(num_steps) == at_step:
            failing.__enter__()
            is_inside = True
        return launched

    def submit_watched(*arguments: Any) -> Any:
        nonlocal is_inside
        try:
            return submit(*arguments)
        finally:
            if is_inside:
                failing.__exit__(None, None, None)
                is_inside = False

    steps.launch, steps._submit = launch_and_watch, submit_watched
    return failing
