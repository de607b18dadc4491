"""The tower's attention of every backend against the definition of attention, for images of many sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.profiler import device_profile
from npu_runner.platforms import pick_platform
from npu_runner.platforms.attention import AttentionBackend
from tests.oracle.attention_reference import within_each

# T tokens, N heads, H head dim, L tokens of one image

LENGTHS = [4, 300, 300, 300, 64, 1024, 4]
NUM_HEADS = 4
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def qkv(head_dim: int, dtype: torch.dtype, lengths: list[int], device: torch.device) -> tuple[Tensor, ...]:
    """Slices of one product, as the tower has them."""
    torch.manual_seed(0)
    return torch.randn(sum(lengths), 3, NUM_HEADS, head_dim).to(device, dtype).unbind(1)


def make_backend(platform_name: str, dtype: torch.dtype) -> tuple[AttentionBackend, torch.device]:
    platform: Any = pick_platform(platform_name)
    device = platform.devices.set_device(0)
    return platform.make_attention("auto", num_heads=4, num_kv_heads=2, head_dim=128, block_size=64,
                                   dtype=dtype), device


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("head_dim", [16, 20, 64, 72])
def test_images_see_themselves_and_nobody_else(head_dim: int, dtype: torch.dtype, platform_name: str) -> None:
    backend, device = make_backend(platform_name, dtype)
    q_TNH, k_TNH, v_TNH = qkv(head_dim, dtype, LENGTHS, device)
    out_TNH = backend.vision(q_TNH, k_TNH, v_TNH, backend.plan_vision(LENGTHS, device), head_dim**-0.5)
    expected_TNH = within_each(q_TNH, k_TNH, v_TNH, LENGTHS)
    assert (out_TNH.double().cpu() - expected_TNH).abs().max() < TOLERANCE[dtype]


# cuDNN's attention, which this is about, takes no float32.
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_nothing_is_built_for_a_size_that_is_new(dtype: torch.dtype, platform_name: str) -> None:
    if platform_name != "cuda":
        pytest.skip("only cuda has kernels that are built when a size first comes")
    backend, device = make_backend(platform_name, dtype)
    with device_profile("cuda") as profile:
        for lengths in ([96, 96], [100, 96], [1024]):
            backend.vision(*qkv(64, dtype, lengths, device), backend.plan_vision(lengths, device), 64**-0.5)
    assert profile.calls, "the profiler sees kernels"
    # cuDNN builds its attention for each shape; torch's own kernels and triton's have none.
    assert not [name for name in profile.calls if "cudnn" in name]
