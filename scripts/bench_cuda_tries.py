"""Attention kernels that are being tried, each in a process of its own: microseconds, TFLOP/s or GB/s, and the error.

    python scripts/bench_cuda_tries.py [--part tower decode] [--list]

The processes compile beside one another and take turns on the GPU, so an access that it refuses ends one of them only.
Errors are against the definition in float32 over the same bfloat16 inputs, of its largest value.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_READY = "ready"
_SECONDS = 80.0
_LOG2_E = math.log2(math.e)
_OTHER_PTXAS = "ptxas-blackwell"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("tower", "decode"), nargs="+", default=["tower", "decode"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    tries = [(part, settings) for part in arguments.part for settings in (TOWER if part == "tower" else DECODE)]
    if arguments.one:
        run_one(*tries[int(arguments.one)])
    elif arguments.list:
        print(*tries, sep="\n")
    else:
        run_all(arguments.part, tries)


def run_all(parts: list[str], tries: list[Any]) -> None:
    """All compile at once and wait; then each has the GPU for itself."""
    import threading

    began, children = time.monotonic(), []
    for index, (_, settings) in enumerate(tries):
        command = [sys.executable, __file__, "--part", *parts, "--one", str(index)]
        children.append(subprocess.Popen(command, env=environment(settings), stdin=subprocess.PIPE, text=True,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    last = threading.Timer(_SECONDS, lambda: [child.kill() for child in children])
    last.start()
    for child in children:
        while (line := child.stdout.readline()) and line.strip() != _READY:
            pass
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    for (part, settings), child in zip(tries, children, strict=True):
        try:
            out, err = child.communicate("go\n")
        except BrokenPipeError:
            out, err = "", child.stderr.read()
        reason = ([line for line in err.strip().splitlines() if "rror" in line] or ["out of time"])[-1][:110]
        print(out.rstrip() or f"{part} {settings}: {reason}", flush=True)
    last.cancel()
    print(f"{time.monotonic() - began:.0f} s")


def wait_for_turn() -> None:
    """Everything is compiled; nobody else uses the GPU from here on."""
    print(_READY, flush=True)
    sys.stdin.readline()


def environment(settings: dict[str, Any]) -> dict[str, str]:
    import triton

    if not settings.get("other_ptxas"):
        return dict(os.environ)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / _OTHER_PTXAS
    cache = tempfile.mkdtemp()
    return {**os.environ, "TRITON_PTXAS_PATH": str(tool), "TRITON_CACHE_DIR": cache}


def run_one(part: str, settings: dict[str, Any]) -> None:
    import torch

    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    torch.manual_seed(0)
    with torch.inference_mode():
        (tower if part == "tower" else decode)(settings)


def microseconds(calls: list[Callable[[], Any]]) -> float:
    """Of one call, in a graph of several, the median of 7."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


# -- the tower's attention: 14 pictures of 2,352 patches, 16 heads, bfloat16 ------------------------------------------

def _tower_tries() -> Iterator[dict[str, Any]]:
    for rows, columns, warps, stages in ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2),
                                         (64, 128, 4, 2)):
        yield {"dim": 80, "way": "padded", "tile": (rows, columns, warps, stages)}
        yield {"dim": 80, "way": (64, 16), "tile": (rows, columns, warps, stages)}
    yield {"dim": 80, "way": (64, 16), "tile": (64, 64, 4, 1)}
    yield {"dim": 80, "way": (64, 16), "tile": (64, 64, 4, 3), "other_ptxas": True}
    yield {"dim": 80, "way": (64, 16), "tile": (128, 128, 8, 2), "other_ptxas": True}
    yield {"dim": 80, "way": (64, 16), "tile": (64, 64, 4, 3), "ptx_options": "--opt-level 1"}
    yield {"dim": 80, "way": (64, 32), "tile": (64, 64, 4, 3)}
    yield {"dim": 80, "way": (64, 32), "tile": (128, 64, 8, 3)}
    for way, tile in (("padded", (64, 64, 4, 3)), ((64, 16), (64, 64, 4, 3)), ((64, 16), (128, 128, 8, 2))):
        yield {"dim": 72, "way": way, "tile": tile}


def tower(settings: dict[str, Any]) -> None:
    import torch

    Tower(settings, [64]).call()
    torch.cuda.synchronize()
    wait_for_turn()
    work = Tower(settings, [2352] * 14)
    work.call()
    error = work.error()
    us = microseconds([work.call] * 5)
    tflops = 4.0 * 14 * 2352**2 * 16 * settings["dim"] / us / 1e6
    extra = {name: value for name, value in settings.items() if name not in ("dim", "way", "tile")} or ""
    print(f"tower {settings['dim']} {settings['way']!s:<10}{settings['tile']!s:<20}{us:9.1f} us {tflops:6.1f} TFLOP/s  "
          f"error {error:.1e} {extra}")


