"""Decode steps with drafts beside rings, over many steps, against the definition in float64 of what is kept.

Run it on a GPU (--platform cuda) or in triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_runner.platforms.gated_delta import GatedDeltaShape, Ring, RingedGatedDelta, ring_length
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs
from npu_runner.runner.step_arrays import runs_of_tokens
from tests.cuda.gated_delta_work import (
    DTYPES,
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
    make_ring,
    state_in_ring,
)

# Of four sequences; two padded rows behind them share a slot. PROMPTS: how long the sequences were at first.
SLOTS, PROMPTS, PADDING_SLOT, NUM_SLOTS = [3, 0, 12, 7], [9, 64, 130, 1], 5, 13


@dataclass
class Rows:
    """Sequences whose steps have up to `most_drafts` drafts, or none; what is refused leaves nothing that counts."""

    shape: GatedDeltaShape
    dtype: torch.dtype
    device: torch.device
    most_drafts: int
    kind: str = "usual"
    lens: list[int] = field(default_factory=lambda: [*PROMPTS])
    num_written: int = 0
    """Steps that have written a state."""

    def __post_init__(self) -> None:
        shape, backend = self.shape, make_backend(self.shape, self.dtype)
        assert isinstance(backend, RingedGatedDelta)
        self.backend = backend
        self.gates = decays(shape, self.kind)
        pool = torch.randn(NUM_SLOTS, 2, *shape.state_shape)
        self.state, self.expected = pool.to(self.device)[:, 1], pool[:, 1].double()
        length = ring_length(8, self.most_drafts)
        ring = make_ring(shape, self.dtype, length, self.most_drafts)
        self.ring = Ring(*(tensor.to(self.device) for tensor in ring[:4]), length)
        self.ring.starts[SLOTS] = torch.tensor(PROMPTS, dtype=torch.int32, device=self.device)
        columns = shape.conv_kernel_size + self.most_drafts
        tails = torch.randn(NUM_SLOTS, columns, shape.num_channels).to(self.dtype)
        self.tails, self.expected_tails = tails.to(self.device), tails.double()
        self.weight_CW = torch.randn(shape.num_channels, shape.conv_kernel_size).to(self.dtype)
        for tensor in (*self.ring[:3], self.state, self.tails):
            tensor[PADDING_SLOT] = 0

    def step(self, counts: list[int], kept: list[int], seed: int, *, is_plain: bool = False) -> None:
        """`counts` drafts of each row, of which `kept` stay."""
        query_lens = [1 + count for count in counts]
        num_tokens = sum(query_lens)
        inputs = draw_inputs(self.shape, num_tokens + 2, self.dtype, seed=seed)
        if self.kind == "abrupt":
            inputs[1][::7] += 30
        metadata = self._metadata(query_lens, is_plain)
        before = self.state.clone()
        qkv_TC, a_TV, b_TV = (x.to(self.device) for x in inputs)
        conv_TC = self.backend.convolve(qkv_TC, self.weight_CW.to(self.device), self.tails, metadata)
        out_TVD = self.backend.step_in_ring(qkv_TC, a_TV, b_TV, *(x.to(self.device) for x in self.gates), self.state,
                                            self.ring, metadata)
        self.num_written += not torch.equal(before[SLOTS], self.state[SLOTS])
        self._compare(inputs, query_lens, kept, out_TVD[:num_tokens], conv_TC[:num_tokens])
        self.lens = [length + 1 + num for length, num in zip(self.lens, kept, strict=True)]

    def _metadata(self, query_lens: list[int], is_plain: bool) -> AttentionMetadata:
        slots_T = [slot for slot, num in zip(SLOTS, query_lens, strict=True) for _ in range(num)]
        lens_T = [length + place for length, num in zip(self.lens, query_lens, strict=True)
                  for place in range(1, num + 1)]
        runs_T = runs_of_tokens(np.array([*query_lens, 1, 1]))
        slots, lens, runs = (torch.tensor(numbers, dtype=torch.int32, device=self.device) for numbers in (
            [*slots_T, PADDING_SLOT, PADDING_SLOT], [*lens_T, 1, 1], runs_T))
        # A later token's slot is read by nobody: a step has its hidden state there.
        slots = torch.where(runs > 0, slots, 10**6)
        nothing = torch.zeros(0, dtype=torch.int32, device=self.device)
        given: dict[str, Any] = dict.fromkeys(StepInputs._fields, nothing)
        given |= {"state_slots": slots, "context_lens": lens, "runs": runs}
        plan = None if is_plain else self.backend.plan_drafts_in_ring(StepInputs(**given), self.ring)
        return AttentionMetadata(False, nothing, lens, nothing, state_slots_B=slots, state_plan=plan)

    def _compare(self, inputs: tuple[Tensor, ...], query_lens: list[int], kept: list[int], out_TVD: Tensor,
                 conv_TC: Tensor) -> None:
        """Each row's outputs; on it goes from its last token that is kept."""
        qkv_TC, a_TV, b_TV = inputs
        first = 0
        for row, (slot, num, stays) in enumerate(zip(SLOTS, query_lens, kept, strict=True)):
            own = slice(first, first + num)
            beta_TV, g_TV = gates(a_TV[own], b_TV[own], *self.gates)
            whole = Step(lengths=[num], contexts=[self.lens[row]], slots=[slot])
            part = Step(lengths=[1 + stays], contexts=[self.lens[row]], slots=[slot])
            expected, _ = delta_rule(qkv_TC[own], beta_TV, g_TV, self.expected, whole, self.shape)
            assert_close(out_TVD[own], expected, TOLERANCE[self.dtype])
            x_TC = qkv_TC[own]
            expected, _ = convolve(x_TC, self.weight_CW, self.expected_tails, whole)
            assert_close(conv_TC[own], expected, 2 * TOLERANCE[self.dtype])
            _, self.expected = delta_rule(x_TC[: 1 + stays], beta_TV[: 1 + stays], g_TV[: 1 + stays], self.expected,
                                          part, self.shape)
            _, self.expected_tails = convolve(x_TC[: 1 + stays], self.weight_CW, self.expected_tails, part)
            first += num

    def assert_states(self) -> None:
        """State and ring make the state by definition; nothing was written where nobody is."""
        for slot, length in zip(SLOTS, self.lens, strict=True):
            made = state_in_ring(self.state[slot], self.ring, slot, length)
            assert_close(made, self.expected[slot], STATE_TOLERANCE[self.dtype])
        others = sorted(set(range(NUM_SLOTS)) - {*SLOTS, PADDING_SLOT})
        assert torch.equal(self.state[others].cpu().double(), self.expected[others])
        assert torch.equal(self.tails[others].cpu().double(), self.expected_tails[others])
        for tensor in self.ring[:3]:
            assert bool(tensor[others].isnan().all()), "a ring of nobody's was written"


