"""Two steps may be under way; results come in their order, and never one of a step that was abandoned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from npu_runner import LLM
from npu_runner.core.batch import ScheduledBatch, probe_batch
from npu_runner.engine.executors.channel import RING_SIZE
from tests.oracle.running import greedy


def step(name: str, token: int) -> ScheduledBatch:
    """A prompt of one token, nobody's."""
    batch = probe_batch(uses_mrope=False)
    return replace(batch, request_ids=[name], token_ids_T=batch.token_ids_T + token, freed_slots=[0])


@pytest.mark.parametrize("size", [1, 2])
def test_results_belong_to_their_steps(size: int, checkpoint: Any) -> None:
    with LLM(checkpoint("qwen3"), platform="cpu", tensor_parallel_size=size, max_model_len=256, max_num_seqs=2) as llm:
        executor = llm.engine._executor
        expected = {}
        for token in range(8):
            expected[f"r{token}"] = executor.execute_model(step(f"r{token}", token)).sampled_token_ids
        assert len({str(tokens) for tokens in expected.values()}) > 4, "one can be told from another"

        def collected() -> str:
            output = executor.collect()
            (name,) = output.req_ids
            assert output.sampled_token_ids == expected[name]
            return name

        executor.submit(step("r0", 0))
        executor.submit(step("r1", 1))
        with pytest.raises(AssertionError, match=f"{RING_SIZE} steps are under way"):
            executor.submit(step("r2", 2))
        assert collected() == "r0"
        executor.submit(step("r2", 2))
        assert [collected(), collected()] == ["r1", "r2"]
        for num_abandoned in (1, 2, 2, 1):
            for token in range(num_abandoned):
                executor.submit(step(f"r{3 + token}", 3 + token))
            executor.abandon()
            executor.submit(step("r5", 5))
            executor.submit(step("r6", 6))
            assert [collected(), collected()] == ["r5", "r6"]
        llm.engine.scheduler.reset()  # the slots were used behind its back
        (output,) = llm.generate(["which"], greedy(4))
        assert len(output.token_ids) == 4
