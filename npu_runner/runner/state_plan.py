"""How many sequences may run at once where each has a state, and how many snapshots of states are kept.

Slots [0, max_num_seqs) are those of sequences, then come those of padded rows in decode graphs, then snapshots. Knows
bytes, not models or schedulers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from npu_runner.config import GIB, MIB
from npu_runner.platforms.gated_delta import GatedDeltaShape

UNMEASURED_STATE_BYTES = GIB
"""Where memory is not measured, and nobody asked for a max_num_seqs."""
_SNAPSHOT_SHARE = 8
# One slot in so many is for snapshots at least, where there are few.


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
    """Slots of each kind. `lowered_from`: the max_num_seqs that nobody asked for and that did not fit."""

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
    fits, or not as many as were asked for: it is for the caller to say so. `max_snapshots` None: what is left, and as
    many as sequences at most.
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


def size(num_bytes: int) -> str:
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:.1f} KiB"
