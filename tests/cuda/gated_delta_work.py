"""Steps for Gated DeltaNet kernels, and their results by the definition, token by token in float64.

T tokens of a step, B rows, Nk and Nv key and value heads, Dk and Dv their dims, C channels, W convolution kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from npu_runner.platforms.gated_delta import GatedDeltaBackend, GatedDeltaShape, Ring, StateSave
from npu_runner.platforms.step_inputs import AttentionMetadata

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest value: float32 sums, or one rounding of an answer in 16 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-3, torch.float16: 7e-4}
STATE_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-4, torch.float16: 2e-5}
SMALL = GatedDeltaShape(num_k_heads=2, num_v_heads=4, head_k_dim=64, head_v_dim=64, conv_kernel_size=4)
NUM_SLOTS = 13
# Slots of three sequences and of a padded row, and how long the prompts were: rings fill up at different steps.
SLOTS, PROMPTS, PADDED = [3, 0, 12, 7], [9, 64, 130, 0], 3
LENGTH = 8


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows of these lengths, of which `contexts` tokens came before, in these slots."""

    lengths: list[int]
    contexts: list[int]
    slots: list[int]
    saves: tuple[StateSave, ...] = ()

    def metadata(self, backend: GatedDeltaBackend, device: torch.device, *,
                 is_prefill: bool = True) -> AttentionMetadata:
        empty = torch.zeros(0, dtype=torch.int32, device=device)
        slots = torch.tensor(self.slots, dtype=torch.int32, device=device)
        totals = [context + length for context, length in zip(self.contexts, self.lengths, strict=True)]
        plan = backend.plan_prefill(self.lengths, totals, self.saves, device) if is_prefill else None
        lens = torch.tensor(totals, dtype=torch.int32, device=device)
        return AttentionMetadata(is_prefill, empty, lens, empty, state_slots_B=slots, state_plan=plan)


def gates(a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor) -> tuple[Tensor, Tensor]:
    """(beta, g) in float64; beta is rounded to the model's dtype, as the models have it."""
    beta_TV = torch.sigmoid(b_TV).double()
    softplus_TV = torch.nn.functional.softplus(a_TV.double() + dt_bias_V.double(), threshold=50)
    return beta_TV, neg_exp_A_V.double() * softplus_TV


