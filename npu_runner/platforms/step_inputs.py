"""The tensors that one step passes to attention and to layers with states. Knows no vendor and no kernel.

Shapes: T tokens of a step, B sequences of a step, W blocks per sequence, S block size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor


class StepInputs(NamedTuple):
    """The inputs of one step's forward, int32 on the device. Other code passes them on whole.

    Compiled code takes it as one argument (dynamo sees through it) or flat, in this order: `StepInputs(*tensors)`.
    """

    tokens: Tensor
    """A prefill's token ids (T,). In a decode step (S,): the last token of each running sequence's slot, written by the
    step before. Rows look theirs up by `token_slots`. A step with drafts brings tokens of its own."""
    token_slots: Tensor
    """(B,) where the tokens of a decode step's rows lie in `tokens`; padded rows of a graph find some valid one."""
    positions: Tensor
    """(T,), or (3, T) for a prefill of an M-RoPE model."""
    slot_mapping: Tensor
    """(T,) flat slot (block * S + offset) of each token; padding points into block 0."""
    context_lens: Tensor
    """(B,) tokens of each sequence including this step's. int64 if graphs need it (GraphCompiler)."""
    block_tables: Tensor
    """(B, W), W blocks of the longest sequence that may come. Entries behind a row's context are undefined."""
    state_slots: Tensor
    """(B,) where each sequence's states lie; padded rows of a graph have slots of their own. In a step with drafts a
    row is a token, which leaves its state there."""
    runs: Tensor
    """(B,) of a decode step: how many tokens its sequence has, at the first of them; at another one minus its place
    among them. All 1 without drafts. Read where layers keep a state, and steps with drafts run in graphs."""
    sequences: Tensor | None = None
    """(3, S) of a step whose tokens attend together with their sequence's others (`sequences_of_tokens`), else None."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> StepInputs:
        """Select the fields from `tensors`, by name; `sequences` may be missing."""
        found = cls(*(tensors[name] for name in cls._fields[:-1]))
        return found._replace(sequences=tensors.get("sequences"))

    def given(self) -> list[Tensor]:
        """The fields that are not None, in order."""
        return [tensor for tensor in self if tensor is not None]


@dataclass(frozen=True)
class PromptEnds:
    """The last tokens of a prefill's rows. Where nothing else is read of it, its last layer makes only these: of the
    others it needs keys and values."""

    rows_B: Tensor
    """int32: which tokens of the step they are; of padded rows of a graph some valid ones."""
    plan: Any = None
    """`AttentionBackend.plan_decode` of the step's contexts; None in a graph."""


@dataclass
class AttentionMetadata:
    """Where this step's tokens lie, as in StepInputs; `plan` belongs to the attention backend that made it.

    `state_plan` likewise to the Gated DeltaNet backend: None in a decode step without drafts, and for models without
    such layers.
    """

    is_prefill: bool
    slot_mapping_T: Tensor
    context_lens_B: Tensor
    block_tables_BW: Tensor
    plan: Any = None
    state_slots_B: Tensor | None = None
    state_plan: Any = None
    ends: PromptEnds | None = None
    """In the last layer of a prefill of which only these are read: what comes behind attention has their rows alone."""
    sequences_3S: Tensor | None = None
    """`StepInputs.sequences`."""
    derived: dict[Any, Any] = field(default_factory=dict)
    """Results that a backend derives from this step's tensors in one layer and reuses in the next, by names of its own.
    """

    @classmethod
    def from_inputs(cls, inputs: StepInputs, plan: Any, *, is_prefill: bool, state_plan: Any = None,
                    ends: PromptEnds | None = None) -> AttentionMetadata:
        return cls(is_prefill, inputs.slot_mapping, inputs.context_lens, inputs.block_tables, plan,
                   inputs.state_slots, state_plan, ends, inputs.sequences)

    def of_ends(self, x: Tensor) -> Tensor:
        """The rows of `x` (T, ...) at the ends, (B, ...); all rows if there are no ends."""
        return x if self.ends is None else x.index_select(0, self.ends.rows_B)

    def without_ends(self) -> AttentionMetadata:
        """For the layers before the last one."""
        return self if self.ends is None else replace(self, ends=None)

    def as_decode(self) -> AttentionMetadata:
        """The ends as rows of a decode step, whose keys and values are stored."""
        assert self.ends is not None, "callers look first"
        return AttentionMetadata(False, self.slot_mapping_T, self.context_lens_B, self.block_tables_BW, self.ends.plan)
