"""Products with weights of 4 and 8 bit integers against their definition in float64, as a runner calls them, and what
they refuse.

M rows, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from .emulation import close, error_of, refused
from .fused_operators import draw
from .quantised_operators import HALVES
from .refusals import PARAMETER

K, N = 128, 48


def weight(bits: int, num_groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """int8 (K, N), scales and zeros (G, N)."""
    half, generator = 1 << (bits - 1), torch.Generator().manual_seed(bits + num_groups)
    values = torch.randint(-half, half, (K, N), generator=generator, dtype=torch.int8)
    zeros = torch.randint(1 - half, half + 1, (num_groups, N), generator=generator).to(dtype)
    return values, (draw(num_groups, N).abs() / 50).to(dtype), zeros


def product(x: Tensor, values: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> Tensor:
    """x w + b in float64, with w = (values - zeros) * scales rounded once to x's type."""
    numbers = values.double().unflatten(0, (len(scales), -1))
    numbers = numbers if zeros is None else numbers - zeros.double()[:, None]
    out = x.double() @ (numbers * scales.double()[:, None]).flatten(0, 1).to(x.dtype).double()
    return out if bias is None else out + bias.double()


def words(values: Tensor) -> Tensor:
    """As the vendor packs them."""
    return torch_npu.npu_convert_weight_to_int4pack(values.int().npu())


def check_products_of_groups_and_outputs() -> None:
    for dtype in HALVES:
        x, bias = draw(5, K, dtype=dtype), draw(N, seed=3).to(torch.float32 if dtype == torch.bfloat16 else dtype)
        for bits in (4, 8):
            for num_groups in (1, 2, 4):
                values, scales, zeros = weight(bits, num_groups, dtype)
                given = words(values) if bits == 4 else values.npu()
                for offset, adds in ((None, None), (zeros, bias)):
                    out = torch_npu.npu_weight_quant_batchmatmul(
                        x.npu(), given, (scales if num_groups > 1 else scales[0]).npu(),
                        None if offset is None else -(offset if num_groups > 1 else offset[0]).npu(),
                        bias=None if adds is None else adds.npu(),
                        antiquant_group_size=0 if num_groups == 1 else K // num_groups)
                    assert (out.dtype, out.shape) == (dtype, (5, N))
                    close(out, product(x, values, scales, offset, adds).to(dtype), rtol=1e-2, atol=1e-2)
        values, scales, _ = weight(8, 1, dtype)
        turned = torch_npu.npu_weight_quant_batchmatmul(x.npu(), values.t().contiguous().npu().t(), scales.npu())
        close(turned, product(x, values, scales, None, None).to(dtype), rtol=1e-2, atol=1e-2)


def check_packing_of_four_bits() -> None:
    found = words(torch.arange(-8, 8, dtype=torch.int8)[None]).cpu()
    assert found.tolist() == [[0xFEDCBA98 - (1 << 32), 0x76543210]], "eight of a row in a word, the lowest bits first"


def check_products_refuse() -> None:
    x, (values, scales, zeros) = draw(4, K).half().npu(), weight(8, 4, torch.float16)
    given, by, offset = values.npu(), scales.npu(), zeros.npu()

    def multiply(first: Tensor = x, second: Tensor = given, third: Tensor = by, size: int = 32, **more: object) -> None:
        torch_npu.npu_weight_quant_batchmatmul(first, second, third, antiquant_group_size=size, **more)

    multiply(antiquant_offset=offset, bias=torch.ones(N).half().npu())
    for kind, wrong in (
        ("x", {"first": x.float()}), ("antiquantScale", {"third": by.float()}),
        ("antiquantScale", {"third": by[:2]}), ("antiquantScale", {"size": 0}),
        ("antiquantOffset", {"antiquant_offset": offset.float()}),
        ("antiquantOffset", {"antiquant_offset": offset[:2]}), ("bias", {"bias": torch.ones(N).npu()}),
        ("neither contiguous nor", {"second": torch.zeros(K, 2 * N, dtype=torch.int8).npu()[:, ::2]}),
    ):
        with refused(PARAMETER, kind):
            multiply(**wrong)  # type: ignore[arg-type]
    for size in (16, 48, K):  # torch_npu itself says so
        assert "antiquant_group_size" in error_of(lambda: multiply(size=size)), size  # noqa: B023
    with refused(PARAMETER, "bias"):
        multiply(x.bfloat16(), given, by.bfloat16(), bias=torch.ones(N).bfloat16().npu())
