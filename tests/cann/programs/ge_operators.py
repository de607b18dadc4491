"""Plain torch in a graph of the graph engine (max-autotune) against the same expression on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_npu.dynamo.torchair  # makes the name torchair importable
import torchair
from torch import Tensor
from torch.nn import functional as F

from .emulation import close, counters, error_of
from .fractal_operators import in_nz, packed
from .fused_operators import draw
from .quantised_operators import integers

x, y = draw(4, 6), draw(4, 6, seed=1)
positive = x.abs() + 0.1
whole = torch.arange(24).view(4, 6) - 7
flags = x > 0
Results = tuple[Tensor, ...]


def compiled(function: Callable[..., Results]) -> Callable[..., Results]:
    torch._dynamo.reset()
    config = torchair.CompilerConfig()
    config.mode = "max-autotune"
    backend = torchair.get_npu_backend(compiler_config=config)
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)


def same(function: Callable[..., Results], *inputs: Tensor) -> None:
    with torch.inference_mode():
        expected = function(*(tensor.clone() for tensor in inputs))
        on_device = [tensor.npu() for tensor in inputs]
        actual = compiled(function)(*on_device)
    for position, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        close(got, wanted, msg=lambda text, at=position: f"result {at}: {text}")


def check_element_by_element() -> None:
    def unary(a: Tensor, p: Tensor, m: Tensor) -> Results:
        return (
            *(-a, a.exp(), a.sin(), a.cos(), a.tanh(), a.sigmoid(), a.abs(), a.square(), a.floor(), a.ceil(), a.relu()),
            *(p.log(), p.sqrt(), p.rsqrt(), p.reciprocal(), a.erf(), F.silu(a), F.gelu(a), ~m, torch.logical_not(m)),
        )

    same(unary, x, positive, flags)

    def binary(a: Tensor, b: Tensor, p: Tensor, i: Tensor) -> Results:
        return (
            *(a + b, a - b, a * b, a / p, a + 1, 2 - a, a * 0.5, a / 3, p**b, p**2, torch.maximum(a, b)),
            *(
                torch.minimum(a, b),
                i // 4,
                i % 4,
                i + i,
                torch.add(a, b, alpha=2),
                torch.addcmul(a, b, p),
                torch.addcmul(a, b[:1], p[:, :1], value=-0.5),
                i * 3,
                a == b,
                a != b,
                a < b,
                a <= b,
                a > 0,
                a >= b,
            ),
        )

    same(binary, x, y, positive, whole)

    def logic(a: Tensor, b: Tensor, m: Tensor, i: Tensor) -> Results:
        other = b > 0
        return (
            *(m & other, m | other, torch.logical_and(m, other), torch.logical_or(m, other), i & i + 1, i | i + 1, ~i),
            *(torch.where(m, a, b), a.masked_fill(m, -1.0), torch.clamp(a, -0.5, 0.5), torch.clamp_min(a, 0.1)),
        )

    same(logic, x, y, flags, whole)


def check_types_and_constants() -> None:
    def function(a: Tensor, i: Tensor, m: Tensor) -> Results:
        return (
            *(a.to(torch.float16), a.to(torch.bfloat16).float(), i.float(), m.to(torch.int64), a.to(torch.int32)),
            *(torch.zeros_like(a), torch.ones_like(a), torch.full_like(a, 2.5), a + torch.arange(6, device=a.device)),
            *(torch.zeros(2, 3, device=a.device) + a[0, 0], a.clone(), torch.full((2,), 7, device=a.device)),
            *(a.view(torch.int32), torch.arange(3, device=a.device) * 2),
        )

    same(function, x, whole, flags)


def check_shapes() -> None:
    def function(a: Tensor, b: Tensor) -> Results:
        first, second = a.split([2, 4], -1)
        left, right = b.chunk(2, -1)
        return (
            *(a.view(2, 12), a.reshape(-1), a.unsqueeze(1), a.unsqueeze(0).squeeze(0), a.t().contiguous()),
            *(a.view(2, 2, 6).permute(2, 0, 1).contiguous(), a[:1].expand(3, 6).contiguous(), a.repeat(2, 1)),
            *(torch.cat((a, b), -1), torch.stack((a, b)), first + 0, second + 0, left * right, a[1:3], a[:, ::2]),
            *(a[..., -1], a.flatten(), torch.cat((-a[..., 3:], a[..., :3]), -1), a.unflatten(-1, (2, 3)) + 0),
            *(part + 0 for part in a.unbind(0)),
        )

    same(function, x, y)


def check_indices() -> None:
    def function(a: Tensor, i: Tensor, j: Tensor) -> Results:
        return a[i], a.index_select(0, i), F.embedding(i, a), a.gather(1, j)

    same(function, x, torch.tensor([2, 0, 3]), whole % 6)


def check_reductions() -> None:
    def function(a: Tensor, i: Tensor, m: Tensor) -> Results:
        return (
            *(a.sum(), a.sum(1, keepdim=True), a.mean(-1), a.mean(), i.sum(0), m.any(), m.all()),
            *(
                a.argmax(-1),
                F.softmax(a, -1),
                F.softmax(a.half(), -1),
                *a.max(-1),
                a.max(),
                a.pow(2).mean(-1, keepdim=True),
            ),
        )

    same(function, x, whole, flags)


def check_products() -> None:
    a, b, c = draw(5, 6), draw(6, 7, seed=1), draw(3, 5, 6, seed=2)

    def function(a: Tensor, b: Tensor, c: Tensor, w: Tensor, v: Tensor) -> Results:
        return (
            a @ b,
            torch.bmm(c, c.transpose(1, 2)),
            F.linear(c, w),
            F.linear(a, w, v),
            torch.addmm(v, a, w.t()),
            c @ b,
        )

    same(function, a, b, c, draw(4, 6, seed=3), draw(4, seed=4))


def check_inputs_written_in_place() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> Results:
        c.copy_(b)
        a.copy_(b + a)
        return (a * 2, torch.ops.aten._to_copy.default(b))

    on_device, other = x.npu(), torch.zeros(4, 6).npu()
    with torch.inference_mode():
        result, copy = compiled(function)(on_device, y.npu(), other)
    close(on_device, x + y)
    close(other, y)
    close(result, (x + y) * 2)
    close(copy, y)


def check_a_wrong_index_is_refused() -> None:
    run = compiled(lambda a, i: (a.index_select(0, i),))
    with torch.inference_mode():
        message = error_of(lambda: run(x.npu(), torch.tensor([4]).npu()))
    assert "outside [0, 4)" in message, message


def check_an_unknown_operator_names_itself() -> None:
    run = compiled(lambda a: (torch.erfinv(a),))
    with torch.inference_mode():
        message = error_of(lambda: run(x.npu()))
    assert "not emulated: Erfinv" in message, message


def check_memory_nobody_has_written() -> None:
    with torch.inference_mode():
        (result,) = compiled(lambda a: (a.new_empty((2, 3), dtype=torch.float16),))(x.npu())
    assert (result.shape, result.dtype) == ((2, 3), torch.float16)


def check_fused_operators() -> None:
    w, heads, cos, sin = draw(6, seed=3), draw(2, 5, 3, 8), draw(1, 5, 1, 8, seed=1), draw(1, 5, 1, 8, seed=2)
    turn = torch.zeros(8, 8)
    turn[range(0, 8, 2), range(1, 8, 2)], turn[range(1, 8, 2), range(0, 8, 2)] = 1.0, -1.0

    def function(a: Tensor, b: Tensor, w: Tensor, q: Tensor, cos: Tensor, sin: Tensor, turn: Tensor) -> Results:
        normed, rstd = torch_npu.npu_rms_norm(a, w, 1e-5)
        normed_sum, _, total = torch_npu.npu_add_rms_norm(a, b, w, 1e-5)
        half, pairs = torch_npu.npu_rotary_mul(q, cos, sin), torch_npu.npu_rotary_mul(q, cos, sin, "interleave", turn)
        return normed, rstd, normed_sum, total, torch_npu.npu_swiglu(a), half, pairs

    inputs = [tensor.npu() for tensor in (x, y, w, heads, cos, sin, turn)]
    with torch.inference_mode():
        # Outside the graph these were compared with plain torch (fused_operators.py).
        for got, wanted in zip(compiled(function)(*inputs), function(*inputs), strict=True):
            close(got, wanted.cpu())


def check_experts_and_writes_by_index() -> None:
    experts = torch.tensor([[2, 0], [1, 3], [0, 1], [3, 2]], dtype=torch.int32)

    def function(a: Tensor, chosen: Tensor, weight: Tensor, shares: Tensor, pool: Tensor, slots: Tensor) -> Results:
        rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
            a, chosen, active_num=8, expert_num=4, expert_tokens_num_type=1, expert_tokens_num_flag=True,
            active_expert_range=[0, 4], quant_mode=-1, row_idx_type=0)
        (product,) = torch_npu.npu_grouped_matmul([rows], [weight], split_item=2, group_type=0, group_list=counts,
                                                  group_list_type=1)
        summed = torch_npu.npu_moe_finalize_routing(product, None, None, None, shares, places, None, drop_pad_mode=2)
        return rows, places, counts, product, summed, torch_npu.npu_scatter_nd_update(pool, slots, a)

    inputs = [tensor.npu() for tensor in (x, experts, draw(4, 6, 5), draw(4, 2), draw(9, 6), experts[:, :1] * 2)]
    with torch.inference_mode():
        # Outside the graph these were compared with their definitions (expert_operators.py).
        for got, wanted in zip(compiled(function)(*inputs), function(*inputs), strict=True):
            close(got, wanted.cpu())


def check_int8_products() -> None:
    weight = torch.randint(-127, 128, (5, 16), generator=torch.Generator().manual_seed(0), dtype=torch.int8)

    def function(a: Tensor, b: Tensor, g: Tensor, w: Tensor, s: Tensor, bias: Tensor) -> Results:
        values, rows = torch_npu.npu_dynamic_quant(a)
        normed, _, total, normed_rows, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
            a, b, g, epsilon=1e-5, output_mask=[True, False])
        products = (torch_npu.npu_quant_matmul(each, w.t(), s, pertoken_scale=by, bias=bias, output_dtype=a.dtype)
                    for each, by in ((values, rows), (normed, normed_rows)))
        of_one_scale = torch_npu.npu_quantize(a, g[:1], g[1:2], torch.qint8, -1, False)
        return (values, rows, normed, total, normed_rows, of_one_scale, *products)

    halves = [draw(*shape, seed=seed).bfloat16() for seed, shape in enumerate(((4, 16), (4, 16), (16,)))]
    inputs = [tensor.npu() for tensor in (*halves, weight, draw(5).abs(), draw(5, seed=4))]
    with torch.inference_mode():
        # Outside the graph these were compared with their definitions (quantised_operators.py).
        for got, wanted in zip(compiled(function)(*inputs), function(*inputs), strict=True):
            close(got, wanted.cpu())


def check_products_with_integers_in_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    bytes_ = torch.randint(-128, 128, (64, 16), generator=generator, dtype=torch.int8)
    words = torch.randint(-(2**31), 2**31 - 1, (64, 2), generator=generator, dtype=torch.int32)

    def function(x: Tensor, w8: Tensor, w4: Tensor, s: Tensor, o: Tensor, bias: Tensor) -> Results:
        return tuple(torch_npu.npu_weight_quant_batchmatmul(x, *more) for more in (
            (w8, s, o, None, None, bias, 32), (w4, s, o, None, None, None, 32), (w4, s[:1]),
            (w8.t().contiguous().t(), s[0])))

    inputs = [tensor.npu() for tensor in (draw(4, 64).bfloat16(), bytes_, words, draw(2, 16).bfloat16(),
                                          draw(2, 16, seed=1).bfloat16(), draw(16))]
    with torch.inference_mode():
        # Outside the graph these were compared with their definitions (grouped_operators.py).
        for got, wanted in zip(compiled(function)(*inputs), function(*inputs), strict=True):
            close(got, wanted.cpu())


def check_int8_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.tensor([[2, 0], [1, 3], [0, 1], [3, 2]], dtype=torch.int32)
    gate_up, down = (torch.randint(-127, 128, size, generator=generator, dtype=torch.int8)
                     for size in ((4, 16, 128), (4, 64, 16)))

    def function(a: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, of_both: Tensor, of_down: Tensor) -> Results:
        rows, places, counts, by_row = torch_npu.npu_moe_init_routing_v2(
            a, chosen, active_num=8, expert_num=4, expert_tokens_num_type=1, expert_tokens_num_flag=True,
            active_expert_range=[0, 4], quant_mode=1, row_idx_type=0)
        (sums,) = torch_npu.npu_grouped_matmul([rows], [gate_up], split_item=2, group_type=0, group_list=counts,
                                               group_list_type=1, output_dtype=torch.int32)
        hidden, of_hidden = torch_npu.npu_dequant_swiglu_quant(
            sums, weight_scale=of_both, activation_scale=by_row, group_index=counts, activate_left=True, quant_mode=1)
        (out,) = torch_npu.npu_grouped_matmul([hidden], [down], split_item=2, group_type=0, group_list=counts,
                                              group_list_type=1, scale=[of_down], per_token_scale=[of_hidden],
                                              output_dtype=a.dtype)
        return rows, places, counts, by_row, sums, hidden, of_hidden, out

    scales = draw(4, 128).abs() / 1000, draw(4, 16, seed=1).abs().bfloat16() / 100
    inputs = [tensor.npu() for tensor in (draw(4, 16).bfloat16(), experts, gate_up, down, *scales)]
    with torch.inference_mode():
        # Outside the graph these were compared with their definitions (expert_operators.py).
        for got, wanted in zip(compiled(function)(*inputs), function(*inputs), strict=True):
            close(got, wanted.cpu())


def check_products_read_weights_in_nz() -> None:
    """As outside the graph (fractal_operators.py); who takes a weight in NZ for one row by row is refused. More than
    one block of columns: a single one lies row by row."""
    values, counts = integers(9, 64), torch.tensor([4, 0, 5])
    whole, stack = in_nz(integers(64, 96, seed=1).npu()), in_nz(integers(3, 64, 96, seed=2).npu())
    words = packed(integers(128, 192, seed=3).remainder(16) - 8, fractal=True)

    def function(a: Tensor, wide: Tensor, x: Tensor, counts: Tensor, by: Tensor, of: Tensor, whole: Tensor,
                 stack: Tensor, words: Tensor, scales: Tensor) -> Results:
        (grouped,) = torch_npu.npu_grouped_matmul([x], [stack], split_item=2, group_type=0, group_list=counts,
                                                  group_list_type=1, scale=[of], per_token_scale=[by],
                                                  output_dtype=torch.bfloat16)
        return (torch_npu.npu_quant_matmul(x, whole, of[0], pertoken_scale=by, output_dtype=torch.bfloat16), grouped,
                torch_npu.npu_weight_quant_batchmatmul(a, whole, of[0]),
                torch_npu.npu_weight_quant_batchmatmul(wide, words, scales, antiquant_group_size=64))

    inputs = (draw(9, 64).bfloat16().npu(), draw(9, 128).bfloat16().npu(), values.npu(), counts.npu(),
              draw(9).abs().npu(), draw(3, 96).abs().bfloat16().npu(), whole, stack, words,
              draw(2, 192).abs().bfloat16().npu())
    with torch.inference_mode():
        for got, wanted in zip(compiled(function)(*inputs), function(*inputs), strict=True):
            assert torch.equal(got.cpu(), wanted.cpu())
        assert "that does not take FRACTAL_NZ" in error_of(lambda: compiled(lambda w: (w.relu(),))(whole))


def check_every_emulated_operator_was_compared() -> None:
    from cann_ge.session import REGISTRY

    in_modes = {"ApplyRotaryPosEmb", "ScatterPaKvCache", "FusedInferAttentionScore"}  # modes.py compares these
    # Their converters are npu_runner's: tests/npu compares the tokens of models that have them.
    in_families = {"MoeGatingTopKSoftmaxV2", "SoftplusV2", "AddRmsNormQuant", "GroupedMatmulSwigluQuantV2"}
    in_ranks = {"HcomAllReduce", "HcomAllGather"}  # hccl_rank.py
    never_run = sorted(set(REGISTRY) - set(counters()["ge_operators"]) - in_modes - in_families - in_ranks)
    assert not never_run, never_run
