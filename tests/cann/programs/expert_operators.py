"""Operators of mixtures of experts against their definitions in float64, as a runner calls them.

T tokens, K experts a token, E experts, H hidden, I width.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from .emulation import close
from .fused_operators import TYPES, draw
from .quantised_operators import integers, rounded


def routed(num_tokens: int = 5, k: int = 3, num_experts: int = 8, seed: int = 0) -> Tensor:
    """(T, K) different experts for each token; the last expert has none."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(num_experts - 1, generator=generator)[:k] for _ in range(num_tokens)]
    return torch.stack(rows).int()


def sort_tokens(x: Tensor, experts: Tensor, num_experts: int, **changes: object) -> tuple[Tensor, Tensor, Tensor]:
    """npu_moe_init_routing_v2 as a runner calls it: rows by expert, their places, counts."""
    return routing(x, experts, num_experts, **changes)[:3]


def routing(x: Tensor, experts: Tensor, num_experts: int, **changes: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All that it gives: the scales of rounded rows, too."""
    arguments: dict[str, object] = dict(
        active_num=experts.numel(), expert_num=num_experts, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts], quant_mode=-1, row_idx_type=0,
    )  # fmt: skip
    return torch_npu.npu_moe_init_routing_v2(x.npu(), experts.npu(), **(arguments | changes))


def check_gating_chooses_the_largest() -> None:
    for dtype in TYPES:
        logits = draw(6, 16, dtype=dtype)
        for renorm in (0, 1):
            weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(logits.npu(), k=4, renorm=renorm)
            shares, chosen = logits.double().softmax(-1).topk(4)
            if renorm:
                shares = shares / shares.sum(-1, keepdim=True)
            assert experts.dtype == torch.int32
            assert torch.equal(experts.cpu().long(), chosen), dtype
            close(weights, shares.to(dtype))


def check_gating_gives_the_softmax_and_skips_finished_rows() -> None:
    logits, finished = draw(3, 5), torch.tensor([False, True, False])
    _, experts, softmax = torch_npu.npu_moe_gating_top_k_softmax_v2(
        logits.npu(), k=2, finished=finished.npu(), renorm=0, output_softmax=True
    )
    close(softmax, logits.softmax(-1))
    assert experts.cpu()[1].tolist() == [5, 5], "a finished row has the expert that does not exist"


def check_init_routing_sorts_rows_by_expert() -> None:
    x, experts = draw(5, 16, dtype=torch.bfloat16), routed()
    expanded, places, counts = (value.cpu() for value in sort_tokens(x, experts, 8))
    assert counts.dtype == torch.int64
    assert counts.tolist() == torch.bincount(experts.flatten(), minlength=8).tolist()
    close(expanded[places.long()], x.repeat_interleave(3, 0))
    by_place = torch.empty(15, dtype=torch.long)
    by_place[places.long()] = experts.flatten().long()
    assert torch.equal(by_place, by_place.sort().values), "not sorted by expert"
    order = sort_tokens(x, experts, 8, row_idx_type=1)[1].cpu().long()
    close(expanded, x[order // 3])


def check_init_routing_leaves_other_ranges_out() -> None:
    x, experts = draw(5, 16), routed()
    expanded, places, counts = (value.cpu() for value in sort_tokens(x, experts, 8, active_expert_range=[2, 5]))
    is_active = ((experts >= 2) & (experts < 5)).flatten()
    assert torch.equal(places >= 0, is_active)
    assert counts.tolist() == [int((experts == expert).sum()) for expert in (2, 3, 4)]
    close(expanded[places[is_active].long()], x.repeat_interleave(3, 0)[is_active])


def check_grouped_matmul_by_counts_and_by_totals() -> None:
    counts = torch.tensor([3, 0, 4, 1])
    for dtype in TYPES:
        x, weight = draw(8, 16, dtype=dtype), draw(4, 16, 24, dtype=dtype, seed=1)
        parts = x.double().split(counts.tolist())
        expected = torch.cat([part @ weight[group].double() for group, part in enumerate(parts)])
        for given, kind in ((counts, 1), (counts.cumsum(0), 0)):
            (out,) = torch_npu.npu_grouped_matmul(
                [x.npu()], [weight.npu()], split_item=2, group_type=0, group_list=given.npu(), group_list_type=kind
            )
            close(out, expected.to(dtype), rtol=2e-2, atol=2e-2)
    whole = out.cpu()
    few = torch.tensor([3, 0, 2, 1])  # rows that no group covers are not computed
    (out,) = torch_npu.npu_grouped_matmul(
        [x.npu()], [weight.npu()], split_item=2, group_type=0, group_list=few.npu(), group_list_type=1
    )
    parts = x[:6].double().split(few.tolist())
    expected = torch.cat([part @ weight[group].double() for group, part in enumerate(parts)])
    close(out[:6], expected.to(dtype), rtol=2e-2, atol=2e-2)
    assert out.cpu()[6:].isnan().all(), "undefined"
    turned = weight.transpose(1, 2).contiguous().npu().transpose(1, 2)
    (again,) = torch_npu.npu_grouped_matmul(
        [x.npu()], [turned], split_item=2, group_type=0, group_list=counts.npu(), group_list_type=1
    )
    close(again, whole)


def check_init_routing_rounds_rows() -> None:
    experts = routed()
    for dtype in TYPES:
        x = draw(5, 16, dtype=dtype)
        for bounds in ([0, 8], [2, 5]):
            arguments = {"active_expert_range": bounds, "quant_mode": 1}
            values, places, _ = (each.cpu() for each in sort_tokens(x, experts, 8, **arguments))
            scales = routing(x, experts, 8, **arguments)[3].cpu()
            is_here = places >= 0
            rows = x.repeat_interleave(3, 0)[is_here]
            expected = rounded(rows)
            assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
            assert torch.equal(values[places[is_here].long()], expected[0]), dtype
            close(scales[places[is_here].long()], expected[1])


def check_grouped_matmul_of_int8() -> None:
    counts = torch.tensor([3, 0, 4, 1])
    x, weight = integers(8, 32), integers(4, 32, 24, seed=1)
    rows, outputs = draw(8).abs() / 10, draw(4, 24, seed=2).abs() / 100
    groups = torch.arange(4).repeat_interleave(counts)
    sums = torch.einsum("mk,mkn->mn", x.double(), weight[groups].double())

    def product(counts: Tensor, **scales: object) -> Tensor:
        (out,) = torch_npu.npu_grouped_matmul([x.npu()], [weight.npu()], split_item=2, group_type=0,
                                              group_list=counts.npu(), group_list_type=1, **scales)
        return out

    assert torch.equal(product(counts, output_dtype=torch.int32).cpu(), sums.int())
    for dtype in (torch.bfloat16, torch.float16):
        scale = outputs.to(torch.bfloat16) if dtype == torch.bfloat16 else outputs
        out = product(counts, scale=[scale.npu()], per_token_scale=[rows.npu()], output_dtype=dtype)
        close(out, (sums * scale[groups].double() * rows.double()[:, None]).to(dtype), rtol=1e-2, atol=1e-2)
    few = torch.tensor([3, 0, 2, 1])
    assert torch.equal(product(few, output_dtype=torch.int32).cpu()[:5], sums.int()[:5])


def check_dequant_swiglu_quant() -> None:
    """Sums of integers, as the first product of an expert leaves them, and a group without rows."""
    counts, width = torch.tensor([3, 0, 4, 1]), 64
    sums = torch.randint(-90000, 90000, (9, 2 * width), generator=torch.Generator().manual_seed(0)).int()
    outputs, rows = draw(4, 2 * width, seed=1).abs() / 100, draw(9, seed=2).abs() / 100
    values, scales = torch_npu.npu_dequant_swiglu_quant(
        sums.npu(), weight_scale=outputs.npu(), activation_scale=rows.npu(), group_index=counts.npu(),
        activate_left=True, quant_mode=1)
    wide = sums[:8].double() * outputs[torch.arange(4).repeat_interleave(counts)].double() * rows[:8].double()[:, None]
    gate, up = wide.chunk(2, -1)
    expected = rounded((torch.nn.functional.silu(gate) * up).float())
    assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert int((values[:8].cpu().int() - expected[0].int()).abs().max()) <= 1, "ties of another order of operations"
    close(scales[:8], expected[1])
    assert scales.cpu()[8:].isnan().all(), "undefined"


def check_dequant_swiglu_quant_spoils_what_the_kernel_spoils() -> None:
    """Rows of no multiple of 64 outputs, and few short ones."""
    for rows, width, is_right in ((4, 64, True), (3, 64, False), (8, 32, False), (8, 96, False), (1, 256, True)):
        counts, sums = torch.tensor([rows]).npu(), torch.ones(rows, 2 * width, dtype=torch.int32).npu()
        _, scales = torch_npu.npu_dequant_swiglu_quant(
            sums, weight_scale=draw(1, 2 * width).npu(), activation_scale=draw(rows).npu(), group_index=counts,
            activate_left=True, quant_mode=1)
        assert bool(scales.cpu().isfinite().all()) == is_right, (rows, width)


def check_unpermute_weighs_and_adds() -> None:
    experts = routed()
    for dtype in TYPES:
        x, weights = draw(5, 16, dtype=dtype), draw(5, 3, dtype=dtype, seed=2)
        expanded, places, _ = sort_tokens(x, experts, 8)
        out = torch_npu.npu_moe_token_unpermute(expanded, places, probs=weights.npu())
        close(out, (x.double() * weights.double().sum(1, keepdim=True)).to(dtype), rtol=2e-2, atol=2e-2)
    close(torch_npu.npu_moe_token_unpermute(expanded, places), x.repeat_interleave(3, 0))


def check_finalize_routing_takes_both_orders() -> None:
    """drop_pad_mode 2 reads places by token, as npu_moe_init_routing_v2 gives them, 0 by choice."""
    expanded, weights, skip = draw(15, 16), draw(5, 3, seed=1), draw(5, 16, seed=2)
    places = torch.randperm(15, generator=torch.Generator().manual_seed(3)).int()
    expected = (expanded.double()[places.long()].view(5, 3, 16) * weights.double()[..., None]).sum(1).float()
    arguments = (None, None, None, weights.npu())
    out = torch_npu.npu_moe_finalize_routing(expanded.npu(), *arguments, places.npu(), None, drop_pad_mode=2)
    close(out, expected)
    by_choice = places.view(5, 3).t().reshape(-1).contiguous()
    out = torch_npu.npu_moe_finalize_routing(
        expanded.npu(), skip.npu(), skip.npu(), None, weights.npu(), by_choice.npu(), None
    )
    close(out, expected + 2 * skip)
    mixed = torch_npu.npu_moe_finalize_routing(
        expanded.bfloat16().npu(), *arguments, places.npu(), None, drop_pad_mode=2
    )
    close(mixed, expected.bfloat16(), rtol=2e-2, atol=2e-2)
