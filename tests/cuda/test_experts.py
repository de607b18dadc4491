"""The experts' Triton kernels against the definition in float64, on a GPU or in triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

# T tokens, K experts a token, E experts, D hidden size, I width of an expert

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest value. In 16 bits gate, up, their product and each expert's output are rounded.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def random_work(num_tokens: int, top_k: int, num_experts: int, hidden_size: int, width: int,
                dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x_TD = torch.randn(num_tokens, hidden_size + 16)[:, :hidden_size]
    gate_up = torch.randn(num_experts, 2 * width, hidden_size) * hidden_size**-0.5
    down = torch.randn(num_experts, hidden_size, width) * width**-0.5
    weights_TK = torch.rand(num_tokens, top_k)
    order_TE = torch.rand(num_tokens, num_experts).argsort(dim=1)
    return {"x_TD": x_TD.to(dtype), "weights_TK": weights_TK.to(dtype), "experts_TK": order_TE[:, :top_k].int(),
            "gate_up_E2ID": gate_up.to(dtype), "down_EDI": down.to(dtype)}


def define(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_E2ID: Tensor, down_EDI: Tensor) -> Tensor:
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token in range(len(x_TD)):
        for weight, expert in zip(weights_TK[token].double(), experts_TK[token].tolist(), strict=True):
            gate, up = (gate_up_E2ID[expert].double() @ x_TD[token].double()).chunk(2)
            out_TD[token] += weight * (down_EDI[expert].double() @ (F.silu(gate) * up))
    return out_TD


def assert_experts(device: torch.device, work: dict[str, Tensor]) -> None:
    from npu_runner.platforms.cuda.ops import TritonOps

    x_TD = work["x_TD"]
    x_TD = torch.cat([x_TD, x_TD[:, :16]], dim=1).to(device)[:, :x_TD.shape[1]]  # rows of a wider matmul
    out_TD = TritonOps().experts(x_TD, *(work[name].to(device) for name in list(work)[1:]))
    assert out_TD.dtype == x_TD.dtype
    expected_TD = define(**work)
    error = (out_TD.double().cpu() - expected_TD).abs().max() / expected_TD.abs().max()
    assert error < TOLERANCE[x_TD.dtype]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_and_many_tokens(device: torch.device, dtype: torch.dtype, num_tokens: int) -> None:
    assert_experts(device, random_work(num_tokens, 2, 4, 64, 48, dtype))


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (5, 5), (64, 10), (256, 8)])
def test_counts_of_experts(device: torch.device, num_experts: int, top_k: int) -> None:
    assert_experts(device, random_work(7, top_k, num_experts, 32, 24, torch.float32))


@pytest.mark.parametrize("num_tokens", [3, 150])
def test_all_tokens_on_one_expert_and_the_others_empty(device: torch.device, num_tokens: int) -> None:
    work = random_work(num_tokens, 1, 6, 32, 24, torch.bfloat16)
    work["experts_TK"].fill_(4)
    assert_experts(device, work)


@pytest.mark.parametrize("num_tokens", [1, 3, 40, 700])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_what_ranges_of_experts_compute_adds_up(device: torch.device, dtype: torch.dtype, num_tokens: int) -> None:
    """Few tokens and many, ranges that nobody chose among them."""
    from npu_runner.platforms.cuda.ops import TritonOps
    from npu_runner.platforms.ops import HeldExperts

    work = random_work(num_tokens, 2, 7, 64, 48, dtype)
    expected_TD, ops = define(**work), TritonOps()
    x_TD, weights_TK, experts_TK, gate_up, down = (tensor.to(device) for tensor in work.values())
    out_TD = torch.zeros(expected_TD.shape, dtype=torch.float64)
    for first, last in ((0, 4), (4, 5), (5, 7)):
        part_TD = ops.experts(x_TD, weights_TK, experts_TK, gate_up[first:last], down[first:last],
                              HeldExperts(first, 7))
        is_chosen_T = ((experts_TK >= first) & (experts_TK < last)).any(1)
        assert (part_TD[~is_chosen_T] == 0).all(), "exactly nothing"
        out_TD += part_TD.double().cpu()
    assert (out_TD - expected_TD).abs().max() / expected_TD.abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [16, 32, 128])
def test_every_tile_size(device: torch.device, rows: int) -> None:
    from npu_runner.platforms.cuda.moe import experts

    work = random_work(90, 3, 5, 160, 80, torch.bfloat16)
    (tiling,) = [tiling for tiling in experts.tilings(torch.bfloat16) if tiling.rows == rows]
    on_device = {name: tensor.to(device) for name, tensor in work.items()}
    for few in (0, 10_000):
        pairs = experts.sort_pairs(on_device["experts_TK"], 5, rows, few)
        out_TD = experts.dense_gemms(on_device["x_TD"], on_device["weights_TK"], pairs, on_device["gate_up_E2ID"],
                                     on_device["down_EDI"], tiling)
        expected_TD = define(**work)
        assert (out_TD.double().cpu() - expected_TD).abs().max() / expected_TD.abs().max() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("few", [0, 10_000], ids=["many launches", "one launch"])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k", "rows"), [
    (1, 256, 8, 16), (64, 256, 8, 16), (700, 8, 3, 64), (1500, 512, 2, 64), (33, 1, 1, 16),
])
def test_every_pair_stands_once_in_a_block_of_its_expert(device: torch.device, num_tokens: int, num_experts: int,
                                                         top_k: int, rows: int, few: int) -> None:
    from npu_runner.platforms.cuda.moe import experts

    torch.manual_seed(1)
    experts_TK = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k].int().contiguous()
    pairs = experts.sort_pairs(experts_TK.to(device), num_experts, rows, few)
    order = pairs.order.view(pairs.num_blocks, rows).cpu()
    found = []
    for members, expert, num_rows in zip(order, pairs.block_experts.cpu(), pairs.block_rows.tolist(), strict=True):
        real = members[:num_rows].long()
        found += real.tolist()
        assert (experts_TK.flatten()[real] == expert).all()
    assert sorted(found) == list(range(num_tokens * top_k))
    assert sum(num_rows > 0 for num_rows in pairs.block_rows.tolist()) == sum(
        -(-count // rows) for count in torch.bincount(experts_TK.flatten()).tolist())


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (60, 4), (256, 8), (512, 10), (3, 3)])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_most_probable_experts_are_chosen(device: torch.device, dtype: torch.dtype, num_experts: int, top_k: int,
                                              renormalise: bool) -> None:
    from npu_runner.platforms.cuda.ops import TritonOps

    torch.manual_seed(0)
    logits_TE = torch.stack([torch.randperm(num_experts) for _ in range(9)]) / num_experts * 8 - 4
    logits_TE = logits_TE.to(dtype)
    expected_TE = logits_TE.double().softmax(-1)
    weights_TK, experts_TK = (x.cpu() for x in TritonOps().route(logits_TE.to(device), top_k, renormalise))
    assert (weights_TK.dtype, experts_TK.dtype) == (dtype, torch.int32)
    chosen_TK = expected_TE.gather(1, experts_TK.long())
    assert torch.equal(chosen_TK, expected_TE.topk(top_k).values), "the largest, largest first"
    assert all(len(set(row)) == top_k for row in experts_TK.tolist())
    if renormalise:
        chosen_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True)
    torch.testing.assert_close(weights_TK.double(), chosen_TK, rtol={torch.float32: 1e-5}.get(dtype, 5e-3), atol=0)


def test_logits_that_are_no_numbers_still_choose_experts_that_exist(device: torch.device) -> None:
    from npu_runner.platforms.cuda.ops import TritonOps

    logits_TE: Any = torch.full((3, 5), float("nan"))
    logits_TE[1] = float("-inf")
    logits_TE[2, :] = 1.0
    weights_TK, experts_TK = TritonOps().route(logits_TE.to(device), 3, renormalise=True)
    assert ((experts_TK >= 0) & (experts_TK < 5)).all()
    assert experts_TK[2].tolist() == [0, 1, 2]
    assert weights_TK[:2].isnan().all()