def run(rows: Rows, num_steps: int, seed: int) -> None:
    rng = random.Random(seed)
    for step in range(num_steps):
        is_plain = rng.random() < 0.3
        counts = [0 if is_plain else rng.choice([0, rng.randint(0, rows.most_drafts), rows.most_drafts]) for _ in SLOTS]
        rows.step(counts, [rng.randint(0, count) for count in counts], seed=100 * seed + step, is_plain=is_plain)
    rows.assert_states()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("most_drafts", [1, 3, 7])
def test_drafts_that_are_kept_count_and_others_leave_nothing(device: torch.device, dtype: torch.dtype,
                                                             most_drafts: int) -> None:
    rows = Rows(SMALL, dtype, device, most_drafts)
    run(rows, 14, seed=most_drafts)
    assert rows.num_written > 1, "rings must fill up"


@pytest.mark.parametrize("kind", ["near 0", "abrupt", "small step"])
def test_gates_near_zero_and_very_negative(device: torch.device, kind: str) -> None:
    run(Rows(SMALL, torch.float32, device, 3, kind), 8, seed=2)


@pytest.mark.parametrize(("num_k_heads", "num_v_heads"), [(1, 1), (2, 6)])
@pytest.mark.parametrize(("head_k_dim", "head_v_dim"), [(128, 128), (64, 32), (24, 40)])
def test_shapes(device: torch.device, num_k_heads: int, num_v_heads: int, head_k_dim: int, head_v_dim: int) -> None:
    shape = GatedDeltaShape(num_k_heads=num_k_heads, num_v_heads=num_v_heads, head_k_dim=head_k_dim,
                            head_v_dim=head_v_dim, conv_kernel_size=3)
    run(Rows(shape, torch.bfloat16, device, 4), 6, seed=3)


def test_as_many_drafts_as_may_be(device: torch.device) -> None:
    run(Rows(SMALL, torch.float32, device, 32), 4, seed=4)
