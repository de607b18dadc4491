"""What is measured of a CUDA kernel, and how: the profiler's times, what overlaps once, or those of a graph of several
calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench.profiler import busy_ns, device_profile

CALLS = 12
DEVICE = torch.device("cuda")
_REPLAYS = 9


@dataclass(frozen=True, kw_only=True)
class Case:
    """`call(i)` is the i-th of several calls over different buffers; what one of them must move and compute."""

    name: str
    call: Callable[[int], Any]
    num_bytes: float = 0
    operations: float = 0
    in_graph: bool = False
    """Timed as a graph of several calls: with the gaps between kernels, as a decode step has them."""


def rotate(run: Callable[..., Any], layers: Sequence[Any]) -> Callable[[int], Any]:
    """Calls `run` with one layer's buffers after the other, so that none is in the L2 cache."""
    return lambda index: run(layers[index % len(layers)])


def measure(case: Case) -> dict[str, Any]:
    for index in range(3):
        case.call(index)
    torch.cuda.synchronize()
    with device_profile("cuda") as profile:
        for index in range(CALLS):
            case.call(index)
    # A kernel that is started before the one before has ended waits for a part of its time.
    total = _in_graph(case) if case.in_graph else busy_ns(profile.spans_ns) / 1e3 / CALLS
    kernels = {name: microseconds / CALLS for name, microseconds in profile.microseconds.most_common(8)}
    return {"name": case.name, "microseconds": total, "gb_per_second": case.num_bytes / total / 1e3,
            "tflops": case.operations / total / 1e6, "kernels": kernels}


def _in_graph(case: Case) -> float:
    """Microseconds of a call within a graph of CALLS of them, the median of several replays."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [case.call(index) for index in range(CALLS)]  # none takes the memory of one before
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    del outputs
    return statistics.median(times)


def report(result: dict[str, Any]) -> str:
    kernels = ", ".join(f"{name[:40]} {microseconds:.1f}" for name, microseconds in result["kernels"].items())
    return (f"{result['name']:<46}{result['microseconds']:>10.1f} us{result['gb_per_second']:>8.0f} GB/s"
            f"{result['tflops']:>7.1f} TFLOP/s   {kernels}")


@contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """`values` in the place of the owner's own, while a case of this run is measured."""
    kept = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)
