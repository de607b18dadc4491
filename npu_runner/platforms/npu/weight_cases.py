"""Cases of quantised weights, of experts, and of layers with a state (platforms/cases.py).

T tokens of a step, I inputs, O outputs, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.platforms.cases import Case, Side
from npu_runner.platforms.gated_delta import GatedDeltaShape
from npu_runner.platforms.grouped import GROUPED, GroupedWeight, packed
from npu_runner.platforms.npu.attention_cases import Behind
from npu_runner.platforms.npu.kernels import KERNELS
from npu_runner.platforms.quantised import (
    INT8,
    INT8_EXPERTS,
    INT8_STATIC,
    Int8Rows,
    Int8Weight,
    NormRounding,
    QuantisedExperts,
    StaticInt8Weight,
)
from npu_runner.platforms.step_inputs import AttentionMetadata

Call = Callable[[], Tensor]

_TOKENS, _FEW = 37, 3
_EPS = 1e-6
_INPUT_SCALE, _INPUT_OFFSET = 1 / 32, -9
"""A power of two: it is the same in every dtype, and so is its reciprocal."""


def _int8_operands(side: Side, num_in: int, num_out: int) -> tuple[Tensor, Tensor, Tensor]:
    values_OI = side.integers(-127, 128, num_out, num_in, seed=30, dtype=torch.int8)
    scales_O = side.put(torch.rand(num_out, generator=torch.Generator().manual_seed(31)) / 127)
    return values_OI, scales_O, side.random(num_out, seed=32).float()


def quantised(num_in: int, num_out: int, dtype: str = "bfloat16") -> Iterator[Case]:
    """int8 with inputs that are rounded, with a bias, and behind a norm that rounds."""

    def norm_inputs(side: Side) -> tuple[Tensor, Tensor, Tensor]:
        return (side.random(_TOKENS, num_in, seed=33), side.random(_TOKENS, num_in, seed=34),
                1 + side.random(num_in, seed=35, scale=0.125))

    def by_row(side: Side) -> Call:
        ops, (values_OI, scales_O, bias_O) = side.quantised_ops, _int8_operands(side, num_in, num_out)
        weight, x_TI = ops.prepare_weight(Int8Weight(values_OI, scales_O)), norm_inputs(side)[0]
        return lambda: ops.linear(x_TI, weight, bias_O)

    def by_one_scale(side: Side) -> Call:
        ops, (values_OI, scales_O, bias_O) = side.quantised_ops, _int8_operands(side, num_in, num_out)
        x_TI = norm_inputs(side)[0]
        shifts_O = (1000 * bias_O).int() - _INPUT_OFFSET * values_OI.cpu().sum(1).int().to(side.device)
        prepared = ops.prepare_weight(Int8Weight(values_OI, scales_O))
        weight = StaticInt8Weight(prepared[0], shifts_O, scales_O * _INPUT_SCALE,
                                  *(side.put(torch.full((1,), value, dtype=x_TI.dtype))
                                    for value in (1 / _INPUT_SCALE, _INPUT_OFFSET)))
        return lambda: ops.linear(x_TI, weight, None)

    def behind_norm(side: Side, is_static: bool) -> Call:
        """The rounded rows of a norm, as numbers, and the sum before it."""
        ops, given = side.quantised_ops, norm_inputs(side)
        rounding: Any = INT8 if not is_static else NormRounding(*(
            side.put(torch.full((num_in,), value, dtype=side.dtype)) for value in (_INPUT_SCALE, _INPUT_OFFSET)))

        def call() -> Tensor:
            rows, total_TI = ops.add_rms_norm(*given, _EPS, rounding)
            numbers = rows.values_TI.to(total_TI.dtype)
            if isinstance(rows, Int8Rows):
                numbers = numbers * rows.scales_T[:, None].to(total_TI.dtype)
            else:
                numbers = (numbers - _INPUT_OFFSET) * _INPUT_SCALE
            return torch.cat((numbers, total_TI), dim=1)

        return call

    shape = f"{num_in} to {num_out}"
    for layout in KERNELS["layout"]:
        yield Case(name=f"npu_quant_matmul of rows, {shape}", prepare=by_row, dtype=dtype, job="layout", kernel=layout,
                   gives_up=INT8)
        yield Case(name=f"npu_quant_matmul of one scale, {shape}", prepare=by_one_scale, dtype=dtype, job="layout",
                   kernel=layout, gives_up=INT8_STATIC)
    for kernel in KERNELS["norm"]:
        yield Case(name=f"a norm that rounds rows, {num_in}", prepare=partial(behind_norm, is_static=False),
                   dtype=dtype, job="norm", kernel=kernel, gives_up=INT8)
        yield Case(name=f"a norm that rounds by one scale, {num_in}", prepare=partial(behind_norm, is_static=True),
                   dtype=dtype, job="norm", kernel=kernel, gives_up=INT8_STATIC)


def grouped(num_in: int, num_out: int, dtype: str = "bfloat16") -> Iterator[Case]:
    """Weights of 4 and 8 bits with a scale for each output, or for each 128 of its inputs."""

    def multiply(side: Side, bits: int, group_size: int) -> Call:
        values = side.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), num_out, num_in, seed=36, dtype=torch.int8)
        num_groups = num_in // group_size if group_size else 1
        scales = (1 + side.random(num_out, num_groups, seed=37).abs()) / 128
        weight = GroupedWeight(values if bits == 8 else packed(values.cpu()).to(side.device), scales, None)
        ops, x_TI = side.quantised_ops, side.random(_TOKENS, num_in, seed=38)
        prepared = ops.prepare_weight(weight)
        return lambda: ops.linear(x_TI, prepared, None)

    has_groups = num_in % 128 == 0 and num_in > 128
    for bits, group_size in ((4, 0), (4, 128), (8, 0), (8, 128)):
        if group_size and not has_groups:
            continue
        by = f"in groups of {group_size}" if group_size else "by output"
        yield Case(name=f"npu_weight_quant_batchmatmul of {bits} bits {by}, {num_in} to {num_out}",
                   prepare=partial(multiply, bits=bits, group_size=group_size), dtype=dtype, gives_up=GROUPED)


# -- experts -----------------------------------------------------------------------------------------------------------


def experts(count: int, top_k: int, hidden: int, width: int, dtype: str = "bfloat16") -> Iterator[Case]:
    def routed(side: Side, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, weights (T, K), and experts that no side's rounding decides."""
        order = np.random.default_rng(40).permuted(np.tile(np.arange(count), (num_tokens, 1)), axis=1)[:, :top_k]
        weights = F.softmax(side.random(num_tokens, top_k, seed=41), dim=-1)
        return (side.random(num_tokens, hidden, seed=42), weights,
                side.put(torch.from_numpy(order.astype(np.int32))))

    def route(side: Side) -> Call:
        logits = side.random(_TOKENS, count, seed=43)
        return lambda: side.ops.route(logits, top_k, renormalise=True)[0].sort(dim=-1).values

    def matrices(side: Side, *, is_int8: bool) -> tuple[Any, Any]:
        found = []
        for seed, num_out, num_in in ((44, 2 * width, hidden), (45, hidden, width)):
            if is_int8:
                values = side.integers(-127, 128, count, num_out, num_in, seed=seed, dtype=torch.int8)
                scales = side.put(torch.rand(count, num_out, generator=torch.Generator().manual_seed(seed)) / 127 / 8)
            else:
                values = side.random(count, num_out, num_in, seed=seed, scale=num_in**-0.5)
            values = values.transpose(1, 2).contiguous() if side.ops.experts_in_out else values
            found.append(QuantisedExperts(values, scales) if is_int8 else values)
        return found[0], found[1]

    def run(side: Side, num_tokens: int) -> Call:
        given, (gate_up, down) = routed(side, num_tokens), matrices(side, is_int8=False)
        return lambda: side.ops.experts(*given, gate_up, down)

    def run_int8(side: Side, num_tokens: int) -> Call:
        ops, given = side.quantised_ops, routed(side, num_tokens)
        prepared = ops.prepare_experts(*matrices(side, is_int8=True), side.dtype)
        return lambda: ops.experts(*given, *prepared)

    shape = f"{top_k} of {count} experts, {hidden} to {width}"
    yield Case(name=f"npu_moe_gating_top_k_softmax_v2, {top_k} of {count} experts", prepare=route, dtype=dtype)
    for num_tokens in (_TOKENS, _FEW):
        yield Case(name=f"{shape}, {num_tokens} tokens", prepare=partial(run, num_tokens=num_tokens), dtype=dtype)
        for kernel in KERNELS["experts"]:
            yield Case(name=f"int8: {shape}, {num_tokens} tokens", prepare=partial(run_int8, num_tokens=num_tokens),
                       dtype=dtype, job="experts", kernel=kernel, gives_up=INT8_EXPERTS)


