"""The gated delta rule against its definition in float64. Runs as CANN 9.2.0, which takes float32 states."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor
from torch.nn.functional import normalize

from .emulation import close, refused
from .fused_operators import draw
from .refusals import KERNEL, PARAMETER

BF16 = torch.bfloat16
K_HEADS, V_HEADS, K_DIM, V_DIM, BLOCKS = 2, 4, 32, 16, 9
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}


def inputs(num_tokens: int) -> dict[str, Tensor]:
    """q, k, v, beta in bfloat16 and g in float32 of consecutive tokens, on the CPU."""
    return {
        "query": normalize(draw(num_tokens, K_HEADS, K_DIM), dim=-1).to(BF16),
        "key": normalize(draw(num_tokens, K_HEADS, K_DIM, seed=1), dim=-1).to(BF16),
        "value": draw(num_tokens, V_HEADS, V_DIM, seed=2).to(BF16),
        "beta": draw(num_tokens, V_HEADS, seed=3).sigmoid().to(BF16),
        "g": -draw(num_tokens, V_HEADS, seed=4).abs(),
    }


def defined(x: dict[str, Tensor], state: Tensor, scale: float) -> tuple[Tensor, list[Tensor]]:
    """What consecutive tokens of one sequence read, and the states (Nv, Dv, Dk) that they leave, in float64."""
    query, key = (x[name].double().repeat_interleave(V_HEADS // K_HEADS, 1) for name in ("query", "key"))
    current, outs, states = state.double(), [], []
    for t in range(query.shape[0]):
        current = current * x["g"][t].double().exp()[:, None, None]
        error = (x["value"][t].double() - torch.einsum("hvk,hk->hv", current, key[t])) * x["beta"][t].double()[:, None]
        current = current + torch.einsum("hv,hk->hvk", error, key[t])
        outs.append(torch.einsum("hvk,hk->hv", current, query[t]) * scale)
        states.append(current)
    return torch.stack(outs), states


def step(x: dict[str, Tensor], state: Tensor, lengths: list[int], slots: list[int], **changes: object) -> Tensor:
    arguments: dict[str, object] = dict(
        beta=x["beta"].npu(), scale=0.25, actual_seq_lengths=torch.tensor(lengths, dtype=torch.int32).npu(),
        ssm_state_indices=torch.tensor(slots, dtype=torch.int32).npu(), g=x["g"].npu(),
    )  # fmt: skip
    return torch_npu.npu_recurrent_gated_delta_rule(
        x["query"].npu(), x["key"].npu(), x["value"].npu(), state, **(arguments | changes)
    )


def check_a_decode_step_updates_each_slot() -> None:
    for dtype in (torch.float32, BF16):
        x, before = inputs(3), draw(BLOCKS, V_HEADS, V_DIM, K_DIM, seed=5).to(dtype)
        state = before.npu()
        out = step(x, state, [1, 1, 1], [7, 0, 4])
        expected = before.clone()
        for row, slot in enumerate((7, 0, 4)):
            outs, states = defined({name: value[row : row + 1] for name, value in x.items()}, before[slot], 0.25)
            close(out[row : row + 1], outs.to(BF16), **TOLERANCE)
            expected[slot] = states[0].to(dtype)
        close(state, expected, **({} if dtype == BF16 else {"rtol": 1e-5, "atol": 1e-5}))


def check_several_tokens_leave_a_state_each() -> None:
    """As speculation needs it: a sequence starts from the state of the last token that was accepted."""
    x, before = inputs(5), draw(BLOCKS, V_HEADS, V_DIM, K_DIM, seed=5)
    state = before.npu()
    accepted = torch.tensor([2, 1], dtype=torch.int32).npu()
    out = step(x, state, [3, 2], [1, 2, 3, 5, 6], num_accepted_tokens=accepted)
    for first, last, slots, start in ((0, 3, (1, 2, 3), 2), (3, 5, (5, 6), 5)):
        outs, states = defined({name: value[first:last] for name, value in x.items()}, before[start], 0.25)
        close(out[first:last], outs.to(BF16), **TOLERANCE)
        close(state[list(slots)], torch.stack(states).float(), rtol=1e-4, atol=1e-4)


def check_strided_queries_and_strides_between_blocks() -> None:
    x, wide = inputs(2), draw(BLOCKS, 2, V_HEADS, V_DIM, K_DIM, seed=5).npu()
    before = wide[:, 1].cpu()
    rows = torch.cat((x["query"], x["key"]), 1).npu()
    arguments = {"beta": x["beta"].npu(), "scale": 0.25, "g": x["g"].npu()}
    out = torch_npu.npu_recurrent_gated_delta_rule(
        rows[:, :K_HEADS], rows[:, K_HEADS:], x["value"].npu(), wide[:, 1],
        actual_seq_lengths=torch.ones(2, dtype=torch.int32).npu(),
        ssm_state_indices=torch.tensor([3, 1], dtype=torch.int32).npu(), **arguments,
    )  # fmt: skip
    for row, slot in enumerate((3, 1)):
        outs, states = defined({name: value[row : row + 1] for name, value in x.items()}, before[slot], 0.25)
        close(out[row : row + 1], outs.to(BF16), **TOLERANCE)
        close(wide[slot, 1], states[0].float(), rtol=1e-5, atol=1e-5)


def chunk(x: dict[str, Tensor], state: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    return torch_npu.npu_chunk_gated_delta_rule(
        x["query"].npu(), x["key"].npu(), x["value"].npu(), beta=x["beta"].npu(), initial_state=state.npu(), scale=0.25,
        actual_seq_lengths=torch.tensor(lengths, dtype=torch.int32).npu(), g=x["g"].npu(),
    )  # fmt: skip


def check_the_chunked_operator_and_the_gates_that_it_cannot_take() -> None:
    x, state = inputs(9), draw(2, V_HEADS, V_DIM, K_DIM, seed=5).to(BF16)
    x["g"] = x["g"].clamp(min=-1)
    out, final = chunk(x, state, [6, 3])
    for row, (first, last) in enumerate(((0, 6), (6, 9))):
        outs, states = defined({name: value[first:last] for name, value in x.items()}, state[row], 0.25)
        close(out[first:last], outs.to(BF16), **TOLERANCE)
        close(final[row], states[-1].to(BF16), **TOLERANCE)
    x["g"][2, 1] = -1.5
    with refused(KERNEL, "outside [-1, 0]"):
        chunk(x, state, [6, 3])
    with refused(PARAMETER, "initialState"):
        chunk(inputs(9), state.float(), [6, 3])
