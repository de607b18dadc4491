"""Kernels and operators alone: microseconds, GB/s and TFLOP/s at real sizes.

CUDA (default: all of them):
  steps, prompts, small   Gated DeltaNet: one token a row, prompts of 8,192 tokens, gated norm, rotary, router
  experts                 a layer's experts, in bfloat16, FP8 by block and int8
  decode, prefill, tower  attention at the sizes of Qwen3-8B, Qwen3-0.6B and Qwen3-VL, in Triton too, towers also in
                          torch's flash attention; --fp8: keys and values in e4m3
  draws, heads            the sampler's plain draws; norm, rotary embedding and cache write
  matmul, rows, int4      GEMMs of few rows: bfloat16, FP8 (a layer's four weights), 4 bits (the same)
CPU (--platform cpu):
  operators   its own forms of operators against torch's, one thread, microseconds of CPU time

Times of CUDA kernels are those of the kernels alone, from the profiler, or those of a graph of several calls, gaps
included. Bytes and operations are what the definition needs, whatever the kernel does. Buffers of several layers take
turns: a model, too, finds none of them in the L2 cache. Prints a
table, then one JSON line.

    python -m bench.kernels --part experts decode [--shape 35b-a3b]
    python -m bench.kernels --platform cpu
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.bandwidth import measure_read_bandwidth
from bench.common import make_parser, print_result
from npu_runner.platforms import pick_platform
from npu_runner.platforms.gated_delta import GatedDeltaShape
from npu_runner.platforms.ops import Ops, TorchOps

CUDA_PARTS = ("steps", "prompts", "small", "experts", "decode", "prefill", "tower", "draws", "heads", "matmul", "rows",
              "int4")
SHAPE = GatedDeltaShape(num_k_heads=16, num_v_heads=32, head_k_dim=128, head_v_dim=128, conv_kernel_size=4)
"""Gated DeltaNet of Qwen3.5's 9B and 35B-A3B shapes."""


def main() -> None:
    parser = make_parser(__doc__, repeats=5, platform="cuda")
    parser.add_argument("--part", choices=(*CUDA_PARTS, "operators"), nargs="+")
    parser.add_argument("--shape", nargs="+", choices=("30b-a3b", "35b-a3b"), default=["35b-a3b"],
                        help="of the experts")
    parser.add_argument("--fp8", action="store_true", help="attention over keys and values in e4m3")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    parts = arguments.part or (CUDA_PARTS if arguments.platform == "cuda" else ["operators"])
    results: dict[str, Any] = {}
    with torch.inference_mode():
        if set(parts) & set(CUDA_PARTS):
            results["kernels"] = measure_cuda([part for part in parts if part in CUDA_PARTS], arguments)
        if "operators" in parts:
            results["operators"] = measure_operators(arguments.repeats)
    print_result("kernels", arguments, **results)


def measure_cuda(parts: list[str], arguments: Namespace) -> list[dict[str, Any]]:
    from triton.runtime.errors import OutOfResources

    from bench.cuda import attention, delta, dense, experts
    from bench.cuda.cases import DEVICE, Case, measure, report

    pick_platform("cuda").devices.set_device(0)
    cases: dict[str, Callable[[Namespace], Iterator[Case]]] = {
        "steps": delta.steps, "prompts": delta.prompts, "small": delta.small, "experts": experts.experts,
        "decode": attention.decode, "prefill": attention.prefill, "tower": attention.tower, "draws": dense.draws,
        "heads": dense.heads, "matmul": dense.matmul, "rows": dense.rows, "int4": dense.int4}
    bandwidth, reader = measure_read_bandwidth(DEVICE, 4 << 30)
    print(f"reads at {bandwidth / 1e9:.0f} GB/s ({reader})")
    results = []
    for part in parts:
        for case in cases[part](arguments):
            try:
                result = measure(case)
            except OutOfResources as too_large:  # a tile that this GPU has no room for
                print(f"{case.name:<46}{too_large}")
                continue
            result["share_of_bandwidth"] = result["gb_per_second"] * 1e9 / bandwidth
            results.append({"part": part, **result})
            print(f"{result['share_of_bandwidth']:>6.1%} {report(result)}", flush=True)
    return results


def measure_operators(repeats: int) -> dict[str, dict[str, float]]:
    """Least microseconds of CPU time by operator and form, by turns, at the shapes of shapes-vl."""
    from npu_runner.platforms.cpu.ops import CpuOps

    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    forms: dict[str, Ops] = {"torch": TorchOps(), "ours": CpuOps()}
    for name, operator in _operators():
        least = found[name] = dict.fromkeys(forms, float("inf"))
        for repeat, (form, ops) in itertools.product(range(10 * repeats + 1), forms.items()):  # the first warms up
            started = time.process_time()
            operator(ops)
            if repeat:
                least[form] = min(least[form], 1e6 * (time.process_time() - started))
        print(f"{name:<44}{least['torch']:>9.0f} us torch{least['ours']:>9.0f} us ours"
              f"{least['torch'] / least['ours']:>7.2f} times as fast")
    return found


def _operators() -> Iterator[tuple[str, Callable[[Ops], object]]]:
    for rows, inputs, outputs, gelu in ((2048, 128, 384, None), (2048, 384, 128, None), (512, 512, 512, None),
                                        (4096, 192, 1024, None), (256, 192, 1024, None), (2048, 128, 384, "tanh")):
        linear = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
        yield f"linear{' and GELU' if gelu else ''}, {rows} x {inputs} to {outputs}", partial(_linear, linear, gelu)
    x, weight = torch.randn(4096, 192), torch.randn(192)
    yield "rms_norm, 4096 x 192", lambda ops: ops.rms_norm(x, weight, 1e-6)
    q, k, _ = torch.randn(4096, 10, 32).split([6, 2, 2], dim=1)
    turns = [torch.randn(4096, 32) for _ in range(2)]
    yield "rotary, 4096 x (6 + 2) heads of 32", lambda ops: ops.rotary(q, k, turns[0], turns[1])
    qkv = torch.randn(2048, 3, 4, 32)
    cos, sin = (table[:2048] for table in turns)
    yield "rotary of a tower, 2048 x 2 x 4 heads of 32", lambda ops: ops.rotary_in_float32(qkv[:, :2], cos, sin)
    gate_up = torch.randn(4096, 1024)
    yield "silu_and_mul, 4096 x 1024", lambda ops: ops.silu_and_mul(gate_up)


def _linear(linear: tuple[Tensor, Tensor, Tensor], gelu: str | None, ops: Ops) -> Tensor:
    return ops.linear(*linear) if gelu is None else ops.linear_gelu(*linear, gelu)


if __name__ == "__main__":
    main()