# -- states ------------------------------------------------------------------------------------------------------------


def states(shape: GatedDeltaShape, dtype: str = "bfloat16") -> Iterator[Case]:
    """The convolution and the gated delta rule of a decode step, and the states that both leave."""
    num_rows = 4

    def inputs(side: Side) -> tuple[Any, AttentionMetadata]:
        slots = side.put(torch.arange(num_rows, 0, -1, dtype=torch.int32))
        zeros = side.put(torch.zeros(num_rows, dtype=torch.int32))
        metadata = AttentionMetadata(False, zeros, zeros + 9, zeros[:, None], None, slots)
        return side.platform.make_gated_delta(shape, side.dtype), metadata

    def convolve(side: Side) -> Call:
        backend, metadata = inputs(side)
        x = side.random(num_rows, shape.num_channels, seed=50)
        weight = side.random(shape.num_channels, shape.conv_kernel_size, seed=51)
        state = side.random(num_rows + 1, *shape.conv_state_shape, seed=52)

        def call() -> Tensor:
            kept = state.clone()
            return torch.cat((backend.convolve(x, weight, kept, metadata), kept[1:].flatten(1)), dim=1)

        return call

    def rule(side: Side) -> Call:
        backend, metadata = inputs(side)
        qkv = side.random(num_rows, shape.num_channels, seed=53)
        a, b = (side.random(num_rows, shape.num_v_heads, seed=seed) for seed in (54, 55))
        rate, bias = (side.random(shape.num_v_heads, seed=seed).float() for seed in (56, 57))
        state = side.random(num_rows + 1, *shape.state_shape, seed=58).float()

        def call() -> Tensor:
            kept = state.clone()
            out = backend.delta_rule(qkv, a, b, -rate.exp(), bias, kept, metadata)
            return torch.cat((out.flatten(1).float(), kept[1:].flatten(1)), dim=1)

        return call

    heads = f"{shape.num_k_heads}/{shape.num_v_heads} heads of {shape.head_k_dim}"
    yield Case(name=f"the convolution of Gated DeltaNet, {heads}", prepare=convolve, dtype=dtype)
    yield Case(name=f"the gated delta rule, {heads}", prepare=rule, dtype=dtype)


