"""The states of Gated DeltaNet layers, in slots beside the KV cache: how many fit, and the pool that holds them.

Slots [0, max_num_seqs) are those of sequences, then come those of padded rows in decode graphs, spare ones for what
drafts leave where they leave states, and snapshots. Spare ones change places with those of sequences
(core/state_slots.py). A state is not written twice the same way, as keys and values are: dummy steps save and
restore the states of running sequences. Knows slots and bytes, not sequences.

Where a head drafts, a slot also has the final hidden state of the last token that its states have seen: the head reads
it together with the next one.

L layers with states, W convolution kernel, C channels, Nv value heads, K and V their dims, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from npu_runner.core.batch import ScheduledBatch
from npu_runner.layers.gated_delta import bind_states
from npu_runner.platforms.gated_delta import GatedDeltaShape, Ring
from npu_runner.platforms.pools import zeros
from npu_runner.platforms.transfers import HOST
from npu_runner.request.limits import GIB, size

UNMEASURED_STATE_BYTES = GIB
"""Where memory is not measured and max_num_seqs is not set."""
# At least one slot in 8 is for snapshots, and one in 4 for drafts, where there are few.
_SNAPSHOT_SHARE, _SPARE_SHARE = 8, 4


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """The states of all layers: convolution tails in the model's dtype, recurrent states in float32.

    `ring_length`: steps of one token between two writes of a state beside a ring (platforms/gated_delta.py); 0: there
    are no rings. `ring_drafts`: of a row, that rings and tails have room for. `hidden_size`: of the hidden state that a
    head reads, in the model's dtype; 0: none does. `num_beside`: such ones beside those of slots, of drafts in rings.
    """

    num_layers: int
    layer: GatedDeltaShape
    element_bytes: int
    ring_length: int = 0
    ring_drafts: int = 0
    hidden_size: int = 0
    num_beside: int = 0

    @property
    def num_places(self) -> int:
        """Slots of a ring."""
        return self.ring_length + self.ring_drafts if self.ring_length else 0

    @property
    def conv_state_shape(self) -> tuple[int, int]:
        """The convolution state of a slot. With drafts in rings, a step's tokens have columns of their own."""
        before, channels = self.layer.conv_state_shape
        return before + (1 + self.ring_drafts if self.ring_drafts else 0), channels

    @property
    def bytes_beside(self) -> int:
        return self.num_beside * self.hidden_size * self.element_bytes

    @property
    def bytes_per_slot(self) -> int:
        columns, channels = self.conv_state_shape
        heads, values, keys = self.layer.state_shape
        state = columns * channels * self.element_bytes + heads * values * keys * 4
        of_layers = self.num_layers * (state + self._ring_bytes) + (4 if self.ring_length else 0)
        return of_layers + self.hidden_size * self.element_bytes

    @property
    def _ring_bytes(self) -> int:
        """Bytes of a ring of one slot and layer, without its start, which all layers share."""
        layer = self.layer
        return self.num_places * (4 * layer.value_size + self.element_bytes * layer.key_size + 4 * layer.num_v_heads)


