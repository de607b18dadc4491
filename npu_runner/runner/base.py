"""The contract of a model runner. Knows nothing of ranks, devices or strategies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from npu_runner.core.batch import ScheduledBatch

NO_TOKEN = -1


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one generated position: the sampled token's log probability, and the most probable tokens, best first.

    record: int32 (1 + 2 * K,): the log probability's bits, K token ids, the bits of their log probabilities.
    """

    record: np.ndarray

    def packed(self, num_top: int) -> bytes:
        """The record with only the first `num_top` tokens."""
        most = len(self.record) // 2
        if num_top == most:
            return self.record.tobytes()
        return self.record[: 1 + num_top].tobytes() + self.record[1 + most: 1 + most + num_top].tobytes()


@dataclass(frozen=True)
class StepLogprobs:
    """Log probabilities of a step's rows. records: int32 (L, 1 + 2 * K) as in TokenLogprobs; places: int32 (B,), where
    each row's record lies, -1 for a row that did not ask."""

    places: np.ndarray
    records: np.ndarray

    def __getitem__(self, row: int) -> TokenLogprobs | None:
        place = self.places[row]
        return None if place < 0 else TokenLogprobs(self.records[place])


@dataclass
class ModelRunnerOutput:
    """One step's result, row by row of the batch that asked for it.

    `sampled_token_ids[i]` is empty for a chunk that ends before its prompt does, [NO_TOKEN] for a row whose logits
    were not numbers. A row may bring several tokens.
    """

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    logprobs: StepLogprobs | None = None


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes on this rank's device, measured by `profile_run`. Figures a platform cannot measure are 0."""

    total_bytes: int = 0
    free_before_bytes: int = 0
    weights_bytes: int = 0
    activation_peak_bytes: int = 0
    outside_bytes: int = 0
    """Taken since the start beside the allocator: communicators, kernels, streams."""
    other_bytes: int = 0
    """In use by anything else before, other processes included."""


@dataclass(frozen=True)
class RunnerInfo:
    """What the engine must know of a runner that is ready."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_model_len_is_given: bool
    """False where nobody asked for it: then it is what memory and the checkpoint allow, and may be another elsewhere.
    Given back as `max_model_len`, a later run has the same."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_image_tokens: int
    uses_mrope: bool
    ledger: str
    graphs: str
    description: dict[str, str] = field(default_factory=dict)


class ModelRunnerBase(ABC):
    """Loads a model and runs scheduled batches on one rank."""

    @abstractmethod
    def load_model(self) -> None: ...

    @abstractmethod
    def get_model(self) -> nn.Module: ...

    @abstractmethod
    def execute_model(self, batch: ScheduledBatch) -> ModelRunnerOutput | None:
        """Run one step. Only the rank that samples returns an output."""

    @abstractmethod
    def profile_run(self) -> MemoryProfile:
        """Run the worst step the settings allow and measure what it takes."""

    @abstractmethod
    def dummy_run(self, num_tokens: int, batch_size: int, expected_decode_len: int = 1,
                  in_capturing: bool = False) -> None:
        """Drive the real prefill and decode code with made-up requests: `batch_size` prompts of together
        `num_tokens` tokens, then `expected_decode_len` decode steps; only the decode steps while capturing."""
