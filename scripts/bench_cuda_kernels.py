"""Each Triton kernel of Gated DeltaNet, of the experts and of the sampler at real sizes: microseconds, GB/s, TFLOP/s.

    python scripts/bench_cuda_kernels.py [--shape 35b-a3b|9b] [--part steps prompts experts small draws heads products
        rows integers] [--sweep]

Times are those of the kernels alone, from the profiler; of draws, heads and products those of a graph of several
calls, gaps included, beside the general operators. Bytes and operations are what the definition needs, whatever the
kernel does. Buffers of several layers take turns: a model, too, finds none of them in the L2 cache. `--sweep` tries
other tile sizes and warps for the products and the scan. Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bench_common import commit, versions
from bench_cuda_cases import CALLS, DEVICE, Case, measure, report
from triton.runtime.errors import OutOfResources

from npu_runner.platforms import pick_platform
from npu_runner.platforms.gated_delta import GatedDeltaShape, Ring
from npu_runner.platforms.ops import Ops
from npu_runner.platforms.step_inputs import AttentionMetadata

_ROTATED_BYTES = 256 << 20
_RING = 8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's layer: Gated DeltaNet and, where it has any, experts."""

    delta: GatedDeltaShape
    hidden_size: int
    num_experts: int = 0
    top_k: int = 0
    expert_width: int = 0


