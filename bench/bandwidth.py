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
# (values a program reads at once, warps, programs for each multiprocessor)
_FORMS = ((2048, 4, 8), (4096, 8, 4), (8192, 8, 2), (8192, 16, 2), (16384, 16, 2))


def measure_read_bandwidth(device: torch.device, num_bytes: int) -> tuple[float, str]:
    """(bytes per second, which kernel read them) over `num_bytes`, a multiple of 64 KiB, at most 64 MiB on a CPU."""
    values = torch.ones(min(num_bytes, _MOST_ON_CPU) if device.type == "cpu" else num_bytes, dtype=torch.uint8,
                        device=device)
    rates = {name: values.numel() / _best_seconds(read, device) for name, read in _readers(values).items()}
    best = max(rates, key=rates.__getitem__)
    return rates[best], best


def _readers(values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Kernels that read all of `values` (bytes), by name."""
    weight_OI = values.view(torch.bfloat16).view(-1, _NUM_INPUTS)
    readers: dict[str, Callable[[], object]] = {"sum": values.view(torch.float32).sum}
    for num_rows in (1, 8):
        x_NI = torch.ones(num_rows, _NUM_INPUTS, dtype=torch.bfloat16, device=values.device)
        readers[f"GEMM, batch {num_rows}"] = partial(F.linear, x_NI, weight_OI)
    if values.device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(values.device).multi_processor_count
        for block, num_warps, programs in _FORMS:
            readers[f"Triton, {block} values, {num_warps} warps, {programs} programs"] = _triton_reader(
                values.view(torch.int32), block, num_warps, multiprocessors * programs)
    return readers


def _triton_reader(values: torch.Tensor, block: int, num_warps: int, num_programs: int) -> Callable[[], object]:
    """A kernel that only reads; which of its forms is fastest differs by GPU."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def sum_kernel(values_ptr, sums_ptr, num_blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        places = tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.int32)
        for index in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
            total += tl.load(values_ptr + tl.cast(index, tl.int64) * BLOCK + places)
        tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))

    sums = torch.empty(num_programs, dtype=torch.int32, device=values.device)
    return lambda: sum_kernel[(num_programs,)](values, sums, values.numel() // block, BLOCK=block, num_warps=num_warps)


def _best_seconds(read: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, several launched at once; the first round warms up."""
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
