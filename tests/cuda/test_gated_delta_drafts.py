"""Decode steps with drafts through Gated DeltaNet's Triton kernels, against the definition in float64.

Run it on a GPU (--platform cuda) or in triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_runner.platforms.gated_delta import GatedDeltaBackend, GatedDeltaShape, StateSave
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.runner.step_arrays import runs_of_tokens
from tests.cuda.gated_delta_work import Step, convolve, delta_rule, draw_inputs, gates
from tests.cuda.test_gated_delta import (
    DTYPES,
    SMALL,
    STATE_TOLERANCE,
    TOLERANCE,
    assert_close,
    decays,
    make_backend,
)

# 3, 0, 2 and 7 drafts; each leaves its state in a spare slot.
LENGTHS, SLOTS = [4, 1, 3, 8], [3, 0, 7, 1]
SPARES = [23, 4, 9, 2, 5, 22, 6, 8, 10, 21, 12, 11]
STEP = Step(lengths=LENGTHS, contexts=[9] * 4, slots=SLOTS, saves=tuple(
    StateSave(row=row, offset=offset, slot=slot) for (row, offset), slot in zip(
        ((row, offset) for row, length in enumerate(LENGTHS) for offset in range(2, length + 1)), SPARES, strict=True)))
# Two padded rows behind them, which share a slot.
PADDING_SLOT, NUM_SLOTS = 20, 24
SHAPES = {
    "small": SMALL,
    "odd": GatedDeltaShape(num_k_heads=1, num_v_heads=3, head_k_dim=24, head_v_dim=40, conv_kernel_size=3),
}


def metadata(backend: GatedDeltaBackend, device: torch.device) -> AttentionMetadata:
    slots = {(row, 1): slot for row, slot in enumerate(SLOTS)} | {
        (save.row, save.offset): save.slot for save in STEP.saves}
    slots_T = [slots[row, offset] for row, length in enumerate(LENGTHS) for offset in range(1, length + 1)]
    lengths = [*LENGTHS, 1, 1]
    runs_T = torch.from_numpy(runs_of_tokens(np.array(lengths))).to(device)
    assert runs_T.tolist()[:8] == [4, -1, -2, -3, 1, 3, -1, -2]
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    return AttentionMetadata(
        False, nothing, nothing, nothing, state_plan=backend.plan_drafts(lengths, runs_T),
        state_slots_B=torch.tensor([*slots_T, PADDING_SLOT, PADDING_SLOT], dtype=torch.int32, device=device))


def first_tokens(x_TX: Tensor) -> Tensor:
    return torch.cat([part[:1] for part in x_TX.split(LENGTHS)])


FIRST = dataclasses.replace(STEP, lengths=[1] * 4, saves=())


def assert_states(state: Tensor, before: Tensor, expected: Tensor, behind_first: Tensor, tolerance: float) -> None:
    """In a sequence's own slot the state behind its first token lies, and no other slot was touched."""
    expected = expected.clone()
    expected[SLOTS] = behind_first[SLOTS]
    compared = [slot for slot in range(NUM_SLOTS) if slot != PADDING_SLOT]
    assert_close(state[compared], expected[compared], tolerance)
    untouched = sorted(set(compared) - {*SLOTS, *SPARES})
    assert torch.equal(state[untouched].cpu(), before[untouched])


@pytest.mark.parametrize("kind", ["usual", "abrupt"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_delta_rule_leaves_a_state_behind_each_token(device: torch.device, shape: GatedDeltaShape,
                                                         dtype: torch.dtype, kind: str) -> None:
    num_tokens = sum(LENGTHS)
    inputs = draw_inputs(shape, num_tokens + 2, dtype)
    if kind == "abrupt":
        inputs[1][::7] += 30
    of_heads = decays(shape, kind)
    before = torch.randn(NUM_SLOTS, *shape.state_shape)
    state = before.to(device)
    qkv_TC, a_TV, b_TV = (x[:num_tokens] for x in inputs)
    expected, states = delta_rule(qkv_TC, *gates(a_TV, b_TV, *of_heads), before, STEP, shape)
    first_gates = gates(first_tokens(a_TV), first_tokens(b_TV), *of_heads)
    _, behind_first = delta_rule(first_tokens(qkv_TC), *first_gates, before, FIRST, shape)
    backend = make_backend(shape, dtype)
    out_TVD = backend.delta_rule(*(x.to(device) for x in (*inputs, *of_heads)), state, metadata(backend, device))
    assert_close(out_TVD[:num_tokens], expected, TOLERANCE[dtype])
    assert_states(state, before, states, behind_first, STATE_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_convolution_leaves_its_inputs_behind_each_token(device: torch.device, shape: GatedDeltaShape,
                                                             dtype: torch.dtype) -> None:
    num_tokens = sum(LENGTHS)
    x_TC = torch.randn(num_tokens + 2, shape.num_channels).to(dtype)
    weight_CW = torch.randn(shape.num_channels, shape.conv_kernel_size).to(dtype)
    before = torch.randn(NUM_SLOTS, *shape.conv_state_shape).to(dtype)
    conv_state = before.to(device)
    expected, states = convolve(x_TC[:num_tokens], weight_CW, before, STEP)
    _, behind_first = convolve(first_tokens(x_TC[:num_tokens]), weight_CW, before, FIRST)
    backend = make_backend(shape, dtype)
    out_TC = backend.convolve(x_TC.to(device), weight_CW.to(device), conv_state, metadata(backend, device))
    assert_close(out_TC[:num_tokens], expected, TOLERANCE[dtype])
    assert_states(conv_state, before, states, behind_first, 1e-7)
