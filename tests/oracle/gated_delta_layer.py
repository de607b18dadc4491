"""One Gated DeltaNet layer's inputs, its definition in float64, and a driver that serves sequences through a backend.

T tokens, Nk and Nv key and value heads, K and V their dims, C channels, W convolution kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.platforms.gated_delta import CHUNK_SIZE, GatedDeltaBackend, GatedDeltaShape, RingedGatedDelta, StateSave
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.runner.step_arrays import runs_of_tokens

NUM_SLOTS = 16
GATES = ("usual", "open", "shut", "mixed")


@dataclass
class Weights:
    conv_CW: Tensor
    neg_exp_A_V: Tensor
    dt_bias_V: Tensor

    @classmethod
    def random(cls, shape: GatedDeltaShape) -> Weights:
        conv_CW = torch.randn(shape.num_channels, shape.conv_kernel_size) / shape.conv_kernel_size
        return cls(conv_CW, -torch.empty(shape.num_v_heads).uniform_(1, 16), torch.randn(shape.num_v_heads))


@dataclass
class Inputs:
    """What the projections of one sequence would give."""

    x_TC: Tensor
    a_TV: Tensor
    b_TV: Tensor

    @classmethod
    def random(cls, length: int, shape: GatedDeltaShape, gates: str = "usual") -> Inputs:
        """Keys that are much alike, as those of repeated text; gates that keep all, keep nothing, or do either."""
        x_TC = torch.randn(length, shape.num_channels)
        keys = slice(shape.key_size, 2 * shape.key_size)
        x_TC[:, keys] = torch.randn(shape.key_size) + 0.1 * torch.randn(length, shape.key_size)
        a_TV = torch.randn(length, shape.num_v_heads) - 3
        if gates in ("open", "mixed"):
            a_TV -= 12.0
        if gates == "shut":
            a_TV += 40.0
        if gates == "mixed":
            a_TV[torch.rand(a_TV.shape) < 0.05] += 80.0
        return cls(x_TC, a_TV, torch.randn(length, shape.num_v_heads) + 1)

    def part(self, start: int, stop: int) -> Inputs:
        return Inputs(self.x_TC[start:stop], self.a_TV[start:stop], self.b_TV[start:stop])

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(self.x_TC.to(dtype), self.a_TV.to(dtype), self.b_TV.to(dtype))

    @staticmethod
    def cat(parts: Sequence[Inputs]) -> Inputs:
        return Inputs(torch.cat([p.x_TC for p in parts]), torch.cat([p.a_TV for p in parts]),
                      torch.cat([p.b_TV for p in parts]))


@dataclass
class Defined:
    """By the definition: outputs, what was convolved behind W - 1 zeros, and the state after each number of tokens."""

    out_TVD: Tensor
    padded_x: Tensor
    states: list[Tensor]

    def tail(self, length: int, kernel_size: int) -> Tensor:
        return self.padded_x[length : length + kernel_size - 1]


def define(inputs: Inputs, weights: Weights, shape: GatedDeltaShape) -> Defined:
    """One token after the other, in float64."""
    before = shape.conv_kernel_size - 1
    padded_x = F.pad(inputs.x_TC.double(), (0, 0, before, 0))
    conv_TC = sum(padded_x[tap : tap + len(inputs.x_TC)] * weights.conv_CW[:, tap].double()
                  for tap in range(before + 1))
    q, k, v = F.silu(conv_TC).split([shape.key_size, shape.key_size, shape.value_size], dim=-1)
    q, k = (x.unflatten(-1, (shape.num_k_heads, -1)) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    group = shape.num_v_heads // shape.num_k_heads
    q, k = (x.repeat_interleave(group, dim=1) for x in (q * shape.head_k_dim**-0.5, k))
    v = v.unflatten(-1, (shape.num_v_heads, -1))
    beta = inputs.b_TV.double().sigmoid()
    g = weights.neg_exp_A_V.double() * F.softplus(inputs.a_TV.double() + weights.dt_bias_V.double())
    state = torch.zeros(shape.state_shape, dtype=torch.float64)
    out, states = [], [state]
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        error = (v[t] - torch.einsum("nvk,nk->nv", state, k[t])) * beta[t][:, None]
        state = state + error[:, :, None] * k[t][:, None, :]
        out.append(torch.einsum("nvk,nk->nv", state, q[t]))
        states.append(state)
    return Defined(torch.stack(out), padded_x, states)


@dataclass
class Request:
    inputs: Inputs
    slot: int
    num_done: int = 0


@dataclass
class Server:
    """Runs steps over slots whose states are NaN before anybody has them."""

    backend: GatedDeltaBackend
    shape: GatedDeltaShape
    weights: Weights
    device: torch.device
    dtype: torch.dtype = torch.float32
    conv_state: Tensor = field(init=False)
    state: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.conv_state = torch.full((NUM_SLOTS, *self.shape.conv_state_shape), torch.nan, dtype=self.dtype,
                                     device=self.device)
        self.state = torch.full((NUM_SLOTS, *self.shape.state_shape), torch.nan, device=self.device)
        self.weights = Weights(self.weights.conv_CW.to(self.dtype), self.weights.neg_exp_A_V, self.weights.dt_bias_V)

    def prefill(self, rows: Sequence[tuple[Request, int]], saves: Sequence[StateSave] = ()) -> list[Tensor]:
        """The next tokens of each (sequence, number): the outputs of each, (T, Nv, V)."""
        query_lens = [num for _, num in rows]
        context_lens = [seq.num_done + num for seq, num in rows]
        plan = self.backend.plan_prefill(query_lens, context_lens, list(saves), self.device)
        inputs = Inputs.cat([seq.inputs.part(seq.num_done, seq.num_done + num) for seq, num in rows])
        out_TVD = self._run(inputs, [seq.slot for seq, _ in rows], context_lens, is_prefill=True, plan=plan)
        for seq, num in rows:
            seq.num_done += num
        return list(out_TVD.split(query_lens))

    def decode(self, rows: Sequence[Request], padding_slots: Sequence[int] = ()) -> list[Tensor]:
        """One token of each, (1, Nv, V); `padding_slots` are of rows that nobody asked for, behind them."""
        inputs = Inputs.cat([seq.inputs.part(seq.num_done, seq.num_done + 1) for seq in rows]
                            + [Inputs.random(1, self.shape) for _ in padding_slots])
        lens = [*(seq.num_done + 1 for seq in rows), *(1 for _ in padding_slots)]
        out_TVD = self._run(inputs, [*(seq.slot for seq in rows), *padding_slots], lens, is_prefill=False, plan=None)
        for seq in rows:
            seq.num_done += 1
        return list(out_TVD[: len(rows)].split(1))

    def decode_drafts(self, rows: Sequence[tuple[Request, list[int], int]]) -> list[Tensor]:
        """Of each (sequence, slots for its drafts, how many of these are kept) its next token and drafts. Those that
        are kept are its own next tokens, the others of no one's. Returns the outputs of what is kept, (T, Nv, V). The
        slot of the last one is the sequence's afterwards."""
        inputs: list[Inputs] = []
        slots: list[int] = []
        lens = [1 + len(spares) for _, spares, _ in rows]
        for seq, spares, num in rows:
            inputs += [seq.inputs.part(seq.num_done, seq.num_done + 1 + num),
                       Inputs.random(len(spares) - num, self.shape)]
            slots += [seq.slot, *spares]
        runs_T = torch.from_numpy(runs_of_tokens(np.array(lens))).to(self.device)
        plan = self.backend.plan_drafts(runs_T, lens)
        ends = [seq.num_done + place for (seq, _, _), num in zip(rows, lens, strict=True)
                for place in range(1, num + 1)]
        outs = self._run(Inputs.cat(inputs), slots, ends, is_prefill=False, plan=plan).split(lens)
        for seq, spares, num in rows:
            seq.num_done += 1 + num
            seq.slot = [seq.slot, *spares][num]
        return [out[: 1 + num] for out, (_, _, num) in zip(outs, rows, strict=True)]

    def _run(self, inputs: Inputs, slots: Sequence[int], lens: Sequence[int], *, is_prefill: bool,
             plan: object) -> Tensor:
        nothing = torch.empty(0)
        slots_B, lens_B = (torch.tensor(numbers, dtype=torch.int32, device=self.device) for numbers in (slots, lens))
        metadata = AttentionMetadata(is_prefill, nothing, lens_B, nothing, state_slots_B=slots_B, state_plan=plan)
        here = inputs.to(self.dtype)
        conv_CW, neg_exp_A_V, dt_bias_V = (x.to(self.device) for x in (
            self.weights.conv_CW, self.weights.neg_exp_A_V, self.weights.dt_bias_V))
        with torch.inference_mode():
            qkv_TC = self.backend.convolve(here.x_TC.to(self.device), conv_CW, self.conv_state, metadata)
            out_TVD = self.backend.delta_rule(qkv_TC, here.a_TV.to(self.device), here.b_TV.to(self.device),
                                              neg_exp_A_V, dt_bias_V, self.state, metadata)
        assert out_TVD.dtype == self.dtype
        return out_TVD.cpu()

    def tail(self, slot: int, length: int) -> Tensor:
        """The convolution's inputs before position `length`, oldest first."""
        before = self.shape.conv_kernel_size - 1
        places = torch.arange(length - before, length) % before
        return self.conv_state[slot, places if isinstance(self.backend, RingedGatedDelta) else slice(None)]

    def copy_slot(self, source: int, target: int) -> None:
        for tensor in (self.conv_state, self.state):
            tensor[target] = tensor[source]


def next_boundary(position: int) -> int:
    """The first place behind `position` where a state may be saved."""
    return (position // CHUNK_SIZE + 1) * CHUNK_SIZE
