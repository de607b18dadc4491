"""The CPU's own forms of the operators against torch's, in the shapes of shapes-vl: a tower's group and a prefill step.
With --part int8: torch's products of int8 weights, inputs quantised on the way, against float32, in shapes of models of
0.6 and 1.7B.

One thread, microseconds of its CPU time, the least of --repeats, the forms of a row by turns; memory of every size is
warm. Prints a table, then a JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from bench_common import commit, versions
from torch import Tensor

from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.ops import Ops, TorchOps

Operator = Callable[[Ops], object]
Forms = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("operators", "int8"), default="operators")
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name, forms in operators() if arguments.part == "operators" else products_of_int8():
            if not rows:
                print(f"{'operator':<44}" + "".join(f"{form:>16}" for form in forms))
            rows[name] = micros = least_micros(forms, arguments.repeats)
            first = next(iter(micros.values()))
            print(f"{name:<44}" + "".join(f"{value:>9.0f} {first / value:>5.2f}x" for value in micros.values()))
        exact = shares_of_exact() if arguments.part == "int8" else {}
    for name, share in exact.items():
        print(f"{name}: {share:.3f} of the exact product of the largest numbers")
    print(json.dumps({"bench": "bench_cpu_ops", "commit": commit(), **versions("torch"),
                      "capability": torch.backends.cpu.get_cpu_capability(), "repeats": arguments.repeats,
                      "part": arguments.part, "micros": rows, "shares_of_exact": exact}))


def operators() -> Iterator[tuple[str, Forms]]:
    for name, operator in shapes_vl():
        yield name, {"torch": partial(operator, TorchOps()), "ours": partial(operator, CpuOps())}


def shapes_vl() -> Iterator[tuple[str, Operator]]:
    sizes = ((2048, 128, 384), (2048, 384, 128), (512, 512, 512), (4096, 192, 1024), (256, 192, 1024))
    for rows, inputs, outputs in sizes:
        yield f"linear, {rows} x {inputs} to {outputs}", product(rows, inputs, outputs)
    yield "linear and GELU, 2048 x 128 to 384", product(2048, 128, 384, "tanh")
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


def product(rows: int, inputs: int, outputs: int, gelu: str | None = None) -> Operator:
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)

    def run(ops: Ops) -> Tensor:
        return ops.linear(x, weight, bias) if gelu is None else ops.linear_gelu(x, weight, bias, gelu)

    return run


def products_of_int8() -> Iterator[tuple[str, Forms]]:
    """Weights by row. `_int_mm` with inputs by row, as published formats have them; `linear_dynamic` with one scale for
    all inputs."""
    for model, inputs, outputs in (("0.6B, qkv", 1024, 4096), ("0.6B, gate and up", 1024, 6144),
                                   ("0.6B, down", 3072, 1024), ("1.7B, gate and up", 2048, 12288),
                                   ("1.7B, down", 6144, 2048)):
        weight = torch.randn(outputs, inputs)
        scale_O = weight.abs().amax(1) / 127
        values = (weight / scale_O[:, None]).round().to(torch.int8)
        quantised = torch.quantize_per_channel(weight, scale_O.double(), torch.zeros(outputs, dtype=torch.int64), 0,
                                               torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantised, None)
        for rows in (1, 8, 64):
            x = torch.randn(rows, inputs)
            yield f"{model}, {rows} x {inputs} to {outputs}", {
                "float32": partial(CpuOps().linear, x, weight, None),
                "_int_mm": partial(int_mm, x, values, scale_O),
                "linear_dynamic": partial(torch.ops.quantized.linear_dynamic, x, packed)}


def int_mm(x: Tensor, values: Tensor, scale_O: Tensor) -> Tensor:
    scale_T1 = x.abs().amax(1, keepdim=True).clamp_min_(1e-12).div_(127)
    return torch._int_mm((x / scale_T1).round_().to(torch.int8), values.t()).mul(scale_T1).mul_(scale_O)


def shares_of_exact() -> dict[str, float]:
    """What each product makes of the largest inputs and weights, of what it should be: sums of pairs in 16 bits are cut
    where a processor has no instruction for them (VNNI)."""
    values, ones_O = torch.full((8, 512), 127, dtype=torch.int8), torch.ones(8)
    zeros_O = torch.zeros(8, dtype=torch.int64)
    packed = torch.ops.quantized.linear_prepack(
        torch.quantize_per_channel(values.float(), ones_O.double(), zeros_O, 0, torch.qint8), None)
    largest = torch.ops.onednn.qlinear_pointwise(
        torch.full((2, 512), 255, dtype=torch.uint8), 1.0, 128, torch.ops.onednn.qlinear_prepack(values, None), ones_O,
        zeros_O.int(), None, 1.0, 0, torch.float32, "none", [], "")
    found = {"_int_mm": torch._int_mm(values, values.t()) / 127, "onednn.qlinear_pointwise": largest / 127}
    for name, is_reduced in (("linear_dynamic", False), ("linear_dynamic, inputs in 7 bits", True)):
        found[name] = torch.ops.quantized.linear_dynamic(torch.ones(2, 512), packed, is_reduced)
    return {name: round(product[0, 0].item() / (127 * 512), 3) for name, product in found.items()}


def least_micros(forms: Forms, repeats: int) -> dict[str, float]:
    least = dict.fromkeys(forms, float("inf"))
    for repeat in range(repeats + 1):  # the first is warm-up
        for name, form in forms.items():
            started = time.process_time()
            form()
            if repeat:
                least[name] = min(least[name], time.process_time() - started)
    return {name: seconds * 1e6 for name, seconds in least.items()}


if __name__ == "__main__":
    main()
