"""However many sequences may run together, enough rows wait for that many to run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from npu_runner.batch.job.serving import ServingLoop
from npu_runner.batch.rows.chat import ChatForm
from npu_runner.batch.rows.openai_response import JobStamp
from npu_runner.batch.rows.preprocessing import PreparedRow
from npu_runner.core.block_manager import BlockManager
from npu_runner.core.scheduler import Scheduler, SchedulerLimits
from npu_runner.core.sequence import Sequence
from npu_runner.request.outputs import CompletionOutput, EngineStats, RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.replicas.base import RawRow
from npu_runner.serving.workers.pool import Finished

NUM_OUTPUT_TOKENS = 40


@dataclass
class SchedulerAlone:
    """The real scheduler without a model: every row gets as many tokens as the next."""

    max_num_seqs: int
    decode_sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = SchedulerLimits(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=4096, max_image_tokens=1)
        self.scheduler = Scheduler(limits, BlockManager(self.max_num_seqs * 5 + 1, 16))
        self.num_added = 0

    def add_request(self, request_id: str, prompt: PromptInputs, params: SamplingParams) -> None:
        self.num_added += 1
        self.scheduler.add(Sequence(self.num_added, self.num_added, request_id, 0, prompt, params, 0))

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished()

    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=self.scheduler.num_waiting)

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


class PreparedRows:
    """A pool whose workers are always ahead."""

    def __init__(self, count: int):
        self._rows = deque(
            Finished(RawRow(n, n + 1, 0, 0, b""), PreparedRow(
                custom_id=str(n), prompt=PromptInputs([n % 97, 2, 3]), params=SamplingParams(temperature=0.0),
                form=ChatForm(), expected=None), 10)
            for n in range(count)
        )

    def get(self, timeout: float = 0.0) -> Any:
        return self._rows.popleft() if self._rows else None

    @property
    def is_over(self) -> bool:
        return not self._rows


@pytest.mark.parametrize("max_num_seqs", [64, 256, 1024])
def test_decode_steps_are_nearly_full_while_there_are_rows(max_num_seqs: int) -> None:
    engine = SchedulerAlone(max_num_seqs)
    pool: Any = PreparedRows(max_num_seqs * 12)
    loop = ServingLoop(
        engine, pool, name_of=lambda row: None, stamp=JobStamp(created=0, system_fingerprint="", model_name="")
    )
    while not pool.is_over:
        loop.turn(0.0)
        loop.begun.clear()
        loop.finished.clear()
    steady = engine.decode_sizes[len(engine.decode_sizes) // 4 :]
    assert sum(steady) / len(steady) > 0.85 * max_num_seqs, engine.decode_sizes
