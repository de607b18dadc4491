"""Which kernel multiplies: by M, N, K, dtype and form of the weight, on each kind of GPU.

The device is a stub, and operands have no memory: nothing is compiled or launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from npu_runner.platforms.cuda import compiled_source, gpu
from npu_runner.platforms.cuda.matmul import (
    hopper_fp8,
    hopper_grouped_small_m,
    hopper_grouped_wgmma,
    hopper_small_m,
    kernels,
    small_n,
)
from npu_runner.platforms.cuda.matmul.operands import Matmul
from npu_runner.platforms.grouped import GroupedWeight

HOPPER, AMPERE = ((9, 0), 132, 232_448), ((8, 0), 108, 166_912)
"""Compute capability, multiprocessors, and shared memory of a program."""
M = (1, 2, 3, 8, 9, 15, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 192, 193, 256, 257, 512)

# (device, form, N, K): the kernel from each M on.
TABLE = {
    (HOPPER, "bfloat16", 4096, 4096): {1: "hopper_small_m", 17: "library"},
    (HOPPER, "bfloat16", 2048, 4096): {1: "small_m", 2: "hopper_small_m", 17: "library"},
    (HOPPER, "bfloat16", 1024, 4096): {1: "small_m", 17: "library"},
    (HOPPER, "bfloat16", 151_936, 4096): {1: "small_m", 17: "library"},
    (HOPPER, "bfloat16", 128, 2048): {1: "small_n", 65: "library"},
    (HOPPER, "bfloat16", 2048, 2052): {1: "small_m", 2: "library"},
    (HOPPER, "bfloat16", 32_768, 512): {1: "library"},
    (HOPPER, "float32", 4096, 4096): {1: "library"},
    (HOPPER, "int8", 4096, 4096): {1: "quantised", 65: "library"},
    (HOPPER, "int8", 4096, 4100): {1: "library"},
    (HOPPER, "fp8", 6144, 4096): {1: "hopper_small_m", 17: "hopper_fp8", 193: "library"},
    (HOPPER, "fp8", 1024, 1024): {1: "quantised", 17: "hopper_fp8", 193: "library"},
    (HOPPER, "fp8 blocks", 6144, 4096): {1: "hopper_small_m", 17: "quantised", 33: "hopper_fp8", 97: "library"},
    (HOPPER, "4 bits", 4096, 4096): {1: "hopper_grouped_small_m", 17: "grouped", 129: "hopper_grouped_wgmma",
                                     257: "library"},
    (HOPPER, "4 bits", 4100, 4096): {1: "grouped", 257: "library"},
    (HOPPER, "8 bits", 4096, 4096): {1: "hopper_grouped_small_m", 17: "grouped", 129: "hopper_grouped_wgmma",
                                     257: "library"},
    (AMPERE, "bfloat16", 4096, 4096): {1: "small_m", 17: "library"},
    (AMPERE, "bfloat16", 128, 2048): {1: "small_n", 65: "library"},
    (AMPERE, "int8", 4096, 4096): {1: "quantised", 65: "library"},
    (AMPERE, "4 bits", 4096, 4096): {1: "grouped", 257: "library"},
}


class LoadedKernel:
    def __init__(self, *_: object):
        pass

    def most_clusters(self, _: int, cluster: int) -> int:
        return HOPPER[1] // cluster


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Calls with the device to be on."""
    caches = (gpu.is_hopper, gpu.num_sms, small_n._has_room, hopper_fp8.choose_tile, hopper_fp8._kernel,
              hopper_small_m._kernel, hopper_grouped_small_m._kernel, hopper_grouped_wgmma._kernel)

    def be_on(device: tuple[tuple[int, int], int, int]) -> None:
        for cache in caches:
            cache.cache_clear()
        properties = SimpleNamespace(multi_processor_count=device[1], shared_memory_per_block_optin=device[2])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: device[0])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
        monkeypatch.setattr(compiled_source, "LoadedKernel", LoadedKernel)
        monkeypatch.setattr(compiled_source.CompiledSource, "cubin", lambda self: b"")

    yield be_on
    for cache in caches:
        cache.cache_clear()


def matmul_of(form: str, num_rows: int, num_outputs: int, num_inputs: int) -> Matmul:
    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    shape, groups = (num_outputs, num_inputs), num_inputs // 128
    if form in ("bfloat16", "float32"):
        dtype = getattr(torch, form)
        return Matmul(empty(num_rows, num_inputs, dtype=dtype), empty(*shape, dtype=dtype), None, dtype)
    if form.endswith("bits"):
        pieces, width = -(-num_outputs // 64), num_inputs // 64 // (2 if form == "4 bits" else 1)
        values = empty(pieces, width, 64, 64, dtype=torch.uint8 if form == "4 bits" else torch.int8)
        weight = GroupedWeight(values, empty(groups, num_outputs), None)
        return Matmul(empty(num_rows, num_inputs), weight, None, torch.bfloat16)
    dtype = torch.int8 if form == "int8" else torch.float8_e4m3fn
    scales = empty(num_rows, dtype=torch.float32), empty(num_outputs, dtype=torch.float32)
    if form == "fp8 blocks":
        scales = (empty(groups, num_rows, dtype=torch.float32).t(),
                  empty(-(-num_outputs // 128), groups, dtype=torch.float32))
    return Matmul(empty(num_rows, num_inputs, dtype=dtype), empty(*shape, dtype=dtype), None, torch.bfloat16, *scales)


@pytest.mark.parametrize("case", TABLE, ids=lambda case: f"sm_{case[0][0][0]}{case[0][0][1]} {case[1]} {case[2:]}")
def test_the_kernel_of_a_matmul(case: tuple[tuple[tuple[int, int], int, int], str, int, int], on: object) -> None:
    device, form, *sizes = case
    on(device)  # type: ignore[operator]
    names = [(kernels.choose(matmul_of(form, num_rows, *sizes)).__name__.rpartition(".")[2], num_rows)
             for num_rows in M]  # type: ignore[attr-defined]
    assert {next(rows)[1]: name for name, rows in groupby(names, key=lambda each: each[0])} == TABLE[case]
