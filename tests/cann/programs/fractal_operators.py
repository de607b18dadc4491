"""Weights in FRACTAL_NZ: where each number lies by the definition, operators that read them against the same weights
row by row, bit for bit, and what is refused.

M rows, K inputs, N outputs, E groups.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import torch_npu
from torch import Tensor

from .emulation import error_of, refused
from .fused_operators import draw
from .quantised_operators import HALVES, integers
from .refusals import PARAMETER

ND, NZ = 2, 29
_TO_HOST = 2


def in_nz(plain: Tensor) -> Tensor:
    torch.npu.config.allow_internal_format = True
    try:
        return torch_npu.npu_format_cast(plain, NZ)
    finally:
        torch.npu.config.allow_internal_format = False


def packed(values: Tensor, *, fractal: bool) -> Tensor:
    """int32 (K, N / 8) of int8 (K, N) from -8 to 7."""
    words = values.int().npu()
    return torch_npu.npu_convert_weight_to_int4pack(in_nz(words) if fractal else words)


def memory_of(tensor: Tensor, num_items: int) -> np.ndarray:
    """What the device's memory holds, in its order."""
    torch.npu.synchronize()
    found = torch.zeros(num_items, dtype=tensor.dtype)
    size, target, source = ctypes.c_size_t(found.nbytes), *map(ctypes.c_void_p, (found.data_ptr(), tensor.data_ptr()))
    assert ctypes.CDLL("libascendcl.so").aclrtMemcpy(target, size, source, size, _TO_HOST) == 0
    return found.numpy()


