"""Kernels that start before the one before has ended give what they give without that, eagerly and in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.ops import HeadNorms
from npu_runner.platforms.step_inputs import AttentionMetadata

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WIDTH, MLP_WIDTH, CONTEXT_LEN = 16, 8, 128, 2048, 6144, 700


def make_step(device: torch.device) -> Callable[[Tensor], Tensor]:
    """One token through layers whose sizes the kernels take; each layer reads what the one before has just written."""
    from npu_runner.platforms.cuda.attention import TritonAttention
    from npu_runner.platforms.cuda.ops import TritonOps

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=torch.float32).mul_(sizes[-1] ** -0.5).bfloat16()

    ops: Any = TritonOps()
    backend: Any = TritonAttention(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, block_size=64,
                                   dtype=torch.bfloat16)
    sizes = [NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM]
    layers = [(random(sum(sizes), WIDTH), random(WIDTH, sizes[0]), random(2 * MLP_WIDTH, WIDTH),
               random(WIDTH, MLP_WIDTH)) for _ in range(4)]
    gain_D, gain_H = (torch.ones(width, device=device, dtype=torch.bfloat16) for width in (WIDTH, HEAD_DIM))
    k_cache, v_cache = (random(12, 64, NUM_KV_HEADS, HEAD_DIM) for _ in "kv")
    lens_B = torch.tensor([CONTEXT_LEN], dtype=torch.int32, device=device)
    slots_B = lens_B + 63  # blocks from 1 on; the last token's slot
    metadata = AttentionMetadata(False, slots_B, lens_B, torch.arange(1, 13, dtype=torch.int32, device=device)[None])
    turns_TR = torch.ones(1, HEAD_DIM, device=device, dtype=torch.bfloat16)

    def step(x_TD: Tensor) -> Tensor:
        residual_TD = torch.zeros_like(x_TD)
        for qkv, o, gate_up, down in layers:
            x_TD, residual_TD = ops.add_rms_norm(x_TD, residual_TD, gain_D, 1e-6)
            q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in ops.linear(x_TD, qkv, None).split(sizes, -1))
            q = backend.norm_rotary_store(ops, q, k, v, HeadNorms(gain_H, gain_H, 1e-6), turns_TR, turns_TR,
                                          k_cache=k_cache, v_cache=v_cache, slot_mapping_T=slots_B)
            x_TD = ops.linear(backend.decode(q, k_cache, v_cache, metadata, HEAD_DIM**-0.5).flatten(1), o, None)
            x_TD, residual_TD = ops.add_rms_norm(x_TD, residual_TD, gain_D, 1e-6)
            x_TD = ops.linear(ops.silu_and_mul(ops.linear(x_TD, gate_up, None)), down, None)
        return x_TD

    return step


def test_a_step_of_kernels_is_the_same(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_runner.platforms.cuda import dependent_launch

    if device.type != "cuda" or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of sm_90 or above")
    torch.manual_seed(0)
    step = make_step(device)
    inputs = [torch.randn(1, WIDTH, device=device).bfloat16() for _ in range(50)]
    monkeypatch.setattr(dependent_launch, "IS_WANTED", False)
    expected = [step(x_TD).clone() for x_TD in inputs]
    monkeypatch.setattr(dependent_launch, "IS_WANTED", True)
    assert dependent_launch.launch_settings()["IS_DEPENDENT"]
    for x_TD, wanted_TD in zip(inputs, expected, strict=True):
        assert torch.equal(step(x_TD), wanted_TD)
    graph, place_TD = torch.cuda.CUDAGraph(), inputs[0].clone()
    with torch.cuda.graph(graph):
        found_TD = step(place_TD)
    for x_TD, wanted_TD in zip(inputs, expected, strict=True):
        place_TD.copy_(x_TD)
        graph.replay()
        assert torch.equal(found_TD, wanted_TD)


def test_it_is_off_where_no_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from npu_runner.platforms.cuda import dependent_launch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(dependent_launch, "IS_WANTED", True)
    dependent_launch._has_it.cache_clear()
    assert dependent_launch.launch_settings() == {"IS_DEPENDENT": False}
