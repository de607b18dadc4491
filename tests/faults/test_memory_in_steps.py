"""Memory that runs out behind a step's forward changes no answer: the step is made again, its tokens count once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from tests.faults.interrupts import PROMPTS, SETTINGS
from tests.full_set import every, only_full
from tests.oracle.running import runner_of
from tests.runner.sampler_steps import MemoryRunsOut

DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
PARAMS = [
    DRAWN.replace(frequency_penalty=1.5, repetition_penalty=1.5),
    DRAWN.replace(max_tokens=3, temperature=0.0, presence_penalty=2.0, bad_words=("a b", "c")),
    DRAWN.replace(min_tokens=3, ignore_eos=False),
    SamplingParams(temperature=1.0, seed=4, max_tokens=6, structured_outputs={"regex": "[a-f ]{30}"}),
]


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


@pytest.mark.parametrize("at_step", [4, *only_full("earlier steps; one that a sequence has left stays", 1, 2)])
def test_memory_that_runs_out_behind_a_forward_changes_no_answer(at_step: int, checkpoint: Any,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    """Prefills, steps of the same sequences and one that a sequence has left; every operator in turn, and a fifth of
    them in the fast set."""
    with LLM(checkpoint("qwen3"), **SETTINGS) as llm:
        def found() -> list[list[int]]:
            return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]

        expected, guard = found(), runner_of(llm).guard
        for num_tried, at_operator in enumerate(itertools.count(1, every(5)), 1):
            failing = failing_behind_the_forward(runner_of(llm).steps, at_step, at_operator)
            assert found() == expected, f"operator {at_operator}"
            if failing.num_left > 0:
                break
            assert guard.num_retries == num_tried
            assert "looking for the request" not in caplog.text, "the second try has brought the step's tokens"
    assert at_operator > 10
