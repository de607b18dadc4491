"""Memory that runs out behind a step's forward changes no answer: the step is made again, its tokens count once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from tests.faults.interrupts import PROMPTS, SETTINGS
from tests.full_set import every, only_full
from tests.oracle.running import runner_of
from tests.runner.failing_steps import failing_behind_the_forward

DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True)
PARAMS = [
    DRAWN.replace(frequency_penalty=1.5, repetition_penalty=1.5),
    DRAWN.replace(max_tokens=3, temperature=0.0, presence_penalty=2.0, bad_words=("a b", "c")),
    DRAWN.replace(min_tokens=3, ignore_eos=False),
    SamplingParams(temperature=1.0, seed=4, max_tokens=6, structured_outputs={"regex": "[a-f ]{30}"}),
]


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
