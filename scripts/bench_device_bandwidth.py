"""How fast a device reads its memory: the best of several kernels that do little else; each falls short somewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

_ROUNDS, _CALLS = 11, 8
_MOST_ON_CPU = 64 << 20
_NUM_INPUTS = 2048


def measure_read_bandwidth(device: torch.device, num_bytes: int) -> tuple[float, str]:
    """(bytes per second, which kernel read them) over `num_bytes`, a multiple of 64 KiB, at most 64 MiB on a CPU."""
    values = torch.ones(min(num_bytes, _MOST_ON_CPU) if device.type == "cpu" else num_bytes, dtype=torch.uint8,
                        device=device)
    rates = {name: values.numel() / _best_seconds(read, device) for name, read in _readers(values).items()}
    best = max(rates, key=rates.__getitem__)
    return rates[best], best


def _readers(values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Kernels that read all of `values` (bytes), by what they are."""
    weight_OI = values.view(torch.bfloat16).view(-1, _NUM_INPUTS)
    readers: dict[str, Callable[[], object]] = {"sum": values.view(torch.float32).sum}
    for num_rows in (1, 8):
        x_NI = torch.ones(num_rows, _NUM_INPUTS, dtype=torch.bfloat16, device=values.device)
        readers[f"product, batch {num_rows}"] = partial(F.linear, x_NI, weight_OI)
    if values.device.type == "cuda":
        import bench_cuda_reads

        readers |= bench_cuda_reads.readers(values.view(torch.int32))
    return readers


def _best_seconds(read: Callable[[], object], device: torch.device) -> float:
    """Of one call, several handed out at once; the first round warms up."""
    seconds = []
    for _ in range(_ROUNDS):
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(_CALLS):
            read()
        _synchronize(device)
        seconds.append((time.perf_counter() - started) / _CALLS)
    return min(seconds[1:])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
