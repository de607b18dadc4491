"""The step beside a ring against the definition in float64, over many steps, on a GPU or in triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.gated_delta import GatedDeltaShape, Ring
from npu_runner.platforms.step_inputs import AttentionMetadata
from tests.cuda.gated_delta_work import (
    DTYPES,
    LENGTH,
    NUM_SLOTS,
    PADDED,
    PROMPTS,
    SLOTS,
    SMALL,
    STATE_TOLERANCE,
    TOLERANCE,
    Step,
    assert_close,
    decays,
    delta_rule,
    draw_inputs,
    gates,
    make_backend,
    make_ring,
)


def metadata(context_lens: list[int], slots: list[int], device: torch.device) -> AttentionMetadata:
    empty, lens_B, slots_B = (torch.tensor(numbers, dtype=torch.int32, device=device)
                              for numbers in ([], context_lens, slots))
    return AttentionMetadata(False, empty, lens_B, empty, state_slots_B=slots_B)


def check_steps(device: torch.device, shape: GatedDeltaShape, dtype: torch.dtype, *, num_steps: int = 18,
                kind: str = "usual", length: int = LENGTH) -> None:
    backend = make_backend(shape, dtype)
    pool = torch.randn(NUM_SLOTS, 2, *shape.state_shape)  # of two layers, a layer's states not together
    pool[4] = torch.nan  # nobody's
    state, expected_states = pool.to(device)[:, 1], pool[:, 1].double()
    ring = Ring(*(tensor.to(device) for tensor in make_ring(shape, dtype, length)[:4]), length)
    gate_tensors = decays(shape, kind)
    for step in range(1, num_steps + 1):
        qkv_TC, a_TV, b_TV = draw_inputs(shape, len(SLOTS), dtype, seed=step)
        if kind == "abrupt" and step % 5 == 0:
            a_TV += 30
        contexts = [prompt + step for prompt in PROMPTS]
        contexts[PADDED] = 1
        expected, expected_states = delta_rule(
            qkv_TC, *gates(a_TV, b_TV, *gate_tensors), expected_states,
            Step(lengths=[1] * len(SLOTS), contexts=[9] * len(SLOTS), slots=SLOTS), shape)
        wide = torch.cat([qkv_TC, qkv_TC[:, :32]], dim=1).to(device)[:, :qkv_TC.shape[1]]
        before = state.clone()
        out_TVD = backend.step_in_ring(wide, *(x.to(device) for x in (a_TV, b_TV, *gate_tensors)), state, ring,
                                       metadata(contexts, SLOTS, device))
        assert out_TVD.dtype == dtype
        assert_close(out_TVD[:PADDED], expected[:PADDED], TOLERANCE[dtype])
        is_written = step % length == 0
        for slot in SLOTS[:PADDED]:
            if is_written:
                assert_close(state[slot], expected_states[slot], STATE_TOLERANCE[dtype])
            else:
                assert torch.equal(state[slot], before[slot]), "a state is written when its ring is full, not before"
    others = sorted(set(range(NUM_SLOTS)) - set(SLOTS))
    assert_same(state[others].cpu(), pool[others, 1])
    for tensor in ring[:3]:
        assert bool(tensor[others].isnan().all()), "a ring of nobody's was written"


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_steps_of_rows_with_prompts_of_any_length(device: torch.device, dtype: torch.dtype) -> None:
    check_steps(device, SMALL, dtype)


@pytest.mark.parametrize("kind", ["near 0", "abrupt", "small step"])
def test_gates_near_zero_and_very_negative(device: torch.device, kind: str) -> None:
    check_steps(device, SMALL, torch.float32, kind=kind)


@pytest.mark.parametrize(("num_k_heads", "num_v_heads"), [(1, 1), (2, 6)])
@pytest.mark.parametrize(("head_k_dim", "head_v_dim"), [(128, 128), (64, 32), (24, 40)])
def test_shapes(device: torch.device, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int) -> None:
    shape = GatedDeltaShape(num_k_heads=num_k_heads, num_v_heads=num_v_heads, head_k_dim=head_k_dim,
                            head_v_dim=head_v_dim, conv_kernel_size=4)
    check_steps(device, shape, torch.bfloat16, num_steps=9)


@pytest.mark.parametrize("length", [1, 2, 10, 32])
def test_rings_of_other_lengths(device: torch.device, length: int) -> None:
    check_steps(device, SMALL, torch.bfloat16, length=length, num_steps=min(2 * length + 1, 34))


def test_lengths_that_no_prompt_led_to_write_nowhere_else(device: torch.device) -> None:
    """Made-up steps: any context length over any start, above it and below."""
    backend = make_backend(SMALL, torch.float32)
    state = torch.zeros(NUM_SLOTS, *SMALL.state_shape, device=device)
    ring = Ring(*(tensor.to(device) for tensor in make_ring(SMALL, torch.float32)[:4]), LENGTH)
    for tensor in ring[:3]:
        tensor[SLOTS] = 0
    before = [tensor.clone() for tensor in ring[:4]]
    for contexts in ([1, 1, 1, 1], [4096, 3, 77, 2]):
        qkv_TC, a_TV, b_TV = draw_inputs(SMALL, len(SLOTS), torch.float32)
        tensors = (x.to(device) for x in (qkv_TC, a_TV, b_TV, *decays(SMALL, "usual")))
        out_TVD = backend.step_in_ring(*tensors, state, ring, metadata(contexts, SLOTS, device))
        assert bool(out_TVD.isfinite().all())
    others = sorted(set(range(NUM_SLOTS)) - set(SLOTS))
    for tensor, old in zip(ring[:4], before, strict=True):
        assert_same(tensor[others], old[others])
