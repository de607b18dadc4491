"""The contract of a model runner. Knows nothing of ranks, devices or strategies."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import nn

from npu_runner.core.batch import ScheduledBatch
from npu_runner.errors import RequestError
from npu_runner.request.speculative import SpeculativeConfig
from npu_runner.sampling.sampler import HostSample


@dataclass(frozen=True)
class StepLogprobs:
    """Log probabilities of a step's rows, one generated position each.

    records: int32 (L, 2 + 2 * K): the sampled token's log probability as bits, its rank, the K most probable token ids,
    best first, the bits of their log probabilities. places: where each row's record lies, -1 for a row without one.
    """

    places: list[int]
    records: np.ndarray

    @classmethod
    def from_sample(cls, num_rows: int, rows: np.ndarray, sample: HostSample) -> StepLogprobs | None:
        """The log probabilities of `sample`, whose rows are `rows` of a step's `num_rows`; None where no row wants any.
        """
        if sample.records_LC is None:
            return None
        places_B = np.full(num_rows, -1, dtype=np.int32)
        places_B[rows[sample.logprob_rows]] = np.arange(len(sample.logprob_rows), dtype=np.int32)
        return cls(places_B.tolist(), sample.records_LC)

    def packed(self, row: int, num_top: int) -> bytes:
        """The row's record with only the first `num_top` tokens; empty if it has none."""
        place, most = self.places[row], self.records.shape[1] // 2 - 1
        if place < 0:
            return b""
        size = self.records.itemsize
        start, end = size * place * (2 + 2 * most), size * (place + 1) * (2 + 2 * most)
        if num_top == most:
            return self._bytes[start:end]
        top, values = start + size * (2 + num_top), start + size * (2 + most)
        return self._bytes[start:top] + self._bytes[values: values + size * num_top]

    @functools.cached_property
    def _bytes(self) -> bytes:
        """All of them at once: row by row numpy takes longer than the copy."""
        return np.ascontiguousarray(self.records).tobytes()


@dataclass
class ModelRunnerOutput:
    """One step's result, row by row of the batch that asked for it.

    `sampled_token_ids[i]` is the sampler's NO_TOKEN or ALL_BANNED for a row that has none. If a row is a chunk before
    its prompt's end, or the step has drafts, there is a list for each row: empty for such a chunk, else the drafts that
    were kept and one token more. `problems`: why a row's last token is none, if known.
    """

    sampled_token_ids: Sequence[int] | Sequence[list[int]]
    logprobs: StepLogprobs | None = None
    later_logprobs: Sequence[StepLogprobs | None] = ()
    """The logprobs of the second tokens of rows, of their third, ..."""
    problems: dict[int, str] = field(default_factory=dict)
    prompt_scores: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    """(row, place in its prompt of the first token, records) where log probabilities of prompts are wanted; records:
    int32 (L, 2 + 2 * K), see runner/token_results.py."""
    prompt_states: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    """(row, place in its sequence of the first token, states) where hidden states of all tokens are wanted; states:
    float32 (L, D), or (L, N * D) of N layers."""
    pooled: dict[int, np.ndarray] | None = None
    """For a model that pools, the numbers of the rows whose prompt has ended, float32, in the place of tokens. NaN
    where the model's output is no number."""
    rules: dict[int, RequestError | None] = field(default_factory=dict)
    """The results of `ScheduledBatch.new_rules`, by number, once known: None where the rules are built."""
    spec_token_ids: Sequence[list[int]] = ()
    """Draft proposals of each row: the text that its grammar forces, then the proposals of the model's head. Empty
    where nothing is drafted."""
    num_forced: Sequence[int] = ()
    """The number of forced tokens among them, by row."""

    def logprobs_at(self, place: int) -> StepLogprobs | None:
        """The logprobs of the rows' tokens with this index, from 0 on."""
        return self.later_logprobs[place - 1] if place else self.logprobs

    def tokens_of(self, row: int) -> list[int]:
        tokens = self.sampled_token_ids[row]
        return [tokens] if isinstance(tokens, int) else tokens


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes on this rank's device, measured by `profile_run`. Figures a platform cannot measure are 0."""

    total_bytes: int = 0
    weights_bytes: int = 0
    activation_peak_bytes: int = 0
    staging_bytes: int = 0
    """Bytes of the next step's images while this one runs, in memory that no step uses."""
    outside_bytes: int = 0
    """Taken since the start beside the allocator: communicators, kernels, streams."""
    other_bytes: int = 0
    """In use by anything else before, other processes included."""
    graph_bytes: int = 0
    """Left free for graphs of long prefills."""


@dataclass(frozen=True)
class StateInfo:
    """Slots of the state pool that hold snapshots for the prefix cache, and spare ones for what drafts leave."""

    first_snapshot: int
    num_snapshots: int
    spares: range


@dataclass(frozen=True)
class RunnerInfo:
    """Facts of a loaded runner, for the engine."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_model_len_is_given: bool
    """False if it was not set: then it is what memory and the checkpoint allow, and may differ on another host.
    Given back as `max_model_len`, a later run has the same."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_image_tokens: int
    max_tower_values: int
    """The numbers in the arrays of the images of a step that the start ran, where transformers' processor makes them;
    0: images are prepared here, within bounds."""
    uses_mrope: bool
    num_steps_under_way: int
    """Most steps submitted before the oldest is collected: 2 with async_scheduling, else 1."""
    sliding_window: int | None
    """The most tokens that any layer sees; None where one sees all. Blocks behind it may be given back."""
    ledger: str
    graphs: str
    state: StateInfo | None = None
    """None means that the model has no state beside the KV cache."""
    speculative: SpeculativeConfig | None = None
    """The drafts of steps; None: there are none."""
    description: dict[str, str] = field(default_factory=dict)
    start_seconds: dict[str, float] = field(default_factory=dict)
    """This rank's seconds by phase, in order. Work that the device got in one phase may still run in the next."""


class StepHandle(Protocol):
    """A step under way."""

    def is_done(self) -> bool:
        """Whether `collect` would not have to wait."""


class ModelRunnerBase(ABC):
    """Loads a model and runs scheduled batches on one rank."""

    @abstractmethod
    def load_model(self) -> None: ...

    @abstractmethod
    def get_model(self) -> nn.Module: ...

    def execute_model(self, batch: ScheduledBatch) -> ModelRunnerOutput | None:
        """Run one step, with nothing else under way. Only the rank that samples returns an output."""
        return self.collect(self.submit(batch))

    @abstractmethod
    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Hand one step to the device, behind those that are under way; `collect` takes what is returned."""

    @abstractmethod
    def collect(self, step: Any) -> ModelRunnerOutput | None:
        """The output of the oldest step under way. Only the rank that samples returns one."""

    @abstractmethod
    def profile_run(self) -> MemoryProfile:
        """Run the worst step the settings allow and measure what it takes."""

    @abstractmethod
    def dummy_run(self, num_tokens: int, batch_size: int, expected_decode_len: int = 1,
                  in_capturing: bool = False) -> None:
        """Run the real prefill and decode code with dummy requests: `batch_size` prompts of together `num_tokens`
        tokens, then `expected_decode_len` decode steps. While capturing, only the decode steps."""
