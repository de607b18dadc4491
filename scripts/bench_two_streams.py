"""Would decode steps beside a prefill, on a second stream, save time? What both take together, and one after the other.

    python scripts/bench_two_streams.py [--batch-size 64 128 256]

A prefill's matrix products (8,192 tokens) and whole decode steps but for their norms (products, attention over
720 tokens each) of Qwen3-VL-4B's text shape, each captured in a graph; the decode steps' stream has the higher
priority. CUDA only. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from bench_common import commit, versions
from bench_cuda_attention import Contexts, Heads
from bench_cuda_kernels import DEVICE

from npu_runner.platforms import pick_platform
from npu_runner.platforms.cuda.attention.backend import TritonAttention

_HIDDEN, _MLP, _LAYERS, _TOKENS, _CONTEXT = 2560, 9728, 36, 8192, 720
_HEADS = Heads(32, 8, 128)
_DTYPE = torch.bfloat16
_NUM_PREFILLS, _REPEATS = 4, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[64, 128, 256])
    arguments = parser.parse_args()
    pick_platform("cuda").devices.set_device(0)
    with torch.inference_mode():
        layers = [_weights() for _ in range(_LAYERS)]
        results = [measure(layers, batch_size) for batch_size in arguments.batch_size]
    print(json.dumps({"bench": "bench_two_streams", "commit": commit(), "device": torch.cuda.get_device_name(),
                      "versions": versions("torch", "triton"), "results": results}))


def measure(layers: list[list[torch.Tensor]], batch_size: int) -> dict[str, float]:
    """Milliseconds, with as many decode steps as take as long as the prefills."""
    first, other = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
    step, products = _decode_step(layers, batch_size), _prefill(layers)  # graphs read the memory that these have
    decode, prefill = _captured(step, first), _captured(products, other)

    def seconds(num_decodes: int, num_prefills: int) -> float:
        rounds = []
        for _ in range(_REPEATS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for stream, graph, count in ((other, prefill, num_prefills), (first, decode, num_decodes)):
                with torch.cuda.stream(stream):
                    for _ in range(count):
                        graph.replay()
            torch.cuda.synchronize()
            rounds.append(time.perf_counter() - started)
        return statistics.median(rounds)

    of_prefills = seconds(0, _NUM_PREFILLS)
    num_decodes = max(1, round(of_prefills / seconds(8, 0) * 8))
    apart, together = of_prefills + seconds(num_decodes, 0), seconds(num_decodes, _NUM_PREFILLS)
    print(f"{num_decodes} decode steps of {batch_size} beside {_NUM_PREFILLS} prefills: {1e3 * together:.1f} ms, one "
          f"after the other {1e3 * apart:.1f} ms: {1 - together / apart:.1%} saved", flush=True)
    return {"batch_size": batch_size, "num_decodes": num_decodes, "together_ms": 1e3 * together,
            "apart_ms": 1e3 * apart}


def _weights() -> list[torch.Tensor]:
    shapes = ((_HIDDEN, 6144), (4096, _HIDDEN), (_HIDDEN, 2 * _MLP), (_MLP, _HIDDEN))
    return [0.02 * torch.randn(shape, device=DEVICE, dtype=_DTYPE) for shape in shapes]


def _decode_step(layers: list[list[torch.Tensor]], batch_size: int) -> Callable[[], None]:
    contexts = Contexts(_HEADS, [_CONTEXT] * batch_size)
    metadata, backend = contexts.metadata(), TritonAttention(**_HEADS.settings)
    q_BNH = torch.randn(batch_size, _HEADS.num_heads, _HEADS.head_dim, device=DEVICE, dtype=_DTYPE)
    x_BD = torch.randn(batch_size, _HIDDEN, device=DEVICE, dtype=_DTYPE)

    def run() -> None:
        for number, (qkv, o, gate_up, down) in enumerate(layers):
            _ = x_BD @ qkv
            keys, values = contexts.layers[number % len(contexts.layers)]
            _ = backend.decode(q_BNH, keys, values, metadata, _HEADS.head_dim**-0.5).flatten(1) @ o
            _ = (x_BD @ gate_up)[:, :_MLP] @ down

    return run


def _prefill(layers: list[list[torch.Tensor]]) -> Callable[[], None]:
    x_TD, heads_TD, mlp_TD = (torch.randn(_TOKENS, size, device=DEVICE, dtype=_DTYPE) for size in (_HIDDEN, 4096, _MLP))

    def run() -> None:
        for qkv, o, gate_up, down in layers:
            for x, weight in ((x_TD, qkv), (heads_TD, o), (x_TD, gate_up), (mlp_TD, down)):
                _ = x @ weight

    return run


def _captured(run: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph


if __name__ == "__main__":
    main()
