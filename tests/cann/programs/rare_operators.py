"""Siblings of the common operators, which torch_npu picks by argument: in place, by scalar, by tensor, in a graph."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional as F

from .fused_operators import draw
from .graphs import captured
from .plain_operators import Case, close, flags, in_place, index, other_whole, positive, same, whole, x, y

inside = x.clamp(-0.9, 0.9)
ODD = torch.tensor([0.0, -1.0, float("nan"), float("inf"), -float("inf")])


def by_name(name: str, *rest: object, inputs: list[Tensor]) -> Case:
    """A method, called in place when its name ends with an underscore."""
    if name.endswith("_"):
        return name, in_place(lambda a, *b: getattr(a, name)(*b, *rest)), inputs
    return name, lambda a, *b: getattr(a, name)(*b, *rest), inputs


def check_unary() -> None:
    same([by_name(name, inputs=[inside]) for name in ("acos", "asin", "atan", "cosh", "exp2", "frac", "sinh", "tan")])
    same([(name, getattr(torch, name), [ODD]) for name in ("isneginf", "isposinf", "signbit")])
    same([("hardswish", F.hardswish, [x]), ("mish", F.mish, [x])])


def check_unary_in_place() -> None:
    names = (
        "acos_ asin_ atan_ ceil_ cos_ cosh_ erf_ exp2_ expm1_ floor_ frac_ neg_ relu_ round_ sigmoid_ sin_ sinh_ "
        "tan_ tanh_ trunc_"
    )
    same([by_name(name, inputs=[inside]) for name in names.split()])
    names = "log_ log10_ log1p_ log2_ reciprocal_ rsqrt_ sqrt_"
    same([by_name(name, inputs=[positive]) for name in names.split()])
    same([by_name("logical_not_", inputs=[flags]), by_name("triu_", inputs=[x]), by_name("tril_", inputs=[x])])


def check_binary() -> None:
    same(
        [
            by_name("atan2", inputs=[x, y]),
            by_name("fmod", inputs=[whole, other_whole]),
            by_name("fmod", 4, inputs=[whole]),
            by_name("logical_xor", inputs=[flags, y > 0]),
            by_name("bitwise_or", 3, inputs=[whole]),
            by_name("bitwise_xor", 3, inputs=[whole]),
            by_name("bitwise_left_shift", inputs=[other_whole, other_whole]),
            by_name("bitwise_right_shift", inputs=[other_whole * 8, other_whole]),
            ("right shift", lambda a: a >> 1, [other_whole]),
            ("scalar remainder", lambda a: torch.remainder(7, a), [other_whole]),
            ("rsub tensor", lambda a, b: torch.rsub(a, b), [x, y]),
            ("div floor", lambda a, b: torch.div(a, b, rounding_mode="floor"), [whole, other_whole]),
            ("div trunc", lambda a, b: torch.div(a, b, rounding_mode="trunc"), [whole, other_whole]),
            ("div floor scalar", lambda a: torch.div(a, 4, rounding_mode="floor"), [whole]),
            ("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), [x, y, positive]),
            ("lerp tensor", lambda a, b, w: torch.lerp(a, b, w), [x, y, positive]),
            ("scalar plus tensor", lambda a: torch.add(torch.tensor(2.0), a), [x]),
        ]
    )


def check_binary_in_place() -> None:
    comparisons = [name for name in ("eq_", "ne_", "gt_", "ge_", "lt_", "le_")]
    same([by_name(name, inputs=[x, y]) for name in comparisons])
    same([by_name(name, 0.5, inputs=[x]) for name in comparisons])
    bits = ["bitwise_and_", "bitwise_or_", "bitwise_xor_"]
    same([by_name(name, inputs=[whole, other_whole]) for name in bits])
    same([by_name(name, 3, inputs=[whole]) for name in bits])
    divisions = ["remainder_", "fmod_", "floor_divide_"]
    same([by_name(name, inputs=[whole, other_whole]) for name in divisions])
    same([by_name(name, 4, inputs=[whole]) for name in divisions])
    same(
        [
            by_name("sub_", 2, inputs=[x]),
            by_name("mul_", inputs=[x, y]),
            by_name("pow_", 2, inputs=[x]),
            by_name("pow_", inputs=[positive, y]),
            by_name("logical_and_", inputs=[flags, y > 0]),
            ("div_ floor", in_place(lambda a, b: a.div_(b, rounding_mode="floor")), [whole, other_whole]),
            ("div_ scalar", in_place(lambda a: a.div_(4, rounding_mode="floor")), [whole]),
            by_name("fill_", inputs=[x, torch.tensor(3.0)]),
            by_name("masked_fill_", inputs=[x, flags, torch.tensor(-1.0)]),
            by_name("addmm_", inputs=[x @ x.T, x, y.T.contiguous()]),
        ]
    )


def check_clamps() -> None:
    low, high = x - 0.5, x + 0.1
    same(
        [
            ("clamp by tensors", torch.clamp, [y, low, high]),
            by_name("clamp_min", 0.1, inputs=[x]),
            by_name("clamp_max", 0.1, inputs=[x]),
            by_name("clamp_min", inputs=[y, low]),
            by_name("clamp_max", inputs=[y, high]),
            by_name("clamp_min_", 0.1, inputs=[x]),
            by_name("clamp_max_", 0.1, inputs=[x]),
            by_name("clamp_min_", inputs=[y, low]),
            by_name("clamp_max_", inputs=[y, high]),
        ]
    )


def check_reductions() -> None:
    same(
        [
            ("aminmax", lambda a: tuple(torch.aminmax(a, dim=1)), [x]),
            ("cumprod", lambda a: a.cumprod(-1), [x]),
            ("prod dim", lambda a: a.prod(1, keepdim=True), [x]),
            ("var_mean", lambda a: torch.var_mean(a, 1), [x]),
            ("norm dim", lambda a: torch.ops.aten.norm.ScalarOpt_dim(a, 2, [1], False), [x]),
            ("kthvalue", lambda a: tuple(a.kthvalue(2, -1)), [x]),
            ("argsort stable", lambda a: a.argsort(stable=True, dim=-1), [x]),
            ("argsort", lambda a: torch.argsort(a), [x]),
            ("dot", torch.dot, [x[0], y[0]]),
            ("mv", torch.mv, [x, y[0]]),
        ]
    )


def check_indices() -> None:
    same(
        [
            ("take", torch.take, [x, index]),
            ("index_copy", lambda a, i, r: a.index_copy(0, i, r), [x, index, y[:3]]),
            ("scatter value", lambda a, i: a.scatter(1, i, 2.0), [x, other_whole]),
            ("scatter_ source", in_place(lambda a, i, s: a.scatter_(1, i[:, :1], s)), [x, other_whole, y]),
            ("repeat_interleave flat", lambda a: torch.repeat_interleave(a, 2), [x]),
            ("repeat_interleave flat by counts", lambda a, n: torch.repeat_interleave(a, n), [x[0], other_whole[0]]),
            ("repeat_interleave counts", torch.repeat_interleave, [other_whole[0]]),
            ("split_with_sizes copy", lambda a: tuple(torch.split_with_sizes_copy(a, [2, 4], -1)), [x]),
            ("permute copy", lambda a: torch.permute_copy(a, (1, 0)), [x]),
            ("range", lambda a: torch.range(1, 3, 0.5, device=a.device), [x]),
        ]
    )
    rows, updates = torch.tensor([[2], [0]]), y[:2]
    actual = torch_npu.npu_scatter_nd_update(x.npu(), rows.npu(), updates.npu())
    close(actual, x.index_copy(0, rows.flatten(), updates))


def check_a_scatter_loses_no_row_of_operands_with_gaps() -> None:
    """vllm-ascend's own scatter did, without a word (#17647)."""
    places, wide = torch.tensor([[2, 7], [0, 7], [3, 7]]), draw(3, 12)
    dense = {"table": draw(4, 6), "indices": places[:, :1].contiguous(), "updates": wide[:, ::2].contiguous()}
    expected = dense["table"].index_copy(0, dense["indices"].flatten(), dense["updates"])
    gaps = {"table": torch.cat([dense["table"], wide[:1, :6].expand(4, 6)], dim=1).npu()[:, :6],
            "indices": places.npu()[:, :1], "updates": wide.npu()[:, ::2]}
    for name in dense:
        assert not gaps[name].is_contiguous()
        given = {key: value.npu() for key, value in dense.items()} | {name: gaps[name]}
        torch_npu.npu_scatter_nd_update_(*given.values())
        close(given["table"], expected)


