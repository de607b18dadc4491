"""Operators of mixtures of experts against their definitions in float64, as a runner calls them.

T tokens, K experts a token, E experts, H hidden, I width.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from .emulation import close
from .fused_operators import TYPES, draw


def routed(num_tokens: int = 5, k: int = 3, num_experts: int = 8, seed: int = 0) -> Tensor:
    """(T, K) different experts for each token; the last expert has none."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(num_experts - 1, generator=generator)[:k] for _ in range(num_tokens)]
    return torch.stack(rows).int()


def sort_tokens(x: Tensor, experts: Tensor, num_experts: int, **changes: object) -> tuple[Tensor, Tensor, Tensor]:
    """npu_moe_init_routing_v2 as a runner calls it: rows by expert, their places, counts."""
    arguments: dict[str, object] = dict(
        active_num=experts.numel(), expert_num=num_experts, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts], quant_mode=-1, row_idx_type=0,
    )  # fmt: skip
    return torch_npu.npu_moe_init_routing_v2(x.npu(), experts.npu(), **(arguments | changes))[:3]


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