def convolve(x_TC: Tensor, weight_CW: Tensor, conv_state: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """(outputs, states) in float64. In a state the input of position p lies in column p modulo their number."""
    outputs, states = [], conv_state.double().clone()
    rows = zip(x_TC.double().split(step.lengths), step.contexts, step.slots, strict=True)
    tail, columns = weight_CW.shape[1] - 1, conv_state.shape[1]
    for row, (x_LC, context, slot) in enumerate(rows):
        places = torch.arange(context - tail, context + len(x_LC)) % columns
        before = states[slot, places[:tail]] if context else torch.zeros_like(states[slot, :tail])
        inputs = torch.cat([before, x_LC])
        windows = inputs.unfold(0, tail + 1, 1)
        outputs.append(torch.nn.functional.silu((windows * weight_CW.double()).sum(-1)))
        for save in step.saves:
            if save.row == row:
                states[save.slot, places[save.offset:save.offset + tail]] = inputs[save.offset:save.offset + tail]
        states[slot, places[len(x_LC):]] = inputs[len(x_LC):]
    return torch.cat(outputs), states


def delta_rule(qkv_TC: Tensor, beta_TV: Tensor, g_TV: Tensor, state: Tensor, step: Step,
               shape: GatedDeltaShape) -> tuple[Tensor, Tensor]:
    """(outputs, states) in float64."""
    states = state.double().clone()
    q, k, v = qkv_TC.double().split([shape.key_size, shape.key_size, shape.value_size], dim=1)
    group = shape.num_v_heads // shape.num_k_heads
    q, k = (normalised(x.unflatten(1, (shape.num_k_heads, -1))).repeat_interleave(group, dim=1) for x in (q, k))
    q, v = q * shape.head_k_dim**-0.5, v.unflatten(1, (shape.num_v_heads, -1))
    out_TVD = torch.zeros_like(v)
    token = 0
    for row, (length, context, slot) in enumerate(zip(step.lengths, step.contexts, step.slots, strict=True)):
        s = states[slot].clone() if context else torch.zeros_like(states[slot])
        for offset in range(1, length + 1):
            s *= g_TV[token, :, None, None].exp()
            missing = (v[token] - torch.einsum("vdk,vk->vd", s, k[token])) * beta_TV[token, :, None]
            s += missing[:, :, None] * k[token, :, None, :]
            out_TVD[token] = torch.einsum("vdk,vk->vd", s, q[token])
            for save in step.saves:
                if (save.row, save.offset) == (row, offset):
                    states[save.slot] = s
            token += 1
        states[slot] = s
    return out_TVD, states


def state_in_ring(state: Tensor, ring: Ring, slot: int, length: int) -> Tensor:
    """What a slot's state (Nv, Dv, Dk) and its ring make of a sequence of so many tokens, in float64 on the CPU."""
    made, group = state.double().cpu(), ring.log_decays.shape[1] // ring.keys.shape[2]
    num = (length - int(ring.starts[slot])) % ring.length
    for place in (position % ring.num_places for position in range(length - num, length)):
        key = ring.keys[slot, place].double().cpu().repeat_interleave(group, dim=0)
        made = made * ring.log_decays[slot, :, place].double().cpu().exp()[:, None, None]
        made = made + ring.updates[slot, place].double().cpu()[:, :, None] * key[:, None, :]
    return made


def normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def draw_inputs(shape: GatedDeltaShape, num_tokens: int, dtype: torch.dtype, *, correlation: float = 0.0,
                seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(qkv, a, b) as slices of wider matmuls; `correlation` is the share of every key that all keys have in common."""
    torch.manual_seed(seed)
    qkv_TC = torch.randn(num_tokens, shape.num_channels + 32)[:, :shape.num_channels]
    common = torch.randn(shape.key_size)
    keys = qkv_TC[:, shape.key_size:2 * shape.key_size]
    keys.mul_(1 - correlation).add_(common, alpha=correlation)
    ab = torch.randn(num_tokens, 2 * shape.num_v_heads)
    return qkv_TC.to(dtype), *ab.to(dtype).split(shape.num_v_heads, dim=1)


def make_backend(shape: GatedDeltaShape, dtype: torch.dtype) -> GatedDeltaBackend:
    from npu_runner.platforms.cuda.gated_delta.backend import TritonGatedDelta

    return TritonGatedDelta(shape, dtype)


def decays(shape: GatedDeltaShape, kind: str) -> tuple[Tensor, Tensor]:
    """(neg_exp_A, dt_bias): from `near 0`, 1 % lost in a thousand tokens, to `abrupt`, all lost by some tokens.

    `small step`: large A, and so little time that 1 + exp(dt) has two of its digits.
    """
    low, high = {"usual": (-4.0, 0.5), "near 0": (-9.0, -6.0), "abrupt": (3.0, 6.0), "small step": (2.0, 3.0)}[kind]
    neg_exp_A_V = -torch.linspace(low, high, shape.num_v_heads).exp()
    bias = {"usual": -1.0, "near 0": -2.0, "abrupt": -4.0, "small step": -12.3}[kind]
    return neg_exp_A_V, torch.full((shape.num_v_heads,), bias)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (actual.double().cpu() - expected).abs().max() / expected.abs().max()
    assert error < tolerance, f"error {error:.1e} of the largest value, allowed {tolerance:.1e}"


def make_ring(shape: GatedDeltaShape, dtype: torch.dtype, length: int = LENGTH, most_drafts: int = 0) -> Ring:
    """Of the second of two layers. All that lies in it is what sequences before have left, and may be no number."""
    starts = torch.full((NUM_SLOTS,), 5, dtype=torch.int32)
    starts[SLOTS] = torch.tensor(PROMPTS, dtype=torch.int32)
    places = length + most_drafts
    updates, keys, log_decays = (
        torch.full((2, NUM_SLOTS, *sizes), torch.nan, dtype=kind)[1] for sizes, kind in (
            ((places, shape.num_v_heads, shape.head_v_dim), torch.float32),
            ((places, shape.num_k_heads, shape.head_k_dim), dtype), ((shape.num_v_heads, places), torch.float32)))
    return Ring(updates, keys, log_decays, starts, length)