def by_definition(matrix: np.ndarray, width: int) -> np.ndarray:
    """Blocks of 16 rows and `width` columns, blocks column by column, zeros behind the edges."""
    rows, columns = matrix.shape
    blocks_of_rows, blocks_of_columns = -(-rows // 16), -(-columns // width)
    found = np.zeros(blocks_of_rows * blocks_of_columns * 16 * width, matrix.dtype)
    for row in range(rows):
        for column in range(columns):
            block = (column // width) * blocks_of_rows + row // 16
            found[(block * 16 + row % 16) * width + column % width] = matrix[row, column]
    return found


def check_each_number_lies_where_the_definition_says() -> None:
    for shape in ((32, 64), (16, 32), (48, 96), (17, 40), (3, 16, 64)):
        for dtype, width in ((torch.int8, 32), (torch.float16, 16), (torch.int32, 16)):
            plain = integers(*shape, seed=sum(shape)).to(dtype)
            moved = in_nz(plain.npu())
            assert torch_npu.get_npu_format(moved) == NZ
            assert moved.shape == plain.shape
            matrices = plain.numpy().reshape(-1, *shape[-2:])
            expected = np.concatenate([by_definition(matrix, width) for matrix in matrices])
            assert np.array_equal(memory_of(moved, expected.size), expected), (shape, dtype)
            assert (expected.size == plain.numel()) == (shape[-1] % width == 0 and shape[-2] % 16 == 0)
            assert torch.equal(torch_npu.npu_format_cast(moved, ND).cpu(), plain)
            assert torch.equal(moved.cpu(), plain), "copies to the host are row by row"


def check_four_bits_lie_where_the_definition_says() -> None:
    values = integers(128, 192).remainder(16) - 8
    low = values.numpy().astype(np.int64).reshape(128, 24, 8) & 15
    words = (low << (4 * np.arange(8))).sum(2).astype(np.uint32).view(np.int32)
    moved = packed(values, fractal=True)
    assert (torch_npu.get_npu_format(moved), moved.shape) == (NZ, (128, 24))
    assert np.array_equal(memory_of(moved, words.size), by_definition(words, 8))
    assert np.array_equal(packed(values, fractal=False).cpu().numpy(), words)


def check_without_leave_a_cast_stays_row_by_row() -> None:
    torch.npu.config.allow_internal_format = False
    assert torch_npu.get_npu_format(torch_npu.npu_format_cast(integers(32, 64).npu(), NZ)) == ND


def check_quant_matmul_is_the_same() -> None:
    for inputs, outputs in ((48, 32), (256, 96), (40, 70)):
        values, weight = integers(5, inputs).npu(), integers(inputs, outputs, seed=1).npu()
        scale, rows = draw(outputs).abs().npu() / 100, draw(5).abs().npu() / 10
        for dtype in HALVES:
            for bias in (None, draw(outputs, seed=2).npu(), integers(outputs, seed=3).int().npu()):
                plain, fractal = (torch_npu.npu_quant_matmul(values, each, scale, pertoken_scale=rows, bias=bias,
                                                             output_dtype=dtype) for each in (weight, in_nz(weight)))
                assert torch.equal(plain.cpu(), fractal.cpu()), (inputs, outputs, dtype)


def check_grouped_products_are_the_same() -> None:
    """The fused one as its three parts: product to integers, silu(gate) * up, rounding."""
    x, weight, counts = integers(9, 64).npu(), integers(3, 64, 128, seed=1).npu(), torch.tensor([4, 0, 5]).npu()
    scales, rows = draw(3, 128).abs().npu() / 100, draw(9).abs().npu() / 10
    for dtype in HALVES:
        of = scales.bfloat16() if dtype == torch.bfloat16 else scales
        plain, fractal = (torch_npu.npu_grouped_matmul(
            [x], [each], split_item=2, group_type=0, group_list=counts, group_list_type=1, scale=[of],
            per_token_scale=[rows], output_dtype=dtype)[0] for each in (weight, in_nz(weight)))
        assert torch.equal(plain.cpu(), fractal.cpu())
    sums = torch_npu.npu_grouped_matmul([x], [weight], split_item=2, group_type=0, group_list=counts, group_list_type=1,
                                        output_dtype=torch.int32)[0]
    parts = torch_npu.npu_dequant_swiglu_quant(sums, weight_scale=scales, activation_scale=rows, group_index=counts,
                                               activate_left=True, quant_mode=1)
    for kind, groups in ((1, counts), (0, counts.cumsum(0))):
        fused = torch_npu.npu_grouped_matmul_swiglu_quant_v2(x, [in_nz(weight)], [scales], rows, groups,
                                                             group_list_type=kind)
        wide = [each[0].cpu().double() * each[1].cpu().double()[:, None] for each in (parts, fused)]
        assert (wide[0] - wide[1]).abs().max() <= 1e-5 * wide[0].abs().max()
        assert torch.equal(parts[0].cpu(), fused[0].cpu())


def check_the_fused_product_spoils_narrow_experts() -> None:
    for width in (16, 32, 48, 64, 96):
        x, weight = integers(9, 64).npu(), in_nz(integers(3, 64, 2 * width, seed=1).npu())
        _, scales = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            x, [weight], [draw(3, 2 * width).npu()], draw(9).npu(), torch.tensor([4, 0, 5]).npu(), group_list_type=1)
        assert bool(scales.cpu().isfinite().all()) == (width >= 64), width


def check_weights_alone_are_the_same() -> None:
    for dtype in HALVES:
        x = draw(5, 256, dtype=dtype).npu()
        whole, by_row = integers(256, 64, seed=1).npu(), (draw(64).abs() / 100).to(dtype).npu()
        plain, fractal = (torch_npu.npu_weight_quant_batchmatmul(x, each, by_row) for each in (whole, in_nz(whole)))
        assert torch.equal(plain.cpu(), fractal.cpu())
        values = integers(256, 192, seed=2).remainder(16) - 8
        for size in (64, 128):
            scales, offsets = ((draw(256 // size, 192, seed=seed).abs() / 10).to(dtype).npu() for seed in (3, 4))
            plain, fractal = (torch_npu.npu_weight_quant_batchmatmul(
                x, packed(values, fractal=each), scales, offsets, antiquant_group_size=size) for each in (False, True))
            assert torch.equal(plain.cpu(), fractal.cpu())


def check_products_refuse() -> None:
    values, weight, scale, rows = integers(4, 64).npu(), integers(64, 64).npu(), draw(64).npu(), draw(4).npu()

    def product(x2: Tensor) -> None:
        torch_npu.npu_quant_matmul(values, x2, scale, pertoken_scale=rows, output_dtype=torch.bfloat16)

    fractal = in_nz(weight)
    product(fractal)
    with refused(PARAMETER, "x2 in FRACTAL_NZ is a view or turned"):
        product(fractal.t())
    with refused(PARAMETER, "lies as"):
        torch_npu.npu_quant_matmul(values[:, :32].contiguous(), fractal[:32], scale, pertoken_scale=rows,
                                   output_dtype=torch.bfloat16)
    with refused(PARAMETER, "no side is 1"):
        torch_npu.npu_quant_matmul(values, in_nz(weight[:, :1].contiguous()), scale[:1], pertoken_scale=rows,
                                   output_dtype=torch.bfloat16)
    assert "do not support internal format" in error_of(
        lambda: torch_npu.npu_dynamic_quant(in_nz(draw(16, 32, dtype=torch.float16).npu())))


def check_grouped_products_refuse() -> None:
    x, weight, counts = integers(9, 64).npu(), in_nz(integers(3, 64, 128).npu()), torch.tensor([4, 0, 5]).npu()
    scales, rows = draw(3, 128).npu(), draw(9).npu()
    with refused(PARAMETER, "no int32 output"):
        torch_npu.npu_grouped_matmul([x], [weight], split_item=2, group_type=0, group_list=counts, group_list_type=1,
                                     output_dtype=torch.int32)

    def fused(matrices: Tensor = weight, by: Tensor = scales, groups: Tensor = counts) -> None:
        torch_npu.npu_grouped_matmul_swiglu_quant_v2(x, [matrices], [by], rows, groups, group_list_type=1)

    fused()
    with refused(PARAMETER, "weightScale"):
        fused(by=scales[:, :64].contiguous())
    with refused(PARAMETER, "lies as"):
        fused(weight[:2], scales[:2], counts[:2])
    with refused(PARAMETER, "groupList"):
        fused(groups=counts.int())


def check_weights_alone_refuse() -> None:
    x, values = draw(4, 256, dtype=torch.float16).npu(), integers(256, 64).remainder(16) - 8
    fractal, narrow = packed(values, fractal=True), packed(values[:, :32].contiguous(), fractal=True)

    def product(weight: Tensor, size: int, outputs: int = 64) -> None:
        shape = (outputs,) if size == 0 else (256 // size, outputs)
        torch_npu.npu_weight_quant_batchmatmul(x, weight, torch.ones(shape, dtype=torch.float16).npu(),
                                               antiquant_group_size=size)

    product(fractal, 64)
    with refused(PARAMETER, "64 or 128 for int4"):
        product(fractal, 32)
    with refused(PARAMETER, "N 32 is no multiple of 64"):
        product(narrow, 64, 32)
    with refused(PARAMETER, "int4 by output"):
        product(fractal, 0)
    with refused(PARAMETER, "int8 in groups"):
        product(in_nz(values.npu()), 64)
