"""The states of all sequences, in slots beside the KV cache: what Gated DeltaNet layers carry from step to step.

A state is not written twice the same way, as keys and values are: whoever runs steps that are nobody's keeps them out
of what serves. Knows slots, not sequences.

L layers with states, W convolution kernel, C channels, Nv value heads, K and V their dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from npu_runner.layers.gated_delta import bind_states
from npu_runner.platforms.transfers import HOST
from npu_runner.runner.state_plan import StatePlan, StateShape


class StatePool:
    """conv_states (L, slots, W - 1, C) and states (L, slots, Nv, V, K), bound to the layers of `model`; zeros."""

    def __init__(self, plan: StatePlan, shape: StateShape, model: nn.Module, dtype: torch.dtype, device: torch.device):
        self.plan = plan
        self.conv_states = _zeros((shape.num_layers, plan.num_slots, *shape.layer.conv_state_shape), dtype, device)
        self.states = _zeros((shape.num_layers, plan.num_slots, *shape.layer.state_shape), torch.float32, device)
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
        """All slots are nobody's again."""
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


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Flat first: a device may keep memory of five dimensions in a layout that no other view of it has.
    return torch.zeros(math.prod(sizes), dtype=dtype, device=device).view(sizes)