# -- behind attention, in captured graphs ------------------------------------------------------------------------------


def int8_behind(side: Side, width: int, num_rows: int) -> Behind:
    """A norm that rounds, and a matmul of int8."""
    ops, (values_OI, scales_O, bias_O) = side.quantised_ops, _int8_operands(side, width, 512)
    weight, gain = ops.prepare_weight(Int8Weight(values_OI, scales_O)), 1 + side.random(width, seed=35, scale=0.125)

    def forward(x: Tensor, metadata: AttentionMetadata) -> Tensor:
        rows, _ = ops.add_rms_norm(x, x, gain, _EPS, INT8)
        return ops.linear(rows, weight, bias_O)

    return forward, ()


def experts_behind(side: Side, width: int, num_rows: int) -> Behind:
    """Four experts, each of which every token takes: rounding decides nothing."""
    count, inner = 4, 256
    router, gate_up, down = (side.random(*shape, seed=seed, scale=shape[-1] ** -0.5) for seed, shape in (
        (46, (count, width)), (47, (count, 2 * inner, width)), (48, (count, width, inner))))
    if side.ops.experts_in_out:
        gate_up, down = (each.transpose(1, 2).contiguous() for each in (gate_up, down))

    def forward(x: Tensor, metadata: AttentionMetadata) -> Tensor:
        return side.ops.experts(x, *side.ops.route(side.ops.linear(x, router, None), count, True), gate_up, down)

    return forward, ()


def states_behind(side: Side, width: int, num_rows: int) -> Behind:
    """The convolution and the gated delta rule; both leave states for the next step. Queries are keys: outputs
    of others are nearly zero, and rounding decides them."""
    shape = GatedDeltaShape(num_k_heads=width // 512, num_v_heads=width // 256, head_k_dim=128, head_v_dim=128,
                            conv_kernel_size=4)
    backend, key_size = side.platform.make_gated_delta(shape, side.dtype), shape.key_size
    taps, rate, bias = (side.random(*size, seed=seed) for seed, size in (
        (51, (shape.num_channels - key_size, 4)), (56, (shape.num_v_heads,)), (57, (shape.num_v_heads,))))
    taps, rate, bias = torch.cat((taps[:key_size], taps)), -rate.float().exp(), bias.float()
    conv = side.put(torch.zeros(num_rows, *shape.conv_state_shape, dtype=side.dtype))
    state = side.put(torch.zeros(num_rows, *shape.state_shape))

    def forward(x: Tensor, metadata: AttentionMetadata) -> Tensor:
        gates, channels = x[:, : shape.num_v_heads], x[:, : shape.num_channels - key_size]
        qkv = backend.convolve(torch.cat((channels[:, :key_size], channels), dim=1), taps, conv, metadata)
        return backend.delta_rule(qkv, gates, gates, rate, bias, state, metadata).flatten(1)

    return forward, (conv, state)
