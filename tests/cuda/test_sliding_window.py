"""The Triton kernels of paged attention over sliding windows, on a GPU or in triton's interpreter.

On a GPU tests/oracle/test_attention_py tries the same with every backend, and in graphs.
"""

from __future__ import annotations

import pytest
import torch

from tests.oracle.attention_cache import (
    BLOCK_SIZE,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    Cache,
    assert_steps_equal_definition,
)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.float32, 1), (torch.float32, 20),
                                               (torch.float32, 64), (torch.float32, 150), (torch.bfloat16, 33),
                                               (torch.float32, 1000)])
def test_windows(dtype: torch.dtype, window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter than what one program reads at once, so that some of its rows see nothing of it; longer; and none."""
    from npu_runner.platforms.cuda.attention.backend import TritonAttention

    if device.type == "cpu":
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    torch.manual_seed(0)
    backend = TritonAttention(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE,
                              dtype=dtype)
    assert_steps_equal_definition(Cache(backend, device, dtype, window))
