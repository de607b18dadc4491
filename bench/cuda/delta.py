"""Kernels of Gated DeltaNet at the sizes of Qwen3.5: decode steps, prompts, and the small kernels beside them."""
# ruff: noqa: B023  A case is measured before its loop goes on.

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from bench.cuda.cases import CALLS, DEVICE, Case, rotate
from bench.kernels import SHAPE
from npu_runner.platforms import pick_platform
from npu_runner.platforms.gated_delta import Ring
from npu_runner.platforms.step_inputs import AttentionMetadata

_ROTATED_BYTES = 256 << 20
_RING, _NUM_EXPERTS, _TOP_K = 8, 256, 8
_STATE_BYTES = 4 * math.prod(SHAPE.state_shape)


def steps(_: Namespace) -> Iterator[Case]:
    """One token a row: convolution and delta rule."""
    backend = _backend()
    for batch_size in (1, 8, 64, 256):
        num_layers = min(CALLS, max(1, _ROTATED_BYTES // (batch_size * _STATE_BYTES)))
        pools = [(*_states(batch_size), _ring(batch_size)) for _ in range(num_layers)]
        inputs, metadata = _Inputs(batch_size), _metadata(batch_size)
        yield Case(name=f"convolve, batch {batch_size}",
                   call=rotate(lambda pool: backend.convolve(inputs.qkv, inputs.weight, pool[0], metadata), pools),
                   num_bytes=2 * batch_size * SHAPE.num_channels * 2 * SHAPE.conv_kernel_size)
        yield Case(name=f"delta rule, batch {batch_size}", num_bytes=2 * batch_size * _STATE_BYTES,
                   call=rotate(lambda pool: backend.delta_rule(inputs.qkv, *inputs.gates, pool[1], metadata), pools))
        # Rows have contexts of 1, 2, ...: from 8 rows on rings are filled alike, and a row in 8 writes its state.
        lengths_B = torch.arange(1, batch_size + 1, dtype=torch.int32, device=DEVICE)
        with_lengths = dataclasses.replace(metadata, context_lens_B=lengths_B)
        yield Case(name=f"delta rule beside a ring, batch {batch_size}",
                   call=rotate(lambda pool: backend.step_in_ring(inputs.qkv, *inputs.gates, pool[1], pool[2],
                                                                 with_lengths), pools),
                   num_bytes=batch_size * (_STATE_BYTES + _STATE_BYTES / _RING))


def prompts(_: Namespace) -> Iterator[Case]:
    """8,192 tokens of prompts of equal lengths."""
    num_tokens, backend = 8192, _backend()
    inputs = _Inputs(num_tokens)
    # Of a chunk and v head: two GEMMs of 64 x 64 x Dk, three of 64 x Dk x Dv, two of 64 x 64 x Dv.
    k_dim, v_dim = SHAPE.head_k_dim, SHAPE.head_v_dim
    squares = 64 * 64 * (2 * k_dim + 2 * v_dim) + 3 * 64 * k_dim * v_dim
    operations = 2.0 * squares * num_tokens / 64 * SHAPE.num_v_heads
    num_bytes = 2 * num_tokens * SHAPE.num_channels
    for batch_size in (1, 8, 64):
        conv_state, state = _states(batch_size)
        lengths = [num_tokens // batch_size] * batch_size
        metadata = _metadata(batch_size, backend.plan_prefill(lengths, lengths, [], DEVICE))
        name = f"{batch_size} x {num_tokens // batch_size}"
        yield Case(name=f"convolve, {name}", num_bytes=2 * num_bytes,
                   call=lambda _: backend.convolve(inputs.qkv, inputs.weight, conv_state, metadata))
        yield Case(name=f"delta rule, {name}", num_bytes=num_bytes, operations=operations,
                   call=lambda _: backend.delta_rule(inputs.qkv, *inputs.gates, state, metadata))


def small(_: Namespace) -> Iterator[Case]:
    """Router, gated norm and partial rotary."""
    ops = pick_platform("cuda").make_ops()
    weight_D = torch.ones(SHAPE.head_v_dim, device=DEVICE, dtype=torch.bfloat16)
    for num_tokens in (1, 64, 8192):
        z_TVD, x_TVD = (torch.randn(num_tokens, *SHAPE.state_shape[:2], device=DEVICE).bfloat16() for _ in range(2))
        yield Case(name=f"gated norm, {num_tokens} tokens", num_bytes=3 * 2 * x_TVD.numel(),
                   call=lambda _: ops.gated_rms_norm(x_TVD, z_TVD, weight_D, 1e-6))
        q_TNH, k_TKH = (torch.randn(num_tokens, heads, 256, device=DEVICE).bfloat16() for heads in (16, 2))
        cos_TR = torch.randn(num_tokens, 64, device=DEVICE).bfloat16()
        yield Case(name=f"rotary of 64 of 256, {num_tokens} tokens", num_bytes=2 * 2 * num_tokens * 18 * 64,
                   call=lambda _: ops.rotary(q_TNH, k_TKH, cos_TR, cos_TR))
        logits_TE = torch.randn(num_tokens, _NUM_EXPERTS, device=DEVICE).bfloat16()
        yield Case(name=f"router, {num_tokens} tokens", num_bytes=2 * logits_TE.numel(),
                   call=lambda _: ops.route(logits_TE, _TOP_K, True))


class _Inputs:
    def __init__(self, num_tokens: int):
        self.qkv = torch.randn(num_tokens, SHAPE.num_channels, device=DEVICE).bfloat16()
        self.weight = torch.randn(SHAPE.num_channels, SHAPE.conv_kernel_size, device=DEVICE).bfloat16()
        a_TV, b_TV = (torch.randn(num_tokens, SHAPE.num_v_heads, device=DEVICE).bfloat16() for _ in range(2))
        neg_exp_A_V = -torch.rand(SHAPE.num_v_heads, device=DEVICE) * 4
        self.gates = (a_TV, b_TV, neg_exp_A_V, torch.zeros(SHAPE.num_v_heads, device=DEVICE))


def _states(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.zeros(batch_size, *SHAPE.conv_state_shape, device=DEVICE, dtype=torch.bfloat16),
            torch.zeros(batch_size, *SHAPE.state_shape, device=DEVICE))


def _ring(batch_size: int) -> Ring:
    return Ring(torch.randn(batch_size, _RING, *SHAPE.state_shape[:2], device=DEVICE),
                torch.randn(batch_size, _RING, SHAPE.num_k_heads, SHAPE.head_k_dim, device=DEVICE).bfloat16(),
                -torch.rand(batch_size, SHAPE.num_v_heads, _RING, device=DEVICE),
                torch.zeros(batch_size, dtype=torch.int32, device=DEVICE), _RING)


def _metadata(batch_size: int, plan: Any = None) -> AttentionMetadata:
    slots_B = torch.arange(batch_size, dtype=torch.int32, device=DEVICE)
    return AttentionMetadata(plan is not None, slots_B, slots_B, slots_B[:, None], state_slots_B=slots_B,
                             state_plan=plan)


def _backend() -> Any:
    return pick_platform("cuda").make_gated_delta(SHAPE, torch.bfloat16)
