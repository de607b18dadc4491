"""Blocks of the KV cache are copied byte by byte, of every dtype that a cache has, in pieces where they are many."""

from __future__ import annotations

import pytest
import torch

from npu_runner.platforms import pick_platform
from npu_runner.runner import block_copies
from npu_runner.runner.block_copies import copy_blocks


@pytest.mark.parametrize("piece_bytes", [1, 4096, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_copy_has_the_bytes_of_its_source_and_no_other_block_changes(dtype: torch.dtype, piece_bytes: int,
                                                                       platform_name: str,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    platform = pick_platform(platform_name)
    device = platform.devices.set_device(0)
    if dtype == torch.float8_e4m3fn and device.type == "npu":
        pytest.skip("no cache has this dtype there")
    monkeypatch.setattr(block_copies, "_PIECE_BYTES", piece_bytes)
    copies = [(1, 2), (1, 6), (7, 3)]
    caches = [torch.randint(256, (3, 9, 4, 2, 8 * dtype.itemsize), dtype=torch.uint8) for _ in range(2)]
    on_device = [cache.clone().to(device).view(dtype) for cache in caches]
    copy_blocks(on_device, platform.memory, copies)
    for cache, copied in zip(caches, on_device, strict=True):
        for source, target in copies:
            cache[:, target] = cache[:, source]
        assert torch.equal(copied.view(torch.uint8).cpu(), cache)
