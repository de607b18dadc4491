"""A layer's experts in bfloat16, FP8 by block and int8: rounding, the router's order, GEMMs and sum."""
# ruff: noqa: B023  A case is measured before its loop goes on.

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from bench.cuda.cases import CALLS, DEVICE, Case
from npu_runner.platforms import pick_platform
from npu_runner.platforms.quantised import FP8_BLOCK, QuantisedExperts


class Shape(NamedTuple):
    """E experts, K of them a token, D hidden size, I width."""

    num_experts: int
    top_k: int
    hidden_size: int
    width: int


SHAPES = {"30b-a3b": Shape(128, 8, 2048, 768), "35b-a3b": Shape(256, 8, 2048, 512)}
WEIGHTS = {"bf16": 2, "fp8": 1, "int8": 1}
"""Bytes of a weight."""
TOKENS = (1, 2, 8, 64, 256, 1024, 8192)


def experts(arguments: Namespace) -> Iterator[Case]:
    """For prompts, torch's grouped GEMM over rows in order beside it."""
    platform = pick_platform("cuda")
    ops = platform.make_ops()
    for name in arguments.shape:
        shape = SHAPES[name]
        num_experts, top_k, hidden_size, width = shape
        for weights, itemsize in WEIGHTS.items():
            run = ops.experts if weights == "bf16" else platform.make_quantised_ops(ops).experts
            layers = [[_matrix(shape, 2 * width, hidden_size, weights), _matrix(shape, hidden_size, width, weights)]
                      for _ in range(2)]
            for num_tokens in TOKENS:
                x_TD = torch.randn(num_tokens, hidden_size, device=DEVICE, dtype=torch.bfloat16)
                choices = [ops.route(torch.randn(num_tokens, num_experts, device=DEVICE).bfloat16(), top_k, True)
                           for _ in range(CALLS)]
                active = sum(len(experts_TK.unique()) for _, experts_TK in choices) / CALLS
                work: dict[str, Any] = {"num_bytes": itemsize * active * 3 * hidden_size * width,
                                        "operations": 2.0 * num_tokens * top_k * 3 * hidden_size * width}
                yield Case(name=f"{name} {weights}, {num_tokens} tokens, {active:.0f} active", in_graph=True,
                           call=lambda index: run(x_TD, *choices[index % CALLS], *layers[index % 2]), **work)
                if weights == "bf16" and num_tokens >= 1024:
                    yield Case(name=f"torch._grouped_mm, {num_tokens} tokens in order",
                               call=_grouped_mm(shape, num_tokens, layers), **work)


def _matrix(shape: Shape, num_outputs: int, num_inputs: int, weights: str) -> Any:
    """(E, O, I) of random numbers; quantised ones with scales."""
    size = (shape.num_experts, num_outputs, num_inputs)
    if weights == "bf16":
        return torch.randn(size, device=DEVICE, dtype=torch.bfloat16) * num_inputs**-0.5
    values = torch.randint(-127, 128, size, device=DEVICE, dtype=torch.int8)
    if weights == "int8":
        return QuantisedExperts(values, torch.full(size[:2], num_inputs**-0.5 / 73, device=DEVICE))
    grid = (size[0], num_outputs // FP8_BLOCK, num_inputs // FP8_BLOCK)
    return QuantisedExperts(values.to(torch.bfloat16).to(torch.float8_e4m3fn),
                            torch.full(grid, num_inputs**-0.5 / 73, device=DEVICE))


def _grouped_mm(shape: Shape, num_tokens: int, layers: Any) -> Callable[[int], Any]:
    num_pairs = num_tokens * shape.top_k
    rows_PD = torch.randn(num_pairs, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    ends_E = (torch.arange(1, shape.num_experts + 1, device=DEVICE) * num_pairs // shape.num_experts).int()

    def call(index: int) -> None:
        gate_up, down = layers[index % 2]
        gate, up = torch._grouped_mm(rows_PD, gate_up.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
        torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=ends_E)

    return call