_DELTA = GatedDeltaShape(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_kernel_size=4)
SHAPES = {"35b-a3b": Shape(delta=_DELTA, hidden_size=2048, num_experts=256, top_k=8, expert_width=512),
          "9b": Shape(delta=_DELTA, hidden_size=4096)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="35b-a3b")
    parser.add_argument("--part", choices=tuple(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    platform = pick_platform("cuda")
    platform.devices.set_device(0)
    torch.manual_seed(0)
    shape = SHAPES[arguments.shape]
    results = []
    with torch.inference_mode():
        for part in arguments.part:
            for case in PARTS[part](shape, arguments.sweep):
                try:
                    results.append(measure(case))
                except OutOfResources as too_large:  # a tile that this GPU has no room for
                    print(f"{case.name:<46}{too_large}")
                    continue
                print(report(results[-1]), flush=True)
    print(json.dumps({"bench": "bench_cuda_kernels", "commit": commit(), "shape": arguments.shape,
                      "device": torch.cuda.get_device_name(), "versions": versions("torch", "triton"),
                      "results": results}))


def steps(shape: Shape, _: bool) -> Iterator[Case]:
    """One token a row: convolution and delta rule."""
    delta = shape.delta
    backend = _backend(delta)
    state_bytes = 4 * math.prod(delta.state_shape)
    for batch_size in (1, 8, 64, 256):
        num_layers = _num_layers(batch_size * state_bytes)
        pools = [_states(delta, batch_size) for _ in range(num_layers)]
        inputs = _DeltaInputs(delta, batch_size)
        metadata = _metadata(batch_size)

        def convolve(index: int, pools: Any = pools, inputs: Any = inputs, metadata: Any = metadata) -> None:
            backend.convolve(inputs.qkv, inputs.weight, pools[index % len(pools)][0], metadata)

        def rule(index: int, pools: Any = pools, inputs: Any = inputs, metadata: Any = metadata) -> None:
            backend.delta_rule(inputs.qkv, *inputs.gates, pools[index % len(pools)][1], metadata)

        channels = 2 * batch_size * delta.num_channels
        yield Case(name=f"convolve, batch {batch_size}", call=convolve,
                   num_bytes=channels * 2 * delta.conv_kernel_size)
        yield Case(name=f"delta rule, batch {batch_size}", call=rule, num_bytes=2 * batch_size * state_bytes)
        # Rows have contexts of 1, 2, ...: from 8 rows on rings are filled alike, and a row in 8 writes its state.
        rings = [_ring(delta, batch_size) for _ in range(num_layers)]
        lengths_B = torch.arange(1, batch_size + 1, dtype=torch.int32, device=DEVICE)
        with_lengths = dataclasses.replace(metadata, context_lens_B=lengths_B)

        def ringed(index: int, pools: Any = pools, rings: Any = rings, inputs: Any = inputs,
                   metadata: Any = with_lengths) -> None:
            layer = index % len(pools)
            backend.step_in_ring(inputs.qkv, *inputs.gates, pools[layer][1], rings[layer], metadata)

        yield Case(name=f"delta rule beside a ring, batch {batch_size}", call=ringed,
                   num_bytes=batch_size * (state_bytes + state_bytes / _RING))


def prompts(shape: Shape, is_sweep: bool) -> Iterator[Case]:
    """8,192 tokens of prompts of equal lengths."""
    from npu_runner.platforms.cuda.gated_delta import backend as gated_delta

    delta, num_tokens = shape.delta, 8192
    backend = _backend(delta)
    inputs = _DeltaInputs(delta, num_tokens)
    # Of a chunk and v head: two products of 64 x 64 x Dk, three of 64 x Dk x Dv, two of 64 x 64 x Dv.
    squares = 64 * 64 * (2 * delta.head_k_dim + 2 * delta.head_v_dim) + 3 * 64 * delta.head_k_dim * delta.head_v_dim
    operations = 2.0 * squares * num_tokens / 64 * delta.num_v_heads
    for batch_size in (1, 8, 64):
        conv_state, state = _states(delta, batch_size)
        lengths = [num_tokens // batch_size] * batch_size
        metadata = _metadata(batch_size, backend.plan_prefill(lengths, lengths, [], DEVICE))

        def rule(_: int, state: Any = state, metadata: Any = metadata) -> None:
            backend.delta_rule(inputs.qkv, *inputs.gates, state, metadata)

        def convolve(_: int, state: Any = conv_state, metadata: Any = metadata) -> None:
            backend.convolve(inputs.qkv, inputs.weight, state, metadata)

        name = f"{batch_size} x {num_tokens // batch_size}"
        num_bytes = 2 * num_tokens * delta.num_channels
        yield Case(name=f"convolve, {name}", call=convolve, num_bytes=2 * num_bytes)
        yield Case(name=f"delta rule, {name}", call=rule, num_bytes=num_bytes, operations=operations)
        if is_sweep:
            for option, launch in _delta_launches():
                kept = getattr(gated_delta, option)
                setattr(gated_delta, option, launch)
                yield Case(name=f"  {option} {tuple(launch)} {name}", call=convolve if "CONV" in option else rule,
                           num_bytes=num_bytes, operations=operations)
                setattr(gated_delta, option, kept)


def _delta_launches() -> Iterator[tuple[str, Any]]:
    from npu_runner.platforms.cuda.gated_delta.backend import Launch

    for size, num_warps, num_stages in itertools.product((16, 32, 64), (4, 8), (1, 2)):
        yield "_SCAN", Launch(size, num_warps, num_stages)
    for num_warps in (2, 4):
        yield "_INVERT", Launch(0, num_warps)
    yield "_CHUNK_MATRICES", Launch(0, 8)
    for size, num_warps in ((32, 4), (64, 8), (128, 8)):
        yield "_CONVOLVE_CHUNKS", Launch(size, num_warps)


def experts(shape: Shape, is_sweep: bool) -> Iterator[Case]:
    """Router, order, products and sum; for prompts, torch's grouped product over rows in order beside it."""
    if not shape.num_experts:
        return
    from npu_runner.platforms.cuda.moe import experts as kernels

    ops = _ops()
    layers = [_expert_weights(shape) for _ in range(2)]
    for num_tokens in (1, 2, 8, 64, 256, 1024, 8192):
        x_TD = torch.randn(num_tokens, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16)
        choices = [ops.route(torch.randn(num_tokens, shape.num_experts, device=DEVICE).bfloat16(), shape.top_k, True)
                   for _ in range(CALLS)]
        num_active = sum(len(experts_TK.unique()) for _, experts_TK in choices) / len(choices)
        weight_bytes = 2.0 * num_active * 3 * shape.hidden_size * shape.expert_width
        operations = 2.0 * num_tokens * shape.top_k * 3 * shape.hidden_size * shape.expert_width

        def call(index: int, x_TD: Any = x_TD, choices: Any = choices) -> None:
            weights_TK, experts_TK = choices[index % len(choices)]
            gate_up, down = layers[index % len(layers)]
            ops.experts(x_TD, weights_TK, experts_TK, gate_up, down)

        yield Case(name=f"experts, {num_tokens} tokens, {num_active:.0f} active", call=call, num_bytes=weight_bytes,
                   operations=operations)
        if num_tokens >= 1024:
            yield from _grouped_mm(shape, num_tokens, layers, weight_bytes, operations)
        for tiling in _tilings(num_tokens * shape.top_k / shape.num_experts) if is_sweep else ():

            def tiled(index: int, x_TD: Any = x_TD, choices: Any = choices, tiling: Any = tiling) -> None:
                weights_TK, experts_TK = choices[index % len(choices)]
                pairs = kernels.unsorted(experts_TK) if len(x_TD) <= 2 else kernels.sort_pairs(
                    experts_TK, shape.num_experts, tiling.rows)
                kernels.dense_gemms(x_TD, weights_TK, pairs, *layers[index % len(layers)], tiling)

            yield Case(name=f"  {tiling.rows} {tuple(tiling.gate_up)} {tuple(tiling.down)}", call=tiled,
                       num_bytes=weight_bytes, operations=operations)


def _tilings(average: float) -> Iterator[Any]:
    from npu_runner.platforms.cuda.moe.experts import Tile, Tiling

    if average <= 8:
        options = [(16, (c, d, w, s), (2 * c, d, w, s)) for c, d, w, s in (
            (16, 128, 4, 4), (16, 256, 4, 3), (32, 64, 4, 5), (32, 128, 4, 3), (32, 256, 4, 3), (64, 128, 4, 3),
            (32, 128, 8, 4), (32, 128, 2, 4))]
    elif average <= 48:
        options = [(r, (c, 64, w, s), (2 * c, 64, w, s)) for r, c, w, s in (
            (16, 64, 4, 4), (32, 64, 4, 4), (32, 128, 4, 3), (64, 64, 4, 3), (64, 128, 4, 3), (64, 128, 8, 3))]
    else:
        options = [(r, (c, 64, w, s), (2 * c, 64, w, s)) for r, c, w, s in (
            (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 4), (128, 128, 8, 4))]
    for rows, gate_up, down in options:
        yield Tiling(most_pairs_per_expert=0, rows=rows, gate_up=Tile(*gate_up), down=Tile(*down))


def _grouped_mm(shape: Shape, num_tokens: int, layers: Any, num_bytes: float, operations: float) -> Iterator[Case]:
    num_pairs = num_tokens * shape.top_k
    rows_PD = torch.randn(num_pairs, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    ends_E = (torch.arange(1, shape.num_experts + 1, device=DEVICE) * num_pairs // shape.num_experts).int()

    def call(index: int) -> None:
        gate_up, down = layers[index % len(layers)]
        gate, up = torch._grouped_mm(rows_PD, gate_up.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
        torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=ends_E)

    yield Case(name=f"torch._grouped_mm, {num_tokens} tokens in order", call=call, num_bytes=num_bytes,
               operations=operations)


def small(shape: Shape, _: bool) -> Iterator[Case]:
    """What stands beside the products: router, gated norm, partial rotary."""
    ops = _ops()
    for num_tokens in (1, 64, 8192):
        z_TVD, x_TVD = (torch.randn(num_tokens, *shape.delta.state_shape[:2], device=DEVICE).bfloat16()
                        for _ in range(2))
        weight_D = torch.ones(shape.delta.head_v_dim, device=DEVICE, dtype=torch.bfloat16)
        yield Case(name=f"gated norm, {num_tokens} tokens", num_bytes=3 * 2 * x_TVD.numel(),
                   call=_always(ops.gated_rms_norm, x_TVD, z_TVD, weight_D, 1e-6))
        q_TNH, k_TKH = (torch.randn(num_tokens, heads, 256, device=DEVICE).bfloat16() for heads in (16, 2))
        cos_TR = torch.randn(num_tokens, 64, device=DEVICE).bfloat16()
        yield Case(name=f"rotary of 64 of 256, {num_tokens} tokens", num_bytes=2 * 2 * num_tokens * 18 * 64,
                   call=_always(ops.rotary, q_TNH, k_TKH, cos_TR, cos_TR))
        if shape.num_experts:
            logits_TE = torch.randn(num_tokens, shape.num_experts, device=DEVICE).bfloat16()
            yield Case(name=f"router, {num_tokens} tokens", num_bytes=2 * logits_TE.numel(),
                       call=_always(ops.route, logits_TE, shape.top_k, True))


def draws(_: Shape, __: bool) -> Iterator[Case]:
    """The sampler's plain draws and greedy rows."""
    import bench_cuda_dense

    yield from bench_cuda_dense.draws()


def heads(_: Shape, __: bool) -> Iterator[Case]:
    """Norm, rotary embedding and cache write of attention's heads."""
    import bench_cuda_dense

    yield from bench_cuda_dense.heads()


def products(_: Shape, is_sweep: bool) -> Iterator[Case]:
    """A few rows times the weights of dense decoders."""
    import bench_cuda_dense

    yield from bench_cuda_dense.products(is_sweep)


def some_rows(_: Shape, is_sweep: bool) -> Iterator[Case]:
    """2 to 192 rows times the weights of a layer in FP8."""
    import bench_cuda_dense

    yield from bench_cuda_dense.some_rows(is_sweep)


def integers(_: Shape, is_sweep: bool) -> Iterator[Case]:
    """1 to 16 rows times the weights of a layer in 4 bits."""
    import bench_cuda_dense

    yield from bench_cuda_dense.integers(is_sweep)


PARTS: dict[str, Callable[[Shape, bool], Iterator[Case]]] = {"steps": steps, "prompts": prompts, "experts": experts,
                                                             "small": small, "draws": draws, "heads": heads,
                                                             "products": products, "rows": some_rows,
                                                             "integers": integers}


def _always(function: Callable[..., Any], *arguments: Any) -> Callable[[int], Any]:
    return lambda _: function(*arguments)


class _DeltaInputs:
    def __init__(self, delta: GatedDeltaShape, num_tokens: int):
        self.qkv = torch.randn(num_tokens, delta.num_channels, device=DEVICE).bfloat16()
        self.weight = torch.randn(delta.num_channels, delta.conv_kernel_size, device=DEVICE).bfloat16()
        a_TV, b_TV = (torch.randn(num_tokens, delta.num_v_heads, device=DEVICE).bfloat16() for _ in range(2))
        neg_exp_A_V = -torch.rand(delta.num_v_heads, device=DEVICE) * 4
        self.gates = (a_TV, b_TV, neg_exp_A_V, torch.zeros(delta.num_v_heads, device=DEVICE))


def _states(delta: GatedDeltaShape, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.zeros(batch_size, *delta.conv_state_shape, device=DEVICE, dtype=torch.bfloat16),
            torch.zeros(batch_size, *delta.state_shape, device=DEVICE))


def _ring(delta: GatedDeltaShape, batch_size: int) -> Ring:
    return Ring(torch.randn(batch_size, _RING, *delta.state_shape[:2], device=DEVICE),
                torch.randn(batch_size, _RING, delta.num_k_heads, delta.head_k_dim, device=DEVICE).bfloat16(),
                -torch.rand(batch_size, delta.num_v_heads, _RING, device=DEVICE),
                torch.zeros(batch_size, dtype=torch.int32, device=DEVICE), _RING)


def _expert_weights(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = ((2 * shape.expert_width, shape.hidden_size), (shape.hidden_size, shape.expert_width))
    gate_up, down = (torch.randn(shape.num_experts, *size, device=DEVICE, dtype=torch.bfloat16) * size[1]**-0.5
                     for size in sizes)
    return gate_up, down


def _metadata(batch_size: int, plan: Any = None) -> AttentionMetadata:
    slots_B = torch.arange(batch_size, dtype=torch.int32, device=DEVICE)
    return AttentionMetadata(plan is not None, slots_B, slots_B, slots_B[:, None], state_slots_B=slots_B,
                             state_plan=plan)


def _num_layers(num_bytes: int) -> int:
    return min(CALLS, max(1, _ROTATED_BYTES // num_bytes))


def _backend(delta: GatedDeltaShape) -> Any:
    return pick_platform("cuda").make_gated_delta(delta, torch.bfloat16)


def _ops() -> Ops:
    return pick_platform("cuda").make_ops()


if __name__ == "__main__":
    main()
