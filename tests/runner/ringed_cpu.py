"""Gated DeltaNet with a ring on the CPU, row by row, by the definition of a Ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.cpu.ops import CpuGatedDelta
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.facts import StateFacts
from npu_runner.platforms.gated_delta import Ring, RingedGatedDelta, StateSave
from npu_runner.platforms.gated_delta_plan import PrefillPlan
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs
from tests.oracle.running import UncompiledGraphs

LENGTH = 4


@dataclass(frozen=True, kw_only=True)
class PrefillOfRows(PrefillPlan):
    query_lens: list[int]
    context_lens: list[int]
    saves: list[StateSave]


class RingedCpu(RingedGatedDelta, CpuGatedDelta):
    """A row after the other, by the definition of a Ring; a convolution's inputs by their positions."""

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], saves: Sequence[StateSave],
                     device: torch.device) -> PrefillOfRows:
        plan = super().plan_prefill(query_lens_B, context_lens_B, saves, device)
        return PrefillOfRows(convolution=plan.convolution, groups=plan.groups, query_lens=[*query_lens_B],
                             context_lens=[*context_lens_B], saves=[*saves])

    def plan_drafts_in_ring(self, inputs: StepInputs, ring: Ring) -> list[tuple[int, int, bool]]:
        """Tokens of each row, those in its ring, whether its state is written."""
        plan = []
        for run, slot, length in zip(*(x.tolist() for x in (inputs.runs, inputs.state_slots, inputs.context_lens)),
                                     strict=True):
            if run > 0:
                filled = (length - 1 - int(ring.starts[slot])) % ring.length
                plan.append((run, filled, filled + run > ring.length - 1))
                if plan[-1][2]:
                    ring.starts[slot] = length - 1
        return plan

    def convolve(self, x_TC: Tensor, weight_CW: Tensor, conv_state: Tensor, metadata: AttentionMetadata) -> Tensor:
        assert metadata.state_slots_B is not None
        width, columns = weight_CW.shape[1], conv_state.shape[1]
        slots, plan = metadata.state_slots_B.tolist(), metadata.state_plan
        lens, ends, saves = [1] * len(slots), metadata.context_lens_B.tolist(), []
        if isinstance(plan, PrefillOfRows):
            lens, ends, saves = plan.query_lens, plan.context_lens, plan.saves
        elif plan is not None:
            lens = [run for run, _, _ in plan]
            firsts = [sum(lens[:row]) for row in range(len(lens))]
            slots, ends = [slots[first] for first in firsts], [ends[first] + run - 1
                                                               for first, run in zip(firsts, lens, strict=True)]
        outs = []
        for row, x_LC in enumerate(x_TC.split(lens)):
            places = torch.arange(ends[row] - len(x_LC) - width + 1, ends[row]) % columns
            before = conv_state[slots[row], places[: width - 1]]
            inputs = torch.cat([before if ends[row] > len(x_LC) else torch.zeros_like(before), x_LC])
            outs.append(torch.nn.functional.silu((inputs.unfold(0, width, 1).float() * weight_CW.float()).sum(-1)))
            kept = [(slots[row], len(x_LC)), *((save.slot, save.offset) for save in saves if save.row == row)]
            for slot, end in kept if metadata.is_prefill else []:
                conv_state[slot, places[end : end + width - 1]] = inputs[end : end + width - 1]
            if not metadata.is_prefill:
                conv_state[slots[row], places[width - 1 :]] = x_LC
        return torch.cat(outs).to(x_TC.dtype)

    def step_in_ring(self, qkv_TC: Tensor, a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor,
                     state: Tensor, ring: Ring, metadata: AttentionMetadata) -> Tensor:
        assert metadata.state_slots_B is not None
        q, k, v = self._heads(qkv_TC)
        group = self.shape.num_v_heads // self.shape.num_k_heads
        g_TV = neg_exp_A_V * torch.nn.functional.softplus(a_TV.float() + dt_bias_V)
        out_TVD, first = torch.empty_like(v), 0
        slots, lens = metadata.state_slots_B.tolist(), metadata.context_lens_B.tolist()
        while first < len(slots):
            slot, position = slots[first], lens[first] - 1
            if metadata.state_plan is None:
                num, filled, is_written = 1, (position - int(ring.starts[slot])) % ring.length, False
            else:
                num, filled, is_written = metadata.state_plan[0]
                metadata.state_plan.append(metadata.state_plan.pop(0))  # each layer goes through all of it
            s = state[slot].clone()
            for place in (place % ring.num_places for place in range(position - filled, position)):
                s *= ring.log_decays[slot, :, place, None, None].exp()
                key = ring.keys[slot, place].repeat_interleave(group, dim=0)
                s += ring.updates[slot, place][:, :, None] * key[:, None, :]
            if is_written:
                state[slot] = s
            for row, place in ((first + index, (position + index) % ring.num_places) for index in range(num)):
                key, query = (x[row].repeat_interleave(group, dim=0) for x in (k, q))
                s *= g_TV[row, :, None, None].exp()
                update = (v[row] - torch.einsum("vdk,vk->vd", s, key)) * b_TV[row].sigmoid()[:, None]
                s += update[:, :, None] * key[:, None, :]
                out_TVD[row] = torch.einsum("vdk,vk->vd", s, query)
                ring.updates[slot, place], ring.keys[slot, place] = update, k[row]
                ring.log_decays[slot, :, place] = g_TV[row]
            if metadata.state_plan is None and filled == ring.length - 1:
                state[slot] = s
            first += num
        return out_TVD.to(qkv_TC.dtype)


def turn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = StateFacts(most_drafts=None, drafts_in_graphs=True, ring_length=LENGTH)
    monkeypatch.setattr(CpuPlatform, "state_facts", facts)
    monkeypatch.setattr(CpuPlatform, "make_gated_delta", lambda self, shape, dtype: RingedCpu(shape))
    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: UncompiledGraphs())