@dataclass(frozen=True, kw_only=True)
class StateNeeds:
    """The number of slots that a runner needs. `is_given`: the user set `max_num_seqs`, so it may not be lowered.

    `padding_of(max_num_seqs)` rows of a decode graph may be padded. A row may have `drafts_of_row` drafts, and a step
    `drafts_of(max_num_seqs)`. `max_snapshots` None: what is left, and as many as sequences at most.
    """

    max_num_seqs: int
    is_given: bool
    padding_of: Callable[[int], int]
    max_snapshots: int | None
    drafts_of_row: int = 0
    drafts_of: Callable[[int], int] = lambda max_num_seqs: 0

    def least_spares(self, max_num_seqs: int, total: int) -> int:
        """The least number of spares among `total` slots: enough for the drafts of a row; and a share, where there may
        be fewer sequences."""
        share = 0 if self.is_given else total // _SPARE_SHARE
        return min(self.drafts_of(max_num_seqs), max(self.drafts_of_row, share))

    def num_requested(self) -> int:
        """Slots, where memory is not measured: spare ones and snapshots for as many as there are sequences."""
        asked = self.max_num_seqs + self.padding_of(self.max_num_seqs)
        snapshots = -(-asked // _SNAPSHOT_SHARE) if self.max_snapshots is None else self.max_snapshots
        spares = min(self.drafts_of(self.max_num_seqs), max(self.drafts_of_row, self.max_num_seqs))
        return asked + snapshots + spares


@dataclass(frozen=True, kw_only=True)
class StatePlan:
    """Slots of each kind. `bytes_beside`: what stands beside slots. `lowered_from`: the default max_num_seqs that did
    not fit."""

    max_num_seqs: int
    num_padding: int
    num_snapshots: int
    bytes_per_slot: int
    num_spares: int = 0
    bytes_beside: int = 0
    lowered_from: int | None = None

    @property
    def first_spare(self) -> int:
        return self.max_num_seqs + self.num_padding

    @property
    def spares(self) -> range:
        return range(self.first_spare, self.first_spare + self.num_spares)

    @property
    def first_snapshot(self) -> int:
        return self.spares.stop

    @property
    def num_slots(self) -> int:
        return self.first_snapshot + self.num_snapshots

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.bytes_per_slot + self.bytes_beside

    def describe(self) -> list[str]:
        spares = f"{self.num_spares} for drafts, " if self.num_spares else ""
        lines = [f"{self.num_slots} states of {size(self.bytes_per_slot)}: {self.max_num_seqs} sequences, "
                 f"{self.num_padding} padded rows, {spares}{self.num_snapshots} snapshots for the prefix cache"]
        if self.lowered_from is not None:
            lines.append(f"max_num_seqs lowered from {self.lowered_from} to {self.max_num_seqs}: states take at most "
                         "half of what weights and activations leave")
        return lines


def plan_states(shape: StateShape, needs: StateNeeds, *, budget: int | None) -> StatePlan:
    """The most sequences, up to those of `needs`, whose states fit `budget` bytes (None: not measured).

    A plan of no sequences means that not even one fits, or fewer than requested; the caller reports it.
    """
    if budget is None:
        asked = needs.num_requested() * shape.bytes_per_slot + shape.bytes_beside
        budget = max(UNMEASURED_STATE_BYTES, asked if needs.is_given else 0)
    total, max_snapshots = max(0, budget - shape.bytes_beside) // shape.bytes_per_slot, needs.max_snapshots
    share = total // _SNAPSHOT_SHARE if max_snapshots is None else min(total // _SNAPSHOT_SHARE, max_snapshots)
    kept, wanted = 0 if needs.is_given else share, needs.max_num_seqs
    fits = wanted
    while fits > 0 and fits + needs.padding_of(fits) + needs.least_spares(fits, total) > total - kept:
        fits -= 1
    if not fits or (needs.is_given and fits < wanted):
        return StatePlan(max_num_seqs=0, num_padding=0, num_snapshots=0, bytes_per_slot=shape.bytes_per_slot)
    padding = needs.padding_of(fits)
    left = total - fits - padding
    spares = min(needs.drafts_of(fits), max(needs.least_spares(fits, total), left - share))
    return StatePlan(
        max_num_seqs=fits, num_padding=padding, bytes_per_slot=shape.bytes_per_slot, num_spares=spares,
        bytes_beside=shape.bytes_beside,
        num_snapshots=min(left - spares, fits if max_snapshots is None else max_snapshots),
        lowered_from=wanted if fits < wanted else None)


class StatePool:
    """conv_states (L, slots, W - 1 or more, C), states (L, slots, Nv, V, K), rings; bound to the layers of `model`.
    Beside them hidden_SD (slots and what is beside, D), None where no head reads it. Zeros."""

    def __init__(self, plan: StatePlan, shape: StateShape, model: nn.Module, dtype: torch.dtype, device: torch.device):
        self.plan = plan
        self.conv_states = zeros((shape.num_layers, plan.num_slots, *shape.conv_state_shape), dtype, device)
        self.states = zeros((shape.num_layers, plan.num_slots, *shape.layer.state_shape), torch.float32, device)
        size = shape.hidden_size
        self.hidden_SD = zeros((plan.num_slots + shape.num_beside, size), dtype, device) if size else None
        self.rings = _make_rings(plan.num_slots, shape, dtype, device) if shape.ring_length else None
        bind_states(model, self.conv_states, self.states, self.rings)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept, (L or 1, slots, ...)."""
        rings = self.rings
        if rings is None:
            return self._snapshot_tensors
        return [*self._snapshot_tensors, rings.updates, rings.keys, rings.log_decays, rings.starts[None]]

    @property
    def draft_slots(self) -> range | None:
        """The slots that drafts leave states in; None: they leave none."""
        return self.plan.spares if self.rings is None else None

    @property
    def _snapshot_tensors(self) -> list[Tensor]:
        return [self.conv_states, self.states, *([] if self.hidden_SD is None else [self.hidden_SD[None]])]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the states of all layers from slot to slot: (source, target) of each pair. Rings are no part of it: a
        snapshot has none, and what is loaded goes on with a prompt."""
        for tensor in self._snapshot_tensors:
            for source, target in pairs:
                tensor[:, target].copy_(tensor[:, source])

    def end_prompts(self, slots_B: Tensor, context_lens_B: Tensor) -> None:
        """Prompts, or chunks of them, of these lengths have left their states: the rings of their slots are empty."""
        if self.rings is not None:
            self.rings.starts.index_copy_(0, slots_B.long(), context_lens_B.int())

    def zero(self) -> None:
        """Every slot is as it was made: no sequence has begun in it."""
        for tensor in self.tensors:
            tensor.zero_()

    @contextmanager
    def preserve(self, dummies: Sequence[ScheduledBatch]) -> Iterator[None]:
        """Save the slots of these dummy steps, the first rows and the first spares, and restore them afterwards. They
        are saved in host memory: a device may have no room for them."""
        num_seqs = max(batch.batch_size for batch in dummies)
        num_drafts = max(batch.num_tokens - batch.batch_size if batch.has_drafts else 0 for batch in dummies)
        num_drafts = min(num_drafts, self.plan.num_spares)  # drafts in rings leave no states
        parts = [tensor.narrow(1, first, num) for tensor in self.tensors
                 for first, num in ((0, num_seqs), (self.plan.first_spare, num_drafts))]
        kept = [part.to(HOST, copy=True) for part in parts]
        try:
            yield
        finally:
            for part, values in zip(parts, kept, strict=True):
                part.copy_(values)


def _make_rings(num_slots: int, shape: StateShape, dtype: torch.dtype, device: torch.device) -> Ring:
    """(L, slots, ...) of each, but for the starts."""
    layer, many = shape.layer, (shape.num_layers, num_slots)
    return Ring(
        updates=zeros((*many, shape.num_places, layer.num_v_heads, layer.head_v_dim), torch.float32, device),
        keys=zeros((*many, shape.num_places, layer.num_k_heads, layer.head_k_dim), dtype, device),
        log_decays=zeros((*many, layer.num_v_heads, shape.num_places), torch.float32, device),
        starts=zeros((num_slots,), torch.int32, device),
        length=shape.ring_length)
