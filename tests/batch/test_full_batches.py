"""However many sequences may run together, enough rows wait for that many to run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from npu_runner.core.block_manager import BlockManager
from npu_runner.core.scheduler import Scheduler, SchedulerLimits
from npu_runner.core.sequence import Sequence
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.calls.prompt_server import PromptEndpoint
from npu_runner.serving.engine_loop import EngineLoop, Flight, Prepared
from npu_runner.serving.replica import FinishedRow
from tests.full_set import only_full

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

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

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


class PreparedRows(PromptEndpoint):
    """An endpoint whose workers are always ahead."""

    def __init__(self, count: int):
        self.rows = deque(
            Prepared(Flight(n), str(n), PromptInputs([n % 97, 2, 3]), SamplingParams(temperature=0.0), 10)
            for n in range(count)
        )

    def next(self, timeout_seconds: float) -> Prepared | None:
        return self.rows.popleft() if self.rows else None

    def answer(self, flight: Flight, output: RequestOutput) -> FinishedRow:
        return FinishedRow(flight.number, None, b"")


@pytest.mark.parametrize("max_num_seqs", [64, 256, *only_full("a larger batch", 1024)])
def test_decode_steps_are_nearly_full_while_there_are_rows(max_num_seqs: int) -> None:
    engine = SchedulerAlone(max_num_seqs)
    endpoint = PreparedRows(max_num_seqs * 12)
    loop = EngineLoop(cast(Any, engine), endpoint)  # nobody aborts
    while endpoint.rows:
        loop.turn(0.0)
        loop.begun.clear()
        loop.finished.clear()
    steady = engine.decode_sizes[len(engine.decode_sizes) // 4 :]
    assert sum(steady) / len(steady) > 0.85 * max_num_seqs, engine.decode_sizes