class Tower:
    def __init__(self, settings: dict[str, Any], lengths: list[int]):
        import torch

        self.dim, self.way, (self.rows, columns, num_warps, num_stages) = (settings[x] for x in ("dim", "way", "tile"))
        self.lengths = lengths
        device = torch.device("cuda")
        self.qkv = torch.randn(sum(lengths), 3, 16, self.dim, device=device).bfloat16()
        self.out = torch.empty((sum(lengths), 16, self.dim), dtype=torch.bfloat16, device=device)
        self.starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32,
                                   device=device)
        self.constants = {"NUM_HEADS": 16, "FACTOR": self.dim**-0.5 * _LOG2_E, "HEAD_DIM": self.dim,
                          "ROWS": self.rows, "COLUMNS": columns, "num_warps": num_warps, "num_stages": num_stages}
        self.constants.update({"HEAD": 128} if self.way == "padded" else {"FIRST": self.way[0], "REST": self.way[1]})
        if "ptx_options" in settings:
            self.constants["ptx_options"] = settings["ptx_options"]

    def call(self) -> None:
        from cuda_tries import split_pictures

        from npu_runner.platforms.cuda.vision_kernels import pictures

        kernel = pictures if self.way == "padded" else split_pictures
        q, k, v = self.qkv.unbind(1)
        kernel[(-(-max(self.lengths) // self.rows), 16, len(self.lengths))](
            q, k, v, self.out, self.starts, q.stride(0), k.stride(0), v.stride(0), **self.constants)

    def error(self) -> float:
        """Of the first picture and of the last."""
        errors = []
        for part in (slice(0, self.lengths[0]), slice(-self.lengths[-1], None)):
            q, k, v = (x[part].float().transpose(0, 1) for x in self.qkv.unbind(1))
            expected = ((q @ k.transpose(1, 2) * self.dim**-0.5).softmax(-1) @ v).transpose(0, 1)
            errors.append(float((self.out[part].float() - expected).abs().max() / expected.abs().max()))
        return max(errors)


# -- decode attention: 8 kv heads, groups of 4, head dim 128 ----------------------------------------------------------

_PARTS = ((2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 3), (8, 4), (16, 2), (16, 3), (16, 4), (16, 6))
_BATCHES = {"8 x 512": [512] * 8, "8 x 2048": [2048] * 8, "32 mixed": 32, "32 x 640": [640] * 32, "64 mixed": 64,
            "64 x 640": [640] * 64, "256 mixed": 256}


def _decode_tries() -> Iterator[dict[str, Any]]:
    yield {"way": "now"}
    for columns, num_warps, num_stages in ((64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 2, 3), (32, 4, 3), (32, 2, 4),
                                           (128, 4, 2), (128, 8, 3)):
        yield {"way": "fused", "tile": (columns, num_warps, num_stages)}


def decode(settings: dict[str, Any]) -> None:
    import torch

    Decode(settings, [64]).call(0, 2, 1)
    torch.cuda.synchronize()
    wait_for_turn()
    for name, lengths in _BATCHES.items():
        if isinstance(lengths, int):
            draw = random.Random(1)
            lengths = [draw.randint(100, 1024) + 60 for _ in range(lengths)]
        line = Decode(settings, lengths).line()
        print(f"decode {settings['way']} {settings.get('tile', '')!s:<11}{name:<10} {line}", flush=True)


class Decode:
    def __init__(self, settings: dict[str, Any], lengths: list[int]):
        import torch
        from bench_cuda_attention import Contexts, Heads

        from npu_runner.platforms.cuda.attention import TritonAttention

        heads = Heads(32, 8, 128)
        self.settings, self.batch_size = settings, len(lengths)
        self.contexts = Contexts(heads, lengths)
        self.metadata = self.contexts.metadata()
        self.q = torch.randn(len(lengths), 32, 128, device="cuda").bfloat16()
        self.backend = TritonAttention(**heads.settings)
        self.arrivals = torch.zeros(len(lengths) * 8, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(self.q)
        self.parts = torch.empty((len(lengths), 32, 16, 128), device="cuda")
        self.weights = torch.empty((len(lengths), 32, 16, 2), device="cuda")

    def now(self, layer: int) -> Any:
        return self.backend.decode(self.q, *self.contexts.layers[layer], self.metadata, 128**-0.5)

    def call(self, layer: int, num_parts: int, least_steps: int) -> None:
        from cuda_tries import decode as fused

        if self.settings["way"] == "now":
            self.now(layer)
            return
        columns, num_warps, num_stages = self.settings["tile"]
        tables = self.metadata.block_tables_BW
        fused[(8, num_parts, self.batch_size)](
            self.q, *self.contexts.layers[layer], self.out, self.parts, self.weights, self.arrivals, tables,
            self.metadata.context_lens_B, self.q.stride(0), tables.stride(0), num_parts, least_steps,
            FACTOR=128**-0.5 * _LOG2_E, NUM_KV_HEADS=8, GROUP=4, HEAD_DIM=128, BLOCK_SIZE=64, ROWS=16,
            COLUMNS=columns, HEAD=128, num_warps=num_warps, num_stages=num_stages)

    def line(self) -> str:
        """Microseconds of each number of parts (and least steps of one); the best one's share of 4.5 TB/s."""
        layers, num_bytes = range(len(self.contexts.layers)), self.contexts.num_bytes
        if self.settings["way"] == "now":
            us = microseconds([lambda layer=layer: self.now(layer) for layer in layers])
            return f"{us:6.1f} us {num_bytes / us / 4.5e6:.0%}"
        expected, found = self.now(0).float(), []
        for parts, least in _PARTS:
            if not 64 <= 8 * self.batch_size * parts <= 8192:
                continue
            self.call(0, parts, least)
            error = float((self.out.float() - expected).abs().max() / expected.abs().max())
            us = microseconds([lambda layer=layer, of=(parts, least): self.call(layer, *of) for layer in layers])
            found.append((us, f"{parts}/{least} {us:.1f}" + (f" WRONG {error:.0e}" if not error < 1e-2 else "")))
        best = min(found)[0]
        return f"{best:6.1f} us {num_bytes / best / 4.5e6:.0%} | " + ", ".join(text for _, text in found)


TOWER, DECODE = list(_tower_tries()), list(_decode_tries())

if __name__ == "__main__":
    main()
