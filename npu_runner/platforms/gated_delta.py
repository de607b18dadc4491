"""The contract of a vendor for Gated DeltaNet layers (arXiv 2412.06464): the convolution and the gated delta rule.

Knows no model and no pool: states come as tensors, a slot a sequence, and are updated in place.

T tokens of a step, B sequences of a step, Nk and Nv key and value heads, Dk and Dv their dims, C = 2 Nk Dk + Nv Dv
channels (queries, keys, values), W convolution kernel; all of this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npu_runner.errors import ConfigError
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs

CHUNK_SIZE = 64
"""Prompts are computed in chunks that begin at positions that are multiples of this; states are saved at such ones."""
L2_EPS = 1e-6
"""Added to the sum of squares of a query or key before it is normalised."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaShape:
    """One rank's share of a Gated DeltaNet layer. num_v_heads is a multiple of num_k_heads: v head h uses k head
    h // (Nv / Nk)."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int

    @property
    def key_size(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value_size(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @property
    def num_channels(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def conv_state_shape(self) -> tuple[int, int]:
        """(W - 1, C): of one sequence, in the model's dtype."""
        return self.conv_kernel_size - 1, self.num_channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(Nv, Dv, Dk): of one sequence, in float32."""
        return self.num_v_heads, self.head_v_dim, self.head_k_dim


class Ring(NamedTuple):
    """The last tokens of each slot, which its state does not hold yet: a token is `update key^T` behind its decay.

    The token at position p lies in place p modulo P. How many tokens there are follows from lengths alone: (context
    length - 1 - start) modulo L. So what lies behind a sequence's length is in no ring: drafts that were refused.
    """

    updates: Tensor
    """(slots, P, Nv, Dv) float32."""
    keys: Tensor
    """(slots, P, Nk, Dk) in the model's dtype."""
    log_decays: Tensor
    """(slots, Nv, P) float32."""
    starts: Tensor
    """(slots,) int32, of all layers: the sequence's length at a write of its state: when its prompt ended, or a chunk
    of it, or in a step with drafts."""
    length: int
    """L: steps of one token between two writes of the state."""

    @property
    def num_places(self) -> int:
        """P: L, and as many more as a row has drafts at most."""
        return self.updates.shape[-3]

    def for_layer(self, layer: int) -> Ring:
        """The ring of one layer. This one has a dimension of layers before the others, except in `starts`."""
        return self._replace(updates=self.updates[layer], keys=self.keys[layer], log_decays=self.log_decays[layer])


def ring_length(least: int, most_drafts: int) -> int:
    """L of Ring, `least` or more. A step that finds a ring empty leaves all of its tokens there, and a plain step finds
    fewer than L. Without drafts any number will do."""
    return max(least, most_drafts + 2) if most_drafts else least


@dataclass(frozen=True, kw_only=True)
class StateSave:
    """The state after `offset` tokens of row `row` in this step is to be written to `slot`, too.

    The position behind these tokens is a multiple of CHUNK_SIZE, or `offset` is the row's length.
    """

    row: int
    offset: int
    slot: int


def check_saves(query_lens_B: Sequence[int], context_lens_B: Sequence[int], saves: Sequence[StateSave]) -> None:
    """Raises ValueError for a save that is not as StateSave says."""
    for save in saves:
        if save.row >= len(query_lens_B):
            raise ValueError(f"the state of row {save.row} is to be saved in a step of {len(query_lens_B)} rows")
        query_len = query_lens_B[save.row]
        position = context_lens_B[save.row] - query_len + save.offset
        if not 0 < save.offset <= query_len or (position % CHUNK_SIZE and save.offset != query_len):
            raise ValueError(f"the state after {save.offset} of a row's {query_len} tokens, at position {position}, is "
                             f"to be saved: that is no multiple of {CHUNK_SIZE} within the row, and not its end")


