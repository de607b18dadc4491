"""One sequence on its way from prompt to finish. Knows nothing of other sequences, tensors or text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from npu_runner.multimodal.inputs import PromptInputs
from npu_runner.outputs import FinishReason
from npu_runner.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A prompt, what was generated after it, and the KV blocks that hold both.

    `arrival` orders sequences first come, first served; the latest is preempted first.
    `num_computed_tokens` counts tokens whose keys and values are in the cache.
    """

    seq_id: int
    arrival: int
    request_id: str
    index: int
    prompt: PromptInputs
    params: SamplingParams
    seed: int
    token_ids: list[int] = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Keys of the full blocks hashed so far, in order; they outlive preemption."""
    num_computed_tokens: int = 0
    num_committed_blocks: int = 0
    """Leading blocks already offered to the prefix cache."""
    num_cached_tokens: int = 0
    """Tokens of the last prefill that came from the prefix cache."""
    slot: int | None = None
    """Row in the running batch's tables and in the sampler's state."""
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt.token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt.token_ids):]

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def finish(self, reason: FinishReason) -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
