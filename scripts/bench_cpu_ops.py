"""The CPU's own forms of the operators against torch's, in the shapes of shapes-vl: a tower's group and a prefill step.

One thread, microseconds of its CPU time, the least of --repeats; memory of every size is warm. Prints a table, then a
JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

import torch
from bench_common import commit, versions
from torch import Tensor

from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.ops import Ops, TorchOps

Operator = Callable[[Ops], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    print(f"{'operator':<44}{'torch':>10}{'ours':>10}{'times':>8}")
    with torch.inference_mode():
        for name, operator in operators():
            micros = [least_micros(operator, ops, arguments.repeats) for ops in (TorchOps(), CpuOps())]
            rows[name] = {"torch": micros[0], "ours": micros[1]}
            print(f"{name:<44}{micros[0]:>10.0f}{micros[1]:>10.0f}{micros[0] / micros[1]:>8.2f}")
    print(json.dumps({"bench": "bench_cpu_ops", "commit": commit(), **versions("torch"),
                      "capability": torch.backends.cpu.get_cpu_capability(), "repeats": arguments.repeats,
                      "micros": rows}))


def operators() -> Iterator[tuple[str, Operator]]:
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


def least_micros(operator: Operator, ops: Ops, repeats: int) -> float:
    operator(ops)
    least = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        operator(ops)
        least = min(least, time.process_time() - started)
    return least * 1e6


if __name__ == "__main__":
    main()