class GatedDeltaBackend(ABC):
    """Both parts of a layer that carry a state. Made for one GatedDeltaShape and one dtype of the model.

    A prefill step has rows of any length, 1 included. A row continues the state in its slot. If it begins its sequence,
    it starts from zeros, and the slot is not read. A decode step (`metadata.is_prefill` False) has one token a row and
    always continues. It must be capturable in a graph: it takes slots from `metadata.state_slots_B` (B,) int32 on the
    device, and nothing from the host. The slots of a step, those of padded rows and saves among them, all differ.

    A decode step with drafts has `metadata.state_plan`, and a slot a token. A sequence's tokens follow one another. The
    first continues the state in its slot, as without drafts, and each other one what the token before it has left. Each
    leaves its own state in its own slot; what lay there is read of a sequence's first token only.
    """

    name: str
    """For logs and reports: what computes it."""

    @property
    def form(self) -> str:
        """The same in more words: what decode steps go through, and why not through something fused."""
        return self.name

    def write(self, pool: Tensor, slots: Tensor, values: Tensor) -> None:
        """pool[slots] = values, in place, for int64 slots that differ. Must be capturable in a graph."""
        pool.index_copy_(0, slots, values)

    @abstractmethod
    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], saves: Sequence[StateSave],
                     device: torch.device) -> Any:
        """Host-side preparation of a prefill step, once for all layers: it comes back as `metadata.state_plan`.

        A row begins its sequence where its context length is its query length.
        """

    def plan_drafts(self, runs_T: Tensor, query_lens_B: Sequence[int] | None) -> Any:
        """Preparation of a decode step with drafts, once for all layers: it comes back as `metadata.state_plan`.

        `runs_T` says on the device what `query_lens_B` says (StepInputs.runs). None: the plan is part of a graph, for
        steps with drafts and without. Padded rows then have one token each, and may share slots: what they read and
        leave there means nothing. Raises ConfigError where the backend's StateFacts allow no such step.
        """
        raise ConfigError(f"Gated DeltaNet through {self.name} verifies no drafts; leave speculative_config out")

    @abstractmethod
    def convolve(self, x_TC: Tensor, weight_CW: Tensor, conv_state: Tensor, metadata: AttentionMetadata) -> Tensor:
        """silu of the causal depthwise convolution of each row, (T, C) in x's dtype; the last tap is the token itself.

        conv_state (slots, W - 1, C), x's dtype: the inputs before the row's tokens, oldest first. The new ones are
        written to the row's slot, and those of the saves. The result is contiguous.
        """

    @abstractmethod
    def delta_rule(self, qkv_TC: Tensor, a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor,
                   state: Tensor, metadata: AttentionMetadata) -> Tensor:
        """The gated delta rule over the convolved queries, keys and values, (T, Nv, Dv) in qkv's dtype.

        Of each token and v head: beta = sigmoid(b) in b's dtype; g = neg_exp_A * softplus(a.float() + dt_bias);
        q and k l2-normalised in float32 (x * rsqrt(sum x^2 + L2_EPS)), q times Dk^-1/2; then, in float32,
        S <- S exp(g); S <- S + (v - S k) beta k^T; o = S q.

        neg_exp_A_V = -exp(A_log) and dt_bias_V are float32. state (slots, Nv, Dv, Dk) float32, updated in place at the
        row's slot, and written for the saves.
        """


class RingedGatedDelta(GatedDeltaBackend):
    """A backend whose decode steps may keep tokens in a ring, and write a state every L tokens only.

    Drafts leave no states: their tokens go into the ring, where those that are kept are counted by the next step's
    lengths. All tokens of a sequence have its slot. Likewise the input of the convolution at position p lies in column
    p modulo the number of columns: conv_state (slots, W - 1 + num, C), where num is 0 without drafts, and else the most
    tokens of a row. Inputs of refused drafts are written over before a step reads their columns.
    """

    @abstractmethod
    def plan_drafts_in_ring(self, inputs: StepInputs, ring: Ring) -> Any:
        """`state_plan` of a decode step with drafts, once for all layers. Must be capturable in a graph. Sequences may
        have one token, and padded rows may share slots.

        A ring that has no room for a row's tokens and one more is written into the state in this step, as it was before
        them: `ring.starts` says so from here on.
        """

    @abstractmethod
    def step_in_ring(self, qkv_TC: Tensor, a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor,
                     state: Tensor, ring: Ring, metadata: AttentionMetadata) -> Tensor:
        """The `delta_rule` of a decode step. The token goes into the slot's ring; the L-th goes into the state, with
        all of the ring, which is empty then. A prefill finds every ring empty: no decode step comes before it in its
        slot.

        With `metadata.state_plan` a row's tokens follow one another, and all of them go into the ring.
        """
