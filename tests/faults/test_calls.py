"""Two steps may be under way; results come in their order, and never one of a step that was rolled back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from npu_runner import LLM
from npu_runner.core.batch import ScheduledBatch, probe_batch
from npu_runner.engine.executors.rank_channel import RING_SIZE
from tests.oracle.running import greedy


def step(token: int) -> ScheduledBatch:
    """A prompt of one token, nobody's."""
    batch = probe_batch(uses_mrope=False)
    return replace(batch, token_ids_T=batch.token_ids_T + token, freed_slots=[0])


@pytest.mark.parametrize("size", [1, 2])
def test_results_belong_to_their_steps(size: int, checkpoint: Any) -> None:
    with LLM(checkpoint("qwen3"), platform="cpu", tensor_parallel_size=size, max_model_len=256, max_num_seqs=2) as llm:
        executor = llm.engine._executor
        # Seven steps that can be told from one another by what they bring.
        answers: dict[int, int] = {}
        for token in range(40):
            (answer,) = executor.execute_model(step(token)).sampled_token_ids
            answers.setdefault(answer, token)
        steps = [step(token) for token in answers.values()]
        a, b, c, d, e, f, g = steps[:7]

        def collected() -> ScheduledBatch:
            (answer,) = executor.collect().sampled_token_ids
            return steps[list(answers).index(answer)]

        executor.submit(a)
        executor.submit(b)
        with pytest.raises(AssertionError, match=f"{RING_SIZE} steps are under way"):
            executor.submit(c)
        assert collected() is a
        executor.submit(c)
        assert collected() is b
        assert collected() is c
        for abandoned in ([d], [d, e], [d, e], [d]):
            for batch in abandoned:
                executor.submit(batch)
            executor.rollback()
            executor.submit(f)
            executor.submit(g)
            assert collected() is f
            assert collected() is g
        llm.engine.scheduler.reset()  # the slots were used behind its back
        (output,) = llm.generate(["which"], greedy(4))
        assert len(output.token_ids) == 4
