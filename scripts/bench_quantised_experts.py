"""Experts in int8 and FP8 by block beside bfloat16 on one GPU: a layer's experts alone, and decode steps of a model.

    python scripts/bench_quantised_experts.py [--shape 30b-a3b 35b-a3b] [--part layer step] [--weights bf16 fp8 int8]
        [--sweep] [--repeats 2]

layer: microseconds within a graph of several calls: rounding, router's order, products and sum, the router left out.
Buffers of two layers take turns, so that none is found in the L2 cache. --sweep tries other tiles, and prints the
microseconds of both products by the profiler. step: milliseconds of a decode step at a context of 512, random weights.
Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_common import commit, versions
from bench_cuda_cases import CALLS, DEVICE, Case, measure
from bench_device_ours import _decode_steps
from bench_device_shapes import make_text_model
from bench_device_work import SIZES
from triton.runtime.errors import OutOfResources

from npu_runner import LLM
from npu_runner.platforms import pick_platform
from npu_runner.platforms.cuda import experts, quantised_experts
from npu_runner.platforms.cuda.experts import Tile, Tiling
from npu_runner.platforms.quantised import FP8_BLOCK, QuantisedExperts


class Shape(NamedTuple):
    """E experts, K of them a token, D hidden size, I width."""

    model: str
    num_experts: int
    top_k: int
    hidden_size: int
    width: int


SHAPES = {"30b-a3b": Shape("qwen3-30b-a3b", 128, 8, 2048, 768), "35b-a3b": Shape("qwen3.6-35b-a3b", 256, 8, 2048, 512)}
WEIGHTS = ("bf16", "fp8", "int8")
BATCHES, TOKENS = (1, 8, 64), (1, 2, 8, 64, 256, 1024, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--part", nargs="+", choices=("layer", "step"), default=["layer", "step"])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--repeats", type=int, default=2, help="of the steps")
    arguments = parser.parse_args()
    pick_platform("cuda").devices.set_device(0)
    results: list[dict[str, Any]] = []
    for name in arguments.shape:
        if "layer" in arguments.part:
            with torch.inference_mode():
                for weights in arguments.weights:
                    results += of_layer(SHAPES[name], weights, is_sweep=arguments.sweep)
            torch.cuda.empty_cache()
        if "step" in arguments.part:
            results += [of_steps(SHAPES[name], weights, arguments.repeats) for weights in arguments.weights]
    print(json.dumps({"bench": "bench_quantised_experts", "commit": commit(), "device": torch.cuda.get_device_name(),
                      "versions": versions("torch", "triton"), "results": results}))


def matrix(shape: Shape, num_outputs: int, num_inputs: int, weights: str) -> Any:
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


def of_layer(shape: Shape, weights: str, *, is_sweep: bool) -> Iterator[dict[str, Any]]:
    platform = pick_platform("cuda")
    ops = platform.make_ops()
    run = ops.experts if weights == "bf16" else platform.make_quantised_ops(ops).experts
    layers = [[matrix(shape, 2 * shape.width, shape.hidden_size, weights),
               matrix(shape, shape.hidden_size, shape.width, weights)] for _ in range(2)]
    for num_tokens in TOKENS:
        x_TD = torch.randn(num_tokens, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16)
        choices = [ops.route(torch.randn(num_tokens, shape.num_experts, device=DEVICE).bfloat16(), shape.top_k, True)
                   for _ in range(CALLS)]

        def call(index: int, x_TD: Any = x_TD, choices: Any = choices) -> None:
            run(x_TD, *choices[index % CALLS], *layers[index % 2])

        found = measure(Case(name=f"{shape.model} {weights}, {num_tokens} tokens", call=call, num_bytes=0,
                             in_graph=True))
        print(f"{found['name']:<46}{found['microseconds']:9.1f} us", flush=True)
        yield {"part": "layer", "model": shape.model, "weights": weights, "tokens": num_tokens,
               "microseconds": found["microseconds"], "kernels": found["kernels"]}
        if is_sweep and weights != "bf16" and num_tokens not in (2, 256):
            sweep(shape, weights, x_TD, choices, layers)


def sweep(shape: Shape, weights: str, x_TD: Any, choices: Any, layers: Any) -> None:
    average, tiled = len(x_TD) * shape.top_k / shape.num_experts, []
    for tiling in tilings(average, weights):

        def call(index: int, tiling: Tiling = tiling) -> None:
            weights_TK, experts_TK = choices[index % CALLS]
            pairs = experts.unsorted(experts_TK) if len(x_TD) <= experts.UNSORTED_TOKENS else experts.sort_pairs(
                experts_TK, shape.num_experts, tiling.rows)
            gate_up, down = layers[index % 2]
            quantised_experts.products(x_TD, weights_TK, pairs, gate_up, down, tiling)

        tiled.append((tiling, call))
    for tiling, call in tiled:
        try:
            kernels = measure(Case(name="", call=call, num_bytes=0))["kernels"]
        except OutOfResources:  # a tile that this GPU has no room for
            continue
        times = {name: kernels.get(name, 0.0) for name in ("gate_up", "down")}
        print(f"  {tiling.rows:>4} {tuple(tiling.gate_up)!s:<20}{times['gate_up']:8.1f}  {tuple(tiling.down)!s:<20}"
              f"{times['down']:8.1f}  all {sum(kernels.values()):8.1f}", flush=True)


def tilings(average: float, weights: str) -> Iterator[Tiling]:
    """Tiles of both products change together."""
    if average <= 8:
        rows, deep = 16, 256 if weights == "int8" else 128
        options = [((32, 128, 4, 4), (64, 128, 4, 4)), ((32, 128, 2, 6), (64, 128, 2, 6)),
                   ((64, 128, 4, 3), (128, 128, 4, 3)), ((64, 128, 4, 5), (128, 128, 4, 5)),
                   ((64, 128, 8, 4), (128, 128, 8, 4)), ((128, 128, 4, 3), (64, 128, 8, 4)),
                   ((32, deep, 4, 3), (64, deep, 4, 3)), ((16, deep, 4, 4), (32, deep, 4, 4)),
                   ((64, deep, 4, 3), (128, deep, 4, 2))]
    elif average <= 48:
        rows = 32
        options = [((64, 128, 4, 4), (128, 128, 4, 4)), ((64, 128, 8, 4), (128, 128, 8, 4)),
                   ((128, 128, 4, 3), (64, 128, 4, 4)), ((128, 128, 8, 3), (64, 128, 4, 3))]
    else:
        rows = 128
        options = [((64, 128, 8, 3), (128, 128, 8, 3)), ((64, 128, 4, 3), (128, 128, 4, 3)),
                   ((128, 128, 8, 3), (128, 128, 8, 4)), ((128, 128, 8, 2), (64, 128, 4, 4))]
        if weights == "int8":
            options += [((128, 64, 8, 3), (256, 64, 8, 3)), ((128, 128, 8, 3), (256, 128, 8, 3))]
    for gate_up, down in options:
        yield Tiling(most_pairs_per_expert=0, rows=rows, gate_up=Tile(*gate_up), down=Tile(*down))
    if rows == 128:
        for gate_up, down in (((64, 128, 4, 3), (128, 128, 4, 3)), ((128, 128, 8, 3), (128, 128, 8, 3))):
            yield Tiling(most_pairs_per_expert=0, rows=64, gate_up=Tile(*gate_up), down=Tile(*down))


def of_steps(shape: Shape, weights: str, repeats: int) -> dict[str, Any]:
    sizes = replace(SIZES["real"], decode_model=shape.model)
    with tempfile.TemporaryDirectory() as folder:
        path = make_text_model(Path(folder), shape.model)
        if weights == "fp8":
            config = json.loads((path / "config.json").read_text())
            config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
            (path / "config.json").write_text(json.dumps(config))
        with LLM(path, platform="cuda", load_format="dummy", max_num_seqs=max(BATCHES), memory_utilization=0.97,
                 max_model_len=2 * sizes.context + 4 * sizes.decode_steps,
                 quantization="int8" if weights == "int8" else "auto") as llm:
            milliseconds = {size: statistics.median(_decode_steps(llm, size, sizes, repeats)["milliseconds"])
                            for size in BATCHES}
    shown = " / ".join(f"{each:.2f}" for each in milliseconds.values())
    print(f"{shape.model} {weights}: {shown} ms a step at batch {' / '.join(map(str, BATCHES))}", flush=True)
    return {"part": "step", "model": shape.model, "weights": weights, "milliseconds": milliseconds}


if __name__ == "__main__":
    main()
