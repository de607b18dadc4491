"""The states of Gated DeltaNet layers, in slots beside the KV cache: how many fit, and the pool that holds them.

Slots [0, max_num_seqs) are those of sequences, then come those of padded rows in decode graphs, then snapshots. A state
is not written twice the same way, as keys and values are: made-up steps keep those that serve aside. Knows slots and
bytes, not sequences.

L layers with states, W convolution kernel, C channels, Nv value heads, K and V their dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from npu_runner.layers.gated_delta import bind_states
from npu_runner.platforms.gated_delta import GatedDeltaShape
from npu_runner.platforms.pools import zeros
from npu_runner.platforms.transfers import HOST
from npu_runner.request.limits import GIB, size

UNMEASURED_STATE_BYTES = GIB
"""Where memory is not measured and max_num_seqs is not set."""
# One slot in so many is for snapshots at least, where there are few.
_SNAPSHOT_SHARE = 8


@dataclass(frozen=True, kw_only=True)
class StateShape:
    """The states of all layers: convolution tails in the model's dtype, recurrent states in float32."""

    num_layers: int
    layer: GatedDeltaShape
    element_bytes: int

    @property
    def bytes_per_slot(self) -> int:
        before, channels = self.layer.conv_state_shape
        heads, values, keys = self.layer.state_shape
        return self.num_layers * (before * channels * self.element_bytes + heads * values * keys * 4)


@dataclass(frozen=True, kw_only=True)
class StatePlan:
    """Slots of each kind. `lowered_from`: the default max_num_seqs that did not fit."""

    max_num_seqs: int
    num_padding: int
    num_snapshots: int
    bytes_per_slot: int
    lowered_from: int | None = None

    @property
    def first_snapshot(self) -> int:
        return self.max_num_seqs + self.num_padding

    @property
    def num_slots(self) -> int:
        return self.first_snapshot + self.num_snapshots

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.bytes_per_slot

    def describe(self) -> list[str]:
        lines = [f"{self.num_slots} states of {size(self.bytes_per_slot)}: {self.max_num_seqs} sequences, "
                 f"{self.num_padding} padded rows, {self.num_snapshots} snapshots for the prefix cache"]
        if self.lowered_from is not None:
            lines.append(f"max_num_seqs lowered from {self.lowered_from} to {self.max_num_seqs}: states take at most "
                         "half of what weights and activations leave")
        return lines


def plan_states(shape: StateShape, *, budget: int | None, max_num_seqs: int, is_given: bool,
                padding_of: Callable[[int], int], max_snapshots: int | None) -> StatePlan:
    """The most sequences, up to `max_num_seqs`, whose states fit `budget` bytes (None: not measured).

    `padding_of(max_num_seqs)` rows of a decode graph may be padded. A plan of no sequences means that not even one
    fits, or fewer than requested; the caller reports it. `max_snapshots` None: what is left, and as many as sequences
    at most.
    """
    if budget is None:
        asked = max_num_seqs + padding_of(max_num_seqs)
        asked += -(-asked // _SNAPSHOT_SHARE) if max_snapshots is None else max_snapshots
        budget = max(UNMEASURED_STATE_BYTES, asked * shape.bytes_per_slot if is_given else 0)
    total = max(0, budget) // shape.bytes_per_slot
    kept = 0 if is_given else total // _SNAPSHOT_SHARE
    if max_snapshots is not None:
        kept = min(kept, max_snapshots)
    fits = max_num_seqs
    while fits > 0 and fits + padding_of(fits) > total - kept:
        fits -= 1
    if is_given and fits < max_num_seqs:
        fits = 0
    padding = padding_of(fits) if fits else 0
    return StatePlan(
        max_num_seqs=fits, num_padding=padding, bytes_per_slot=shape.bytes_per_slot,
        num_snapshots=min(max(0, total - fits - padding), fits if max_snapshots is None else max_snapshots),
        lowered_from=max_num_seqs if 0 < fits < max_num_seqs else None,
    )


class StatePool:
    """conv_states (L, slots, W - 1, C) and states (L, slots, Nv, V, K), bound to the layers of `model`; zeros."""

    def __init__(self, plan: StatePlan, shape: StateShape, model: nn.Module, dtype: torch.dtype, device: torch.device):
        self.plan = plan
        self.conv_states = zeros((shape.num_layers, plan.num_slots, *shape.layer.conv_state_shape), dtype, device)
        self.states = zeros((shape.num_layers, plan.num_slots, *shape.layer.state_shape), torch.float32, device)
        bind_states(model, self.conv_states, self.states)

    @property
    def num_bytes(self) -> int:
        return self.conv_states.nbytes + self.states.nbytes

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the states of all layers from slot to slot: (source, target) of each pair."""
        for tensor in (self.conv_states, self.states):
            for source, target in pairs:
                tensor[:, target].copy_(tensor[:, source])

    def zero(self) -> None:
        """Every slot is as it was made: no sequence has begun in it."""
        self.conv_states.zero_()
        self.states.zero_()

    @contextmanager
    def aside(self, num_seqs: int) -> Iterator[None]:
        """What the first `num_seqs` slots hold is back afterwards. It waits in host memory: a device may have no room
        for it."""
        kept = [tensor[:, :num_seqs].to(HOST, copy=True) for tensor in (self.conv_states, self.states)]
        try:
            yield
        finally:
            for tensor, values in zip((self.conv_states, self.states), kept, strict=True):
                tensor[:, :num_seqs].copy_(values)
