"""Blocks of the KV cache are copied byte by byte, in all layers, of every dtype that a cache has."""

from __future__ import annotations

import pytest
import torch

from npu_runner.platforms import pick_platform
from tests.oracle.block_copies import assert_copies


@pytest.mark.parametrize("block_size", [2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_copy_has_the_bytes_of_its_source_and_no_other_block_changes(dtype: torch.dtype, block_size: int,
                                                                       platform_name: str) -> None:
    platform = pick_platform(platform_name)
    device = platform.devices.set_device(0)
    if device.type == "npu" and dtype in (torch.float32, torch.float8_e4m3fn):
        pytest.skip("no cache has this dtype there")
    model_dtype = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    attention = platform.make_attention("auto", num_heads=2, num_kv_heads=2, head_dim=64, block_size=block_size,
                                        dtype=model_dtype)
    for seed in range(20):
        assert_copies(attention, device, dtype, seed, block_size=block_size)