def check_vendor_operators() -> None:
    close(torch_npu.fast_gelu(x.npu()), x * torch.sigmoid(1.702 * x))
    for approximation in ("none", "tanh"):
        close(torch_npu.npu_gelu(x.npu(), approximate=approximation), F.gelu(x, approximate=approximation))
    first, second, weight = x.npu(), y.npu(), y[0].npu()
    torch_npu.npu_add_rms_norm_v2(first, second, weight)  # the norm lands in the first, the sum in the second
    close(second, x + y)
    close(first, F.rms_norm(x + y, (6,), y[0], 1e-6))
    cache, rows = torch.zeros(2, 3, 8, 4), torch.ones(2, 3, 2, 4)
    starts = torch.tensor([1, 5])
    expected = cache.clone()
    for i, start in enumerate(starts.tolist()):
        expected[i, :, start : start + 2] = rows[i]
    close(torch_npu.scatter_update(cache.npu(), starts.npu(), rows.npu(), 2), expected)


def check_random_numbers() -> None:
    for name, make in {
        "bernoulli_": lambda: torch.empty(9000).npu().bernoulli_(0.25),
        "bernoulli_ tensor": lambda: torch.empty(9000).npu().bernoulli_(torch.full((9000,), 0.25).npu()),
    }.items():
        drawn = make().cpu()
        assert set(drawn.tolist()) == {0.0, 1.0}, name
        assert abs(drawn.mean() - 0.25) < 0.03, name
    assert sorted(torch.randperm(50, device="npu").cpu().tolist()) == list(range(50))
    whole_numbers = torch.empty(5000, dtype=torch.int8).npu().random_().cpu()
    assert 0 <= whole_numbers.min() < 10
    assert whole_numbers.max() > 117
    normal = torch.normal(2.0, 0.5, (20000,), device="npu").cpu()
    assert abs(normal.mean() - 2) < 0.02
    assert abs(normal.std() - 0.5) < 0.02


def check_random_numbers_of_a_graph() -> None:
    normal, integers, uniform = (torch.empty(9000).npu() for _ in range(3))
    picked = torch.empty(3000, dtype=torch.int64).npu()
    weights = torch.tensor([1.0, 3.0]).npu()

    def body() -> None:
        normal.normal_(1.0, 2.0)
        integers.random_(2, 5)
        uniform.uniform_(-1.0, 0.0)
        picked.copy_(torch.multinomial(weights, 3000, replacement=True))

    graph = captured(body)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(normal.cpu())
        assert abs(seen[-1].mean() - 1) < 0.1
        assert abs(seen[-1].std() - 2) < 0.1
        assert set(integers.cpu().tolist()) == {2.0, 3.0, 4.0}
        assert -1 <= uniform.min() <= uniform.max() < 0
        assert abs(uniform.mean() + 0.5) < 0.02
        assert abs(picked.cpu().double().mean() - 0.75) < 0.05
    assert not torch.equal(*seen)


def check_softplus_and_a_product_added_in_place() -> None:
    close(F.softplus(40 * x.npu()), F.softplus(40 * x))
    close(x.npu().addcmul_(y.npu(), y[0].npu(), value=0.5), x.clone().addcmul_(y, y[0], value=0.5))
