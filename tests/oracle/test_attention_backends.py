"""Every attention backend of the platform against the definition of attention, over a shuffled cache full of NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from npu_runner.errors import ConfigError
from npu_runner.platforms import find_platform, pick_platform
from npu_runner.platforms.graphs import GraphSettings
from npu_runner.platforms.platform import Platform
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs
from tests.oracle.attention_cache import (
    BLOCK_SIZE,
    CONTEXT_LENS,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    Cache,
    assert_steps_equal_definition,
)


class OneLayer(nn.Module):
    """A decode forward that is attention alone, over queries that stay where they are."""

    def __init__(self, cache: Cache, q_BNH: Tensor):
        super().__init__()
        self.cache = cache
        self.q_BNH = q_BNH

    def forward(self, inputs: StepInputs, plan: object = None) -> Tensor:
        metadata = AttentionMetadata.from_inputs(inputs, plan, is_prefill=False)
        cache = self.cache
        return cache.backend.decode(self.q_BNH, cache.k_cache, cache.v_cache, metadata, HEAD_DIM**-0.5,
                                    window=cache.window)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.config.getoption("--platform")
    metafunc.parametrize("backend_name", find_platform(name).attention_backends)


def make_cache(platform: Platform, name: str, dtype: torch.dtype, window: int | None = None) -> Cache:
    torch.manual_seed(0)
    device = platform.devices.set_device(0)
    try:
        backend = platform.make_attention(name, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM,
                                          block_size=BLOCK_SIZE, dtype=dtype)
    except ConfigError as reason:
        pytest.skip(str(reason))
    assert "FlashInfer" in type(backend).__name__ or name != "flashinfer"
    return Cache(backend, device, dtype, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_prefill_and_eager_decode(dtype: torch.dtype, backend_name: str, platform_name: str) -> None:
    cache = make_cache(pick_platform(platform_name), backend_name, dtype)
    assert_steps_equal_definition(cache)


@pytest.mark.parametrize("window", [1, 2, 50, 64, 128, 150, 299, 300, 1000])
def test_windows_of_every_length(window: int, backend_name: str, platform_name: str) -> None:
    """Shorter than a block, whole blocks, between two, and longer than all contexts."""
    dtype = torch.bfloat16 if backend_name == "flashinfer" else torch.float32
    cache = make_cache(pick_platform(platform_name), backend_name, dtype, window)
    assert_steps_equal_definition(cache)


@pytest.mark.parametrize(("graph_mode", "window"), [("reduce-overhead", None), ("max-autotune", None),
                                                    ("reduce-overhead", 66)])
def test_one_decode_graph_serves_contexts_that_grow(graph_mode: str, window: int | None, backend_name: str,
                                                    platform_name: str) -> None:
    """Over a block's border, too; only a graph of its own is given the pages of each step."""
    if platform_name == "npu":
        pytest.skip("graphs on npu take their lengths from the runner's own step (tests/npu)")
    platform = pick_platform(platform_name)
    cache = make_cache(platform, backend_name, torch.float32 if platform_name == "cpu" else torch.bfloat16, window)
    ones = [1] * len(CONTEXT_LENS)
    q_BNH = cache.queries(ones)
    layer = OneLayer(cache, q_BNH.to(cache.device))
    compiler = platform.make_graph_compiler(GraphSettings(mode=graph_mode))
    forward = compiler.compile(layer.forward, len(ones))
    numbers = {name: torch.zeros(len(ones), dtype=torch.int32, device=cache.device)
               for name in StepInputs._fields if name != "block_tables"}
    tables_BW = torch.from_numpy(cache.block_tables_BW).to(cache.device)
    with torch.inference_mode():
        for _ in range(3):
            cache.forget_behind_window(ones)
            tables_BW.copy_(torch.from_numpy(cache.block_tables_BW))
            lens_B = np.array(cache.context_lens, dtype=np.int32)
            numbers["context_lens"].copy_(torch.from_numpy(lens_B))
            compiler.before_replay(len(ones), lens_B.tolist())
            out_BNH = forward(StepInputs(**numbers, block_tables=tables_BW))
            cache.assert_close(out_BNH, q_BNH, ones)
            cache.grow()
