"""What a model, a sampler and an engine call in plain torch: the same expression on the device and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .emulation import close
from .fused_operators import draw

Case = tuple[str, Callable[..., Any], list[Tensor]]
x, y = draw(4, 6), draw(4, 6, seed=1)
positive = x.abs() + 0.1
whole, other_whole = torch.arange(24).view(4, 6) - 7, (torch.arange(24) % 5 + 1).view(4, 6)
flags = x > 0
index = torch.tensor([2, 0, 3])


def same(cases: list[Case]) -> None:
    failures = []
    for name, function, inputs in cases:
        expected = function(*[tensor.clone() for tensor in inputs])
        try:
            actual = function(*[tensor.npu() for tensor in inputs])
            for got, wanted in zip(*((r if isinstance(r, tuple) else (r,)) for r in (actual, expected)), strict=True):
                if isinstance(wanted, Tensor):
                    close(got, wanted)
                else:
                    assert got == wanted, f"{got} is not {wanted}"
        except (RuntimeError, AssertionError, TypeError) as error:
            failures.append(f"{name}: {error}")
    assert not failures, "\n".join(failures)


def in_place(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """The first argument after the call."""

    def run(first: Tensor, *rest: Tensor) -> Tensor:
        function(first, *rest)
        return first

    return run


def check_unary() -> None:
    names = [
        "neg",
        "exp",
        "sigmoid",
        "tanh",
        "sin",
        "cos",
        "abs",
        "floor",
        "ceil",
        "round",
        "sign",
        "relu",
        "erf",
        "expm1",
        "trunc",
        "square",
    ]
    same([(name, getattr(torch, name), [x]) for name in names])
    same(
        [
            (name, getattr(torch, name), [positive])
            for name in ["log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal"]
        ]
    )
    odd = torch.tensor([0.0, float("nan"), float("inf"), -float("inf")])
    same([(name, getattr(torch, name), [odd]) for name in ["isnan", "isinf", "isfinite"]])
    same(
        [
            ("logical_not", torch.logical_not, [flags]),
            ("bitwise_not", torch.bitwise_not, [whole]),
            ("invert", lambda a: ~a, [flags]),
        ]
    )


def check_unary_in_half_types() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        same(
            [
                (f"{name} {dtype}", getattr(torch, name), [x.to(dtype)])
                for name in ["neg", "exp", "sigmoid", "tanh", "sin", "cos", "abs"]
            ]
        )


def check_activations() -> None:
    same(
        [
            ("silu", F.silu, [x]),
            # torch_npu drops the approximation: the device computes the one with tanh for both.
            ("gelu", lambda a: F.gelu(a, approximate="none" if a.is_npu else "tanh"), [x]),
            ("gelu tanh", lambda a: F.gelu(a, approximate="tanh"), [x]),
            ("softmax", lambda a: F.softmax(a, -1), [x]),
            ("softmax 0", lambda a: a.softmax(0), [x]),
            ("log_softmax", lambda a: F.log_softmax(a, -1), [x]),
            ("softmax bf16", lambda a: a.softmax(-1), [x.bfloat16()]),
            ("softmax to float32", lambda a: a.softmax(-1, dtype=torch.float32), [x.bfloat16()]),
            ("layer_norm", lambda a, w, b: F.layer_norm(a, (6,), w, b, 1e-6), [x, y[0], y[1]]),
            ("layer_norm bf16", lambda a: F.layer_norm(a, (6,)), [x.bfloat16()]),
        ]
    )


def check_binary() -> None:
    operators = {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "div": torch.div,
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "eq": torch.eq,
        "ne": torch.ne,
        "lt": torch.lt,
        "le": torch.le,
        "gt": torch.gt,
        "ge": torch.ge,
    }
    same([(name, function, [x, y]) for name, function in operators.items()])
    same([(f"{name} broadcast", function, [x, y[:1]]) for name, function in operators.items()])
    same([(f"{name} whole", function, [whole, other_whole]) for name, function in operators.items()])
    same(
        [
            (f"{name} scalar", lambda a, f=function: f(a, torch.tensor(2)), [whole])
            for name, function in operators.items()
            if name not in ("maximum", "minimum")
        ]
    )
    same(
        [
            ("pow", torch.pow, [positive, y]),
            ("pow scalar", lambda a: a**2, [x]),
            ("scalar pow", lambda a: 10000.0**a, [x]),
            ("floor_divide", lambda a, b: a // b, [whole, other_whole]),
            ("floor_divide scalar", lambda a: a // 4, [whole]),
            ("remainder", lambda a, b: a % b, [whole, other_whole]),
            ("remainder scalar", lambda a: a % 4, [whole]),
            ("div trunc", lambda a: torch.div(a, 4, rounding_mode="trunc"), [whole]),
            ("rsub", lambda a: 1 - a, [x]),
            ("scalar over", lambda a: 1.0 / a, [positive]),
            ("and", lambda a, b: a & b, [flags, y > 0]),
            ("or", lambda a, b: a | b, [flags, y > 0]),
            ("xor", lambda a, b: a ^ b, [flags, y > 0]),
            ("and numbers", lambda a: a & 3, [whole]),
            ("shift", lambda a: a << 2, [whole]),
            ("logical_and", torch.logical_and, [flags, y > 0]),
            ("logical_or", torch.logical_or, [flags, y > 0]),
            ("mixed", torch.add, [x, whole]),
            ("mixed half", torch.mul, [x.bfloat16(), y.bfloat16()]),
            ("alpha", lambda a, b: a.add(b, alpha=2), [x, y]),
            ("addcmul", lambda a, b: torch.addcmul(a, a, b, value=0.5), [x, y]),
            ("lerp", lambda a, b: torch.lerp(a, b, 0.3), [x, y]),
        ]
    )


def check_in_place() -> None:
    same(
        [
            ("add_", in_place(lambda a, b: a.add_(b)), [x, y]),
            ("add_ scalar", in_place(lambda a: a.add_(1)), [whole]),
            ("sub_", in_place(lambda a, b: a.sub_(b)), [x, y]),
            ("mul_", in_place(lambda a: a.mul_(0.5)), [x]),
            ("div_", in_place(lambda a: a.div_(3)), [x]),
            ("div_ tensor", in_place(lambda a, b: a.div_(b)), [x, positive]),
            ("fill_", in_place(lambda a: a.fill_(7)), [x]),
            ("zero_", in_place(lambda a: a.zero_()), [x]),
            ("neg_", in_place(lambda a: a.neg_()), [x]),
            ("exp_", in_place(lambda a: a.exp_()), [x]),
            ("clamp_", in_place(lambda a: a.clamp_(min=0.0)), [x]),
            ("copy_", in_place(lambda a, b: a.copy_(b)), [x, y]),
            ("copy_ into a view", in_place(lambda a, b: a[:, ::2].copy_(b[:, :3])), [x, y]),
            ("copy_ with cast", in_place(lambda a, b: a.copy_(b)), [x, whole]),
            ("masked_fill_", in_place(lambda a, m: a.masked_fill_(m, -1.0)), [x, flags]),
            ("setitem", in_place(lambda a: a.__setitem__((slice(None), 2), 0.0)), [x]),
            ("setitem by mask", in_place(lambda a, m: a.__setitem__(m, 0.0)), [x, flags]),
            ("remainder_", in_place(lambda a: a.remainder_(4)), [whole]),
            ("logical_or_", in_place(lambda a, b: a.logical_or_(b)), [flags, y > 0]),
        ]
    )


def check_reductions() -> None:
    same(
        [
            ("sum", torch.sum, [x]),
            ("sum dim", lambda a: a.sum(1, keepdim=True), [x]),
            ("sum whole", torch.sum, [whole]),
            ("sum flags", torch.sum, [flags]),
            ("mean", lambda a: a.mean(-1), [x]),
            ("mean all", torch.mean, [x]),
            ("max", torch.max, [x]),
            ("min", torch.min, [whole]),
            ("max dim", lambda a: tuple(a.max(1)), [x]),
            ("min dim", lambda a: tuple(a.min(0)), [x]),
            ("amax", lambda a: a.amax((0, 1)), [x]),
            ("amin", lambda a: a.amin(-1), [x]),
            ("argmax", lambda a: a.argmax(-1), [x]),
            ("argmax all", torch.argmax, [x]),
            ("argmin", lambda a: a.argmin(0), [x]),
            ("any", torch.any, [flags]),
            ("all", lambda a: a.all(-1), [flags]),
            ("any dim", lambda a: a.any(0), [flags]),
            ("cumsum", lambda a: a.cumsum(-1), [x]),
            ("cumsum whole", lambda a: a.cumsum(0), [whole.int()]),
            ("prod", lambda a: a.prod(), [x]),
            ("var", lambda a: a.var(-1), [x]),
            ("std", lambda a: a.std(-1), [x]),
            ("norm", lambda a: a.norm(), [x]),
            ("logsumexp", lambda a: a.logsumexp(-1), [x]),
            ("bincount", lambda a: torch.bincount(a, minlength=9), [index]),
            ("equal", torch.equal, [x, x.clone()]),
            ("allclose", torch.allclose, [x, x + 1]),
            ("item", lambda a: a.sum().item(), [whole]),
        ]
    )


def check_order() -> None:
    same(
        [
            ("sort", lambda a: tuple(a.sort(-1, descending=True)), [x]),
            ("argsort", lambda a: a.argsort(0), [x]),
            ("topk", lambda a: tuple(a.topk(3, -1)), [x]),
            ("stable sort", lambda a: tuple(torch.sort(a, stable=True)), [whole % 3]),
            ("nonzero", torch.nonzero, [flags]),
            ("masked_select", torch.masked_select, [x, flags]),
            (
                "searchsorted",
                lambda a: torch.searchsorted(a, torch.tensor([0.5, 2.5]).to(a.device)),
                [torch.tensor([0.0, 1.0, 2.0, 3.0])],
            ),
        ]
    )


def check_products() -> None:
    a, b, c = draw(5, 6), draw(6, 7, seed=1), draw(3, 5, 6, seed=2)
    same(
        [
            ("mm", torch.mm, [a, b]),
            ("matmul", torch.matmul, [c, b]),
            ("bmm", torch.bmm, [c, c.transpose(1, 2).contiguous()]),
            ("transposed", lambda m: m @ m.T, [a]),
            ("mv", lambda m: m @ m[0], [a]),
            ("linear", lambda m, w: F.linear(m, w), [c, draw(4, 6)]),
            ("linear bias", lambda m, w, v: F.linear(m, w, v), [a, draw(4, 6), draw(4)]),
            ("addmm", torch.addmm, [draw(5, 7), a, b]),
            ("baddbmm", torch.baddbmm, [draw(3, 5, 5), c, c.transpose(1, 2).contiguous()]),
            ("einsum", lambda m: torch.einsum("bij,kj->bik", m, m[0]), [c]),
            ("conv2d", lambda m, w: F.conv2d(m, w, stride=2), [draw(2, 3, 8, 8), draw(4, 3, 2, 2)]),
            ("conv3d", lambda m, w: F.conv3d(m, w), [draw(2, 3, 2, 4, 4), draw(4, 3, 2, 4, 4)]),
        ]
    )
    for dtype in (torch.float16, torch.bfloat16):
        same(
            [
                (f"mm {dtype}", torch.mm, [a.to(dtype), b.to(dtype)]),
                (f"linear {dtype}", F.linear, [c.to(dtype), draw(4, 6).to(dtype)]),
            ]
        )


def check_indexing() -> None:
    rows = draw(3, 6, seed=5)
    same(
        [
            ("embedding", lambda i, w: F.embedding(i, w), [index, x]),
            ("index_select", lambda a, i: a.index_select(0, i), [x, index]),
            ("index", lambda a, i: a[i], [x, index]),
            ("index pair", lambda a, i: a[i, i], [x, index]),
            ("index column", lambda a, i: a[:, i], [x, index]),
            ("gather", lambda a, i: a.gather(1, i), [x, other_whole]),
            ("take_along_dim", lambda a, i: torch.take_along_dim(a, i, 1), [x, other_whole]),
            ("index_copy_", in_place(lambda a, i, r: a.index_copy_(0, i, r)), [x, index, rows]),
            ("index_put_", in_place(lambda a, i, r: a.__setitem__(i, r)), [x, index, rows]),
            (
                "index_put_ add",
                in_place(lambda a, i, r: a.index_put_((i,), r, accumulate=True)),
                [x, torch.tensor([1, 1, 2]), rows],
            ),
            ("index_add_", in_place(lambda a, i, r: a.index_add_(0, i, r)), [x, torch.tensor([1, 1, 2]), rows]),
            ("index_fill_", in_place(lambda a, i: a.index_fill_(0, i, 3.0)), [x, index]),
            ("scatter_", in_place(lambda a, i: a.scatter_(1, i, -1.0)), [x, other_whole]),
            ("scatter", lambda a, i, r: a.scatter(0, i, r), [x, index.view(3, 1).expand(3, 6).contiguous(), rows]),
            ("scatter_add_", in_place(lambda a, i, r: a.scatter_add_(1, i, r)), [x, other_whole, y]),
            ("masked_fill", lambda a, m: a.masked_fill(m, float("-inf")), [x, flags]),
            ("where", torch.where, [flags, x, y]),
            ("where scalar", lambda m, a: torch.where(m, a, 0.0), [flags, x]),
            ("masked_scatter", lambda a, m, s: a.masked_scatter(m, s), [x, flags, y]),
        ]
    )


def check_shapes() -> None:
    same(
        [
            ("cat", lambda a, b: torch.cat((a, b), -1), [x, y]),
            ("stack", lambda a, b: torch.stack((a, b)), [x, y]),
            ("split", lambda a: a.split([2, 4], -1), [x]),
            ("chunk", lambda a: a.chunk(2, -1), [x]),
            ("transpose", lambda a: a.T.contiguous(), [x]),
            ("permute", lambda a: a.view(2, 2, 6).permute(2, 0, 1).contiguous(), [x]),
            ("reshape of a view", lambda a: a.T.reshape(3, 8), [x]),
            ("repeat", lambda a: a.repeat(2, 1), [x]),
            ("expand", lambda a: a[:1].expand(3, 6).contiguous(), [x]),
            ("repeat_interleave", lambda a: a.repeat_interleave(2, 0), [x]),
            (
                "repeat_interleave by counts",
                lambda a, n: torch.repeat_interleave(a, n, dim=0),
                [x, torch.tensor([1, 0, 2, 3])],
            ),
            ("flip", lambda a: a.flip(-1), [x]),
            ("roll", lambda a: a.roll(1, 0), [x]),
            ("pad", lambda a: F.pad(a, (0, 2)), [x]),
            ("triu", torch.triu, [x]),
            ("tril", lambda a: a.tril(1), [x]),
            ("slice", lambda a: a[1:3, ::2].contiguous(), [x]),
            ("unbind", lambda a: a.unbind(0), [x]),
            ("one_hot", lambda i: F.one_hot(i, 5), [index]),
            ("cast", lambda a: a.to(torch.bfloat16), [x]),
            ("cast to whole", lambda a: a.to(torch.int32), [x * 10]),
            ("cast flags", lambda m: m.float(), [flags]),
            ("clone", torch.clone, [x]),
            ("bool", lambda a: a.bool(), [whole]),
            ("meshgrid", lambda i: tuple(torch.meshgrid(i, i, indexing="ij")), [index]),
            ("zeros_like", torch.zeros_like, [x]),
            ("ones_like", torch.ones_like, [x]),
            ("full_like", lambda a: torch.full_like(a, 2.5), [x]),
            ("nan_to_num", lambda a: torch.nan_to_num(a), [torch.tensor([1.0, float("nan"), float("inf")])]),
            ("outer", lambda a: torch.outer(a[0], a[1]), [x]),
        ]
    )


def check_made_on_the_device() -> None:
    for name, make in {
        "zeros": lambda d: torch.zeros(2, 3, device=d),
        "ones": lambda d: torch.ones(2, dtype=torch.int64, device=d),
        "full": lambda d: torch.full((2,), 7, device=d),
        "arange": lambda d: torch.arange(5, device=d),
        "arange float": lambda d: torch.arange(0, 1, 0.25, device=d),
        "arange int32": lambda d: torch.arange(3, 9, 2, dtype=torch.int32, device=d),
        "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
        "eye": lambda d: torch.eye(3, device=d),
        "tensor": lambda d: torch.tensor([1.5, 2.5], device=d),
        "triu": lambda d: torch.ones(3, 3, dtype=torch.bool, device=d).triu(1),
        "scalar": lambda d: torch.scalar_tensor(3.0, device=d),
    }.items():
        close(make("npu"), make("cpu"), msg=name)


def check_random_numbers_repeat_and_have_the_right_moments() -> None:
    def drawn(make: Callable[[], Tensor]) -> Tensor:
        torch.npu.manual_seed(7)
        first = make().cpu()
        torch.npu.manual_seed(7)
        assert torch.equal(first, make().cpu())
        assert not torch.equal(first, make().cpu())
        return first.double()

    uniform = drawn(lambda: torch.rand(20000, device="npu"))
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01
    assert abs(uniform.var() - 1 / 12) < 0.005
    normal = drawn(lambda: torch.randn(20000, device="npu"))
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.03
    exponential = drawn(lambda: torch.empty(20000, device="npu").exponential_())
    assert exponential.min() >= 0
    assert abs(exponential.mean() - 1) < 0.05
    whole_numbers = drawn(lambda: torch.randint(3, 9, (5000,), device="npu"))
    assert set(whole_numbers.int().tolist()) == {3, 4, 5, 6, 7, 8}
    assert torch.rand(50000, device="npu", dtype=torch.bfloat16).max().item() < 1


def check_multinomial_follows_the_weights() -> None:
    weights = torch.tensor([[0.0, 1.0, 3.0], [2.0, 0.0, 0.0]]).npu()
    drawn = torch.multinomial(weights, 4000, replacement=True).cpu()
    share = drawn[0].bincount(minlength=3) / 4000
    assert share[0] == 0, share
    assert abs(share[1] - 0.25) < 0.03, share
    assert (drawn[1] == 0).all()
    assert sorted(torch.multinomial(torch.ones(6).npu(), 6).cpu().tolist()) == list(range(6))
