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
    from npu_runner.platforms.cuda.attention.backend import TritonAttention
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


def make_shared_prefill(device: torch.device) -> Callable[[Tensor], Tensor]:
    """A prefill of four rows, of which the last three read blocks that the first one writes in the same layer."""
    from npu_runner.platforms.cuda.attention.backend import TritonAttention
    from npu_runner.platforms.cuda.ops import TritonOps

    ops: Any = TritonOps()
    backend: Any = TritonAttention(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, block_size=64,
                                   dtype=torch.bfloat16)
    query_lens, context_lens = [512, 64, 64, 10], [512, 512, 512, 458]
    tables_BW = torch.tensor([[*range(1, 8), last] for last in (8, 9, 10, 11)], dtype=torch.int32)
    slots_T = torch.tensor([int(table[place // 64]) * 64 + place % 64 for table, num, end
                            in zip(tables_BW, query_lens, context_lens, strict=True)
                            for place in range(end - num, end)], dtype=torch.int32, device=device)
    plan = backend.plan_prefill(query_lens, context_lens, tables_BW.numpy(), device)
    lens_B = torch.tensor(context_lens, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(True, slots_T, lens_B, tables_BW.to(device), plan)
    gain_H = torch.ones(HEAD_DIM, device=device, dtype=torch.bfloat16)
    turns_TR = torch.ones(sum(query_lens), HEAD_DIM, device=device, dtype=torch.bfloat16)
    caches = [torch.zeros(12, 64, NUM_KV_HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(8)]
    sizes = [NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM]

    def step(x_1D: Tensor) -> Tensor:
        x_TD = x_1D.expand(sum(query_lens), -1).cumsum(0, dtype=torch.float32).sin().bfloat16()
        for k_cache, v_cache in zip(caches[::2], caches[1::2], strict=True):
            wide_TD = torch.cat([x_TD, x_TD], dim=-1)
            q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in wide_TD.split(sizes, -1))
            q = backend.norm_rotary_store(ops, q, k, v, HeadNorms(gain_H, gain_H, 1e-6), turns_TR, turns_TR,
                                          k_cache=k_cache, v_cache=v_cache, slot_mapping_T=slots_T)
            x_TD = backend.prefill(q, k_cache, v_cache, metadata, HEAD_DIM**-0.5).flatten(1)
        return x_TD

    return step


def make_delta_step(device: torch.device) -> Callable[[Tensor], Tensor]:
    """A sequence's next ten tokens through layers of Gated DeltaNet; each token reads what the one before left."""
    from npu_runner.platforms.cuda.gated_delta.backend import TritonGatedDelta
    from npu_runner.platforms.cuda.ops import TritonOps
    from npu_runner.platforms.gated_delta import GatedDeltaShape, Ring

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=torch.float32).mul_(sizes[-1] ** -0.5).bfloat16()

    shape = GatedDeltaShape(num_k_heads=4, num_v_heads=8, head_k_dim=128, head_v_dim=128, conv_kernel_size=4)
    ops: Any = TritonOps()
    backend: Any = TritonGatedDelta(shape, torch.bfloat16)
    slots, length = 2, 8
    layers = [(random(WIDTH, 4), random(WIDTH, 8 * 128), torch.zeros(slots, 3, WIDTH, device=device).bfloat16(),
               torch.zeros(slots, 8, 128, 128, device=device),
               Ring(torch.zeros(slots, length, 8, 128, device=device),
                    torch.zeros(slots, length, 4, 128, device=device).bfloat16(),
                    torch.zeros(slots, 8, length, device=device), torch.zeros(slots, dtype=torch.int32, device=device),
                    length)) for _ in range(3)]
    gain_H, slot_B = torch.ones(128, device=device), torch.ones(1, dtype=torch.int32, device=device)
    lens = [torch.full((1,), position + 1, dtype=torch.int32, device=device) for position in range(10)]
    decays_V, biases_V = -torch.ones(8, device=device), torch.zeros(8, device=device)

    def step(x_TD: Tensor) -> Tensor:
        for _, _, conv_state, state, _ in layers:
            conv_state.zero_()
            state.zero_()
        for lens_B in lens:
            metadata = AttentionMetadata(False, slot_B, lens_B, slot_B[:, None], state_slots_B=slot_B)
            for taps, out, conv_state, state, ring in layers:
                gates_TV = x_TD[:, :8].contiguous()
                qkv_TC = backend.convolve(x_TD, taps, conv_state, metadata)
                x_TVD = backend.step_in_ring(qkv_TC, gates_TV, gates_TV, decays_V, biases_V, state, ring, metadata)
                x_TVD = ops.gated_rms_norm(x_TVD, x_TD[:, :1024].unflatten(1, (8, 128)), gain_H, 1e-6)
                x_TD = ops.linear(x_TVD.flatten(1), out, None)
        return x_TD

    return step


@pytest.mark.parametrize("make", [make_step, make_shared_prefill, make_delta_step])
def test_a_step_of_kernels_is_the_same(make: Callable[[torch.device], Callable[[Tensor], Tensor]],
                                       device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_runner.platforms.cuda import dependent_launch

    if device.type != "cuda" or torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of sm_90 or above")
    torch.manual_seed(0)
    step = make(device)
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
