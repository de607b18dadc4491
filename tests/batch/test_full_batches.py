"""However many sequences may run together, enough rows wait for that many to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, cast

import pytest

from npu_runner.core.block_manager import BlockManager
from npu_runner.core.scheduler import Scheduler, SchedulerLimits
from npu_runner.core.sequence import Sequence
from npu_runner.prompts.tasks import MadeTask
from npu_runner.request.outputs import CompletionOutput, EngineStats, RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.endpoint import Endpoint, Prepared, failed_prompt
from npu_runner.serving.replica import FinishedRow, ReplicaFacts
from npu_runner.serving.replicas.inline_replica import InlineReplica
from npu_runner.serving.workers.pool import PoolLimits
from tests.full_set import only_full

NUM_OUTPUT_TOKENS = 40


@dataclass
class SchedulerAlone:
    """The real scheduler without a model: every row gets as many tokens as the next."""

    max_num_seqs: int
    max_num_batched_tokens: ClassVar[int] = 4096
    decode_sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = SchedulerLimits(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens,
                                 max_image_tokens=1)
        self.scheduler = Scheduler(limits, BlockManager(self.max_num_seqs * 5 + 1, 16))
        self.num_added = 0

    def add_request(self, request_id: str, prompt: PromptInputs, params: SamplingParams) -> list[int]:
        self.num_added += 1
        self.scheduler.add(Sequence(self.num_added, self.num_added, request_id, 0, prompt, params, 0))
        return [len(prompt.token_ids)]

    def pop_started(self) -> list[str]:
        return []

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished()

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    def stats(self) -> EngineStats:
        return EngineStats()

    def step(self) -> list[RequestOutput]:
        batch = self.scheduler.schedule()
        assert batch is not None
        if not batch.is_prefill:
            self.decode_sizes.append(batch.batch_size)
        done = []
        for sequence in self.scheduler.complete():
            assert sequence is not None
            sequence.append(7)
            # Answers of different lengths, so that they do not end together.
            if len(sequence.output_token_ids) > NUM_OUTPUT_TOKENS * (1 + sequence.seq_id % 7) // 7:
                self.scheduler.finish(sequence, "length")
                completion = CompletionOutput(0, "x", sequence.output_token_ids, "length")
                done.append(RequestOutput(sequence.request_id, [completion], 3))
        return done


class Replica(InlineReplica):
    """Its engine is there, and its rows are prepared as soon as they are asked for."""

    def __init__(self, engine: SchedulerAlone, num_rows: int):
        super().__init__("this process")
        self.rows_left = num_rows
        self._engine = engine
        limits = PoolLimits(num_workers=0, task_timeout_seconds=1.0)
        self.endpoint = Endpoint(self.prepare, lambda prepared, output: FinishedRow(prepared.number, None, b""),
                                 limits, failed=failed_prompt)
        self.submit([MadeTask(number=n, made=PromptInputs([n % 97, 2, 3])) for n in range(num_rows)])

    def prepare(self, task: MadeTask) -> Prepared:
        self.rows_left -= 1
        prompt = cast(PromptInputs, task.made)
        return Prepared(number=task.number, name=str(task.number), prompt=prompt, params=task.params)

    def _load(self) -> ReplicaFacts:
        raise AssertionError("it is loaded")


@pytest.mark.parametrize("max_num_seqs", [64, 256, *only_full("a larger batch", 1024)])
def test_decode_steps_are_nearly_full_while_there_are_rows(max_num_seqs: int) -> None:
    engine = SchedulerAlone(max_num_seqs)
    replica = Replica(engine, max_num_seqs * 12)
    replica.serve(None)
    while replica.rows_left:
        replica.poll(0.0)
    while engine.scheduler.num_waiting:
        replica.poll(0.0)
    steady = engine.decode_sizes[len(engine.decode_sizes) // 4 :]
    assert sum(steady) / len(steady) > 0.85 * max_num_seqs, engine.decode_sizes
