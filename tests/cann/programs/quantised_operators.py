"""Operators of int8 products against their definitions in float64, as a runner calls them, and what they refuse.

M rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from .emulation import close, refused
from .fused_operators import draw
from .refusals import PARAMETER

HALVES = (torch.float16, torch.bfloat16)
INT8_MAX = 127.0


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and scales of rows, by QUANT's definition: s = max|x| / 127, q = round(x / s)."""
    scale = x.float().abs().amax(-1) / INT8_MAX
    return (x.float() / scale[..., None]).round().to(torch.int8), scale


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def check_dynamic_quant_rounds_rows() -> None:
    for dtype in HALVES:
        x = draw(5, 48, dtype=dtype)
        values, scales = torch_npu.npu_dynamic_quant(x.npu())
        expected = rounded(x)
        assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
        assert torch.equal(values.cpu(), expected[0])
        close(scales, expected[1])
        smooth = draw(48, dtype=dtype, seed=1)
        values, scales = torch_npu.npu_dynamic_quant(x.npu(), smooth_scales=smooth.npu())
        assert torch.equal(values.cpu(), rounded(x.float() * smooth.float())[0])
    values, scales = torch_npu.npu_dynamic_quant(torch.zeros(2, 16, dtype=torch.bfloat16).npu())
    assert not values.cpu().any()
    assert not scales.cpu().any()


def check_quant_matmul_scales_rows_and_outputs() -> None:
    values, weight, scale, rows = integers(5, 48), integers(32, 48, seed=1), draw(32).abs() / 100, draw(5).abs() / 10
    sums = values.double() @ weight.double().T
    for dtype in HALVES:
        for bias in (None, draw(32, seed=2), draw(32, seed=2).bfloat16(), integers(32, seed=3).int()):
            expected = sums if bias is None or bias.is_floating_point() else sums + bias.double()
            expected = expected * scale.double() * rows.double()[:, None]
            if bias is not None and bias.is_floating_point():
                expected = expected + bias.double()
            for given in (weight.npu().t(), weight.t().contiguous().npu()):
                out = torch_npu.npu_quant_matmul(
                    values.npu(), given, scale.npu(), pertoken_scale=rows.npu(),
                    bias=None if bias is None else bias.npu(), output_dtype=dtype)
                close(out, expected.to(dtype), rtol=1e-2, atol=1e-2)
    plain = torch_npu.npu_quant_matmul(values.npu(), weight.npu().t(), scale.npu(), output_dtype=torch.bfloat16)
    close(plain, (sums * scale.double()).bfloat16(), rtol=1e-2, atol=1e-2)
    whole = torch_npu.npu_quant_matmul(values.npu(), weight.npu().t(), scale.npu(), output_dtype=torch.int32)
    assert torch.equal(whole.cpu(), sums.int())


def check_quantize_multiplies_with_one_scale() -> None:
    for dtype in HALVES:
        x, (scale, offset) = draw(5, 48, dtype=dtype) * 3, torch.tensor([[17.0], [-9.0]], dtype=dtype)
        values = torch_npu.npu_quantize(x.npu(), scale.npu(), offset.npu(), torch.qint8, -1, False)
        expected = (x.float() * scale.float() + offset.float()).round().clamp(-128, 127).to(torch.int8)
        assert values.dtype == torch.int8
        assert torch.equal(values.cpu(), expected)


def check_add_rms_norm_dynamic_quant() -> None:
    for dtype in HALVES:
        x, residual, weight = draw(7, 64, dtype=dtype), draw(7, 64, dtype=dtype, seed=1), draw(64, dtype=dtype, seed=2)
        values, _, total, scales, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
            x.npu(), residual.npu(), weight.npu(), epsilon=1e-6, output_mask=[True, False])
        close(total, x + residual)
        normed = torch.nn.functional.rms_norm((x + residual).float(), (64,), weight.float(), 1e-6)
        close(values.cpu().float() * scales.cpu()[:, None], normed, rtol=0, atol=float(scales.max()) * 0.51)
        close(scales, normed.abs().amax(-1) / INT8_MAX)


