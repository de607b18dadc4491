"""Gated DeltaNet's Triton kernels against the definition in float64, on a GPU or in triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npu_runner.platforms.gated_delta import GatedDeltaShape, StateSave
from npu_runner.platforms.step_inputs import AttentionMetadata
from tests.cuda.gated_delta_work import (
    DTYPES,
    NUM_SLOTS,
    SMALL,
    STATE_TOLERANCE,
    TOLERANCE,
    Step,
    assert_close,
    convolve,
    decays,
    delta_rule,
    draw_inputs,
    gates,
    make_backend,
)

# Prompts alone and in a row, one token long and longer than chunks, some continued in the midst of a chunk.
MIXED = Step(lengths=[130, 1, 5, 64, 1, 90], contexts=[0, 0, 64, 128, 77, 100], slots=[3, 0, 5, 1, 7, 2],
             saves=(StateSave(row=0, offset=64, slot=8), StateSave(row=0, offset=128, slot=9),
                    StateSave(row=3, offset=64, slot=10), StateSave(row=5, offset=28, slot=11)))


def check_delta_rule(device: torch.device, shape: GatedDeltaShape, dtype: torch.dtype, step: Step, *,
                     kind: str = "usual", is_prefill: bool = True, **options: Any) -> None:
    qkv_TC, a_TV, b_TV = draw_inputs(shape, sum(step.lengths), dtype, **options)
    if kind == "abrupt":
        a_TV[::7] += 30  # a gate of -1e4 in the midst of others near 0
    if kind == "small step":
        a_TV.zero_()
    neg_exp_A_V, dt_bias_V = decays(shape, kind)
    pool = torch.randn(NUM_SLOTS, 2, *shape.state_shape)  # of two layers, a layer's states not together
    state = pool.to(device)[:, 1]
    expected, expected_states = delta_rule(qkv_TC, *gates(a_TV, b_TV, neg_exp_A_V, dt_bias_V), pool[:, 1], step, shape)
    backend = make_backend(shape, dtype)
    metadata = step.metadata(backend, device, is_prefill=is_prefill)
    wide = torch.cat([qkv_TC, qkv_TC[:, :32]], dim=1).to(device)[:, :qkv_TC.shape[1]]
    out_TVD = backend.delta_rule(wide, *(x.to(device) for x in (a_TV, b_TV, neg_exp_A_V, dt_bias_V)), state, metadata)
    assert out_TVD.dtype == dtype
    assert_close(out_TVD, expected, TOLERANCE[dtype])
    assert_close(state, expected_states, STATE_TOLERANCE[dtype])
    untouched = sorted(set(range(NUM_SLOTS)) - {*step.slots} - {save.slot for save in step.saves})
    assert torch.equal(state[untouched].cpu(), pool[untouched, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_of_mixed_lengths_with_continued_states_and_saves(device: torch.device, dtype: torch.dtype) -> None:
    check_delta_rule(device, SMALL, dtype, MIXED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_token_a_row(device: torch.device, dtype: torch.dtype) -> None:
    step = Step(lengths=[1] * 5, contexts=[9] * 5, slots=[3, 0, 12, 1, 7])
    check_delta_rule(device, SMALL, dtype, step, is_prefill=False)


@pytest.mark.parametrize("kind", ["near 0", "abrupt", "small step"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_gates_near_zero_and_very_negative(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    check_delta_rule(device, SMALL, dtype, Step(lengths=[200], contexts=[64], slots=[1]), kind=kind)
    step = Step(lengths=[1] * 3, contexts=[9] * 3, slots=[3, 0, 12])
    check_delta_rule(device, SMALL, dtype, step, kind=kind, is_prefill=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_prompt_whose_keys_are_alike(device: torch.device, dtype: torch.dtype) -> None:
    shape = GatedDeltaShape(num_k_heads=1, num_v_heads=1, head_k_dim=64, head_v_dim=64, conv_kernel_size=4)
    step = Step(lengths=[1024], contexts=[0], slots=[1])
    check_delta_rule(device, shape, dtype, step, kind="near 0", correlation=0.8)


@pytest.mark.parametrize(("num_k_heads", "num_v_heads"), [(1, 1), (1, 2), (2, 6)])
@pytest.mark.parametrize(("head_k_dim", "head_v_dim"), [(128, 128), (64, 32), (24, 40)])
def test_shapes(device: torch.device, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int) -> None:
    shape = GatedDeltaShape(num_k_heads=num_k_heads, num_v_heads=num_v_heads, head_k_dim=head_k_dim,
                            head_v_dim=head_v_dim, conv_kernel_size=4)
    check_delta_rule(device, shape, torch.bfloat16, Step(lengths=[70, 3], contexts=[0, 64], slots=[1, 2]))
    check_delta_rule(device, shape, torch.bfloat16, Step(lengths=[1, 1], contexts=[5, 6], slots=[1, 2]),
                     is_prefill=False)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_prefill", [True, False], ids=["prompts", "one token a row"])
@pytest.mark.parametrize("num_more", [0, 5], ids=["", "room for drafts"])
def test_convolution(device: torch.device, dtype: torch.dtype, is_prefill: bool, width: int, num_more: int) -> None:
    shape = GatedDeltaShape(num_k_heads=1, num_v_heads=2, head_k_dim=40, head_v_dim=40, conv_kernel_size=width)
    step = MIXED if is_prefill else Step(lengths=[1] * 5, contexts=[9] * 5, slots=[3, 0, 12, 1, 7])
    x_TC, _, _ = draw_inputs(shape, sum(step.lengths), dtype)
    weight_CW = torch.randn(shape.num_channels, width).to(dtype)
    pool = torch.randn(NUM_SLOTS, 2, width - 1 + num_more, shape.num_channels).to(dtype)
    expected, expected_states = convolve(x_TC, weight_CW, pool[:, 1], step)
    backend = make_backend(shape, dtype)
    metadata: AttentionMetadata = step.metadata(backend, device, is_prefill=is_prefill)
    conv_state = pool.to(device)[:, 1]
    out_TC = backend.convolve(x_TC.to(device), weight_CW.to(device), conv_state, metadata)
    assert (out_TC.dtype, out_TC.is_contiguous()) == (dtype, True)
    assert_close(out_TC, expected, 2 * TOLERANCE[dtype])
    assert torch.equal(conv_state.double().cpu(), expected_states), "inputs are kept as they are"
