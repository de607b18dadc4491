"""One sequence on its way from prompt to finish. Knows nothing of other sequences, tensors or text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from npu_runner.core.draft_history import DraftHistory
from npu_runner.request.outputs import FinishReason
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt, what was generated after it, and the KV blocks that hold both.

    `arrival` orders sequences first come, first served; the latest is preempted first.
    `num_computed_tokens` counts tokens whose keys and values are in the cache, or will be once the steps under way have
    run.
    """

    seq_id: int
    arrival: int
    request_id: str
    index: int
    prompt: PromptInputs
    params: SamplingParams
    seed: int
    pooling: PoolingParams | None = None
    """The prompt is for a vector, which comes in the place of its first token."""
    scored_ends: tuple[int, ...] = ()
    """Not empty: nothing is generated. The log probabilities of the output tokens, which are given, are wanted, and
    those of these tokens behind the last."""
    scores_prompt: bool = False
    """The log probabilities of its prompt are wanted and have not all arrived: the prompt is computed whole."""
    is_apart: bool = False
    """It takes nothing from the prefix cache: with that it brought what is no number."""
    max_num_tokens: int | None = None
    """Tokens of prompt and output after which the sequence is in no further step; None if its end is set from
    outside."""
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    block_table: list[int] = field(default_factory=list)
    num_null_blocks: int = 0
    """Leading entries of the table that are the null block: they lie behind every layer's sliding window."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Keys of the full blocks hashed so far, in order; they outlive preemption."""
    num_computed_tokens: int = 0
    num_committed_blocks: int = 0
    """Leading blocks already offered to the prefix cache."""
    num_cached_tokens: int = 0
    """Tokens of the last prefill that came from the prefix cache."""
    copy_source: int = 0
    """Held for a copy of its first tokens, which count as cached; 0: none."""
    shared_block: int = 0
    """The block that the sequence's last token reads in this step, in the place of its own one, which is copied later.
    """
    state_source: int | None = None
    """Snapshot that the last prefill went on from, where the model has state."""
    snapshot_positions: tuple[int, ...] = ()
    """Where the last prefill is to leave snapshots of the state, in tokens."""
    slot: int | None = None
    """Row in the running batch's tables and in the sampler's state."""
    num_preemptions: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    """The generated tokens. Completions of a request share the prompt's."""
    num_tokens: int = field(init=False)
    """Tokens of prompt and output, with the expected ones of steps under way."""
    num_expected: int = 0
    """Tokens that steps under way will bring; the host does not know them yet."""
    epoch: int = 0
    """Results of a step count only in the epoch that planned the step."""
    num_prompt_tokens: int = field(init=False)
    drafting: DraftHistory | None = None
    """None: it had no draft yet."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt.token_ids)
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)

    def reset(self) -> None:
        """Hold nothing and have nothing computed, whatever stood here; the tokens that have arrived stay."""
        self.status, self.slot = SequenceStatus.WAITING, None
        self.block_table = []
        self.num_null_blocks = 0
        self.num_computed_tokens = self.num_committed_blocks = self.num_cached_tokens = 0
        self.copy_source = self.shared_block = 0
        self.state_source, self.snapshot_positions = None, ()
        self.drafting = None
        self.forget_expected()

    def append(self, token: int) -> None:
        """One more generated token: the next of those expected, if any is; else one that was drafted."""
        self.output_token_ids.append(token)
        if self.num_expected:
            self.num_expected -= 1
        else:  # a draft that was kept: its step has computed the token before it, too
            self.num_tokens += 1
            self.num_computed_tokens += 1

    def forget_expected(self) -> None:
        """Steps under way bring nothing that counts: they were planned for what is no more."""
        self.num_expected = 0
        self.num_tokens = self.num_prompt_tokens + len(self.output_token_ids)
        self.epoch += 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Ids of tokens [start, end), prompt and output in a row."""
        num_prompt = self.num_prompt_tokens
        if end <= num_prompt:
            return self.prompt.token_ids[start:end]
        output = self.output_token_ids[max(0, start - num_prompt) : end - num_prompt]
        return [*self.prompt.token_ids[start:num_prompt], *output] if start < num_prompt else output

    def token_array(self, start: int, end: int) -> np.ndarray:
        """The same, int32 (end - start,). It is not to be written to: the prompt's are a view."""
        if end <= self.num_prompt_tokens:
            return self.prompt.token_array[start:end]
        return np.asarray(self.tokens(start, end), dtype=np.int32)

    @property
    def most_cached_tokens(self) -> int:
        """Tokens that may come from the prefix cache, which has their keys and values and not their logits."""
        if self.scores_prompt or self.returns_states or self.is_apart:
            return 0
        return (self.num_prompt_tokens if self.scored_ends else self.num_tokens) - 1

    @property
    def returns_states(self) -> bool:
        """The hidden states of all computed tokens are wanted."""
        return self.params.return_hidden_states or (self.pooling is not None and self.pooling.keeps_tokens)

    @property
    def num_known_tokens(self) -> int:
        """Tokens of prompt and output that have arrived."""
        return self.num_tokens - self.num_expected

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_at_its_start(self) -> bool:
        """Nothing is computed beyond what the prefix cache had."""
        return self.num_computed_tokens == self.num_cached_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def finish(self, reason: FinishReason) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.epoch += 1