def check_add_rms_norm_quant_divides_by_one_scale() -> None:
    """In bfloat16 from float32, in float16 from what is rounded behind each step, as its source does."""
    for dtype, kinds in zip(HALVES, ((torch.float32, torch.int32), (torch.bfloat16, torch.bfloat16)), strict=True):
        x, residual, weight = draw(7, 64, dtype=dtype), draw(7, 64, dtype=dtype, seed=1), draw(64, dtype=dtype, seed=2)
        scale, offset = (torch.full((64,), value).to(kind) for value, kind in zip((0.0271, -9), kinds, strict=True))
        values, _, total = torch_npu.npu_add_rms_norm_quant(x.npu(), residual.npu(), weight.npu(), scale.npu(),
                                                            offset.npu(), None, epsilon=1e-6)
        close(total, x + residual)
        wide = (x + residual).double() if dtype == torch.float16 else x.double() + residual.double()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        normed = (normed.half() * weight).double() if dtype == torch.float16 else normed * weight.double()
        exact = normed / scale.double() + offset.double()
        assert values.dtype == torch.int8
        assert int(values.min()) == -128, "what is beyond int8 is at its end"
        off = (values.cpu().double() - exact.clamp(-128, 127)).abs().max()
        assert float(off) <= (0.75 if dtype == torch.float16 else 0.501), "a float16 step may round the other way"


def check_add_rms_norm_quant_refuses() -> None:
    x, gamma = draw(4, 16).half().npu(), draw(16).half().npu()
    scale, zero = torch.ones(16).npu(), torch.zeros(16, dtype=torch.int32).npu()

    def norm(x1: Tensor = x, weight: Tensor = gamma, by: Tensor = scale, zeros: Tensor = zero, **more: object) -> None:
        torch_npu.npu_add_rms_norm_quant(x1, x1, weight, by, zeros, None, **more)

    norm()
    with refused(PARAMETER, "gamma"):
        norm(weight=gamma.float())
    with refused(PARAMETER, "gamma and scales1"):
        norm(by=scale[:1].contiguous())
    with refused(PARAMETER, "scales1"):
        norm(by=scale.half())
    with refused(PARAMETER, "zeroPoints1"):
        norm(zeros=zero.bfloat16())
    with refused(PARAMETER, "this chip divides"):
        norm(div_mode=False)
    with refused(PARAMETER, "no multiple of 32 bytes"):
        norm(*(tensor[..., :8].contiguous() for tensor in (x, gamma, scale, zero)))
    brain = x.bfloat16()
    with refused(PARAMETER, "scales1"):
        norm(brain, gamma.bfloat16())


def check_rounding_refuses() -> None:
    x = draw(4, 16)
    with refused(PARAMETER, "x"):
        torch_npu.npu_dynamic_quant(x.npu())
    with refused(PARAMETER, "smoothScales"):
        torch_npu.npu_dynamic_quant(x.half().npu(), smooth_scales=draw(8).half().npu())
    with refused(PARAMETER, "x and scale"):
        torch_npu.npu_quantize(x.half().npu(), torch.ones(1).npu(), None, torch.qint8, -1, False)
    with refused(PARAMETER, "gamma"):
        torch_npu.npu_add_rms_norm_dynamic_quant(x.half().npu(), x.half().npu(), draw(16).npu(),
                                                 output_mask=[True, False])


def check_quant_matmul_refuses() -> None:
    values, weight, scale, rows = integers(4, 16).npu(), integers(8, 16).npu().t(), draw(8).npu(), draw(4).npu()

    def product(x: Tensor = values, x2: Tensor = weight, by: Tensor = scale, **changes: object) -> None:
        torch_npu.npu_quant_matmul(x, x2, by, **({"pertoken_scale": rows, "output_dtype": torch.bfloat16} | changes))

    product()
    with refused(PARAMETER, "pertokenScale"):
        product(pertoken_scale=draw(3).npu())
    with refused(PARAMETER, "pertokenScale"):
        product(pertoken_scale=rows.bfloat16())
    with refused(PARAMETER, "scale"):
        product(by=scale.half())
    with refused(PARAMETER, "scale"):
        product(by=scale.bfloat16(), output_dtype=torch.float16)
    with refused(PARAMETER, "bias"):
        product(bias=draw(8).half().npu())
    with refused(PARAMETER, "times x2"):
        product(x2=integers(8, 12).npu().t())
    with refused(PARAMETER, "neither contiguous nor transposed"):
        product(x2=integers(16, 16).npu()[:, ::2])
    with refused(PARAMETER, "at most 65535"):
        product(x2=torch.zeros(16, 65536, dtype=torch.int8).npu(), by=torch.ones(65536).npu())
