"""Matmuls in CUDA C++ on Hopper: no further from float64 than twice what the same formula in plain torch is.

M rows, I input features, O output features.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.ops import TorchOps
from npu_runner.platforms.quantised import FP8, FP8_BLOCKS, QuantisedOps
from tests.cuda.paged_work import need_hopper
from tests.cuda.quantised_weights import assert_near, exact, rounded, rows_of, weight_of

FORMS = (FP8, FP8_BLOCKS)


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    need_hopper(device)


def scales_of(num_rows: int, shape: tuple[int, int], in_blocks: bool) -> tuple[Tensor, Tensor]:
    if not in_blocks:
        return torch.zeros(num_rows, device="cuda"), torch.zeros(shape[0], device="cuda")
    groups = shape[1] // 128
    return torch.zeros(groups, num_rows, device="cuda").t(), torch.zeros(-(-shape[0] // 128), groups, device="cuda")


def check(form: str, num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, tile: object) -> None:
    """Twice: what a matmul leaves behind serves the next, and sums are added in one order."""
    from npu_runner.platforms.cuda.matmul.hopper_fp8 import multiply
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    generator = torch.Generator("cuda").manual_seed(num_rows)
    whole = -(-num_outputs // 128) * 128 if form == FP8_BLOCKS else num_outputs  # a block of an edge is cut short
    weight = weight_of(form, whole, num_inputs, generator)
    rows = rounded(form, rows_of(num_rows, num_inputs, generator, torch.bfloat16))
    bias = torch.randn(whole, generator=generator, device="cuda").bfloat16() if has_bias else None
    plain = QuantisedOps(TorchOps()).linear(rows, weight, bias)[:, :num_outputs]
    expected = exact(rows, weight, bias)[:, :num_outputs]

    def run() -> Tensor:
        given = None if bias is None else bias[:num_outputs]
        matmul = Matmul(rows[0], weight[0][:num_outputs], given, torch.bfloat16, rows[1], weight[1])
        return multiply(matmul, tile)

    found = run()
    assert_near(found, plain, expected)
    assert torch.equal(run(), found)


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("form", FORMS)
def test_each_tile(form: str, has_bias: bool) -> None:
    """One row, tiles that are filled, what is left over of rows, outputs and slices, several tiles a cluster."""
    from npu_runner.platforms.cuda.matmul.hopper_fp8 import TILES

    inputs = 1536 if form == FP8_BLOCKS else 1552
    for tile in TILES[form == FP8_BLOCKS]:
        for num_rows, shape in ((1, (1024, 1024)), (tile.m - 3, (1352, inputs)), (2 * tile.m + 5, (392, 2048)),
                                (tile.m, (16_384, 512))):
            if tile.programs > 1 or shape[0] < 16_384:
                check(form, num_rows, *shape, has_bias, tile)


@pytest.mark.parametrize("form", FORMS)
def test_every_number_of_rows_gets_a_tile_that_fits(form: str) -> None:
    from npu_runner.platforms.cuda.matmul import hopper_fp8
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    in_blocks = form == FP8_BLOCKS
    least, most = hopper_fp8.LIMITS[in_blocks]
    for shape in ((1280, 512), (4096, 1536), (12_288, 1024), (1024, 12_288), (24_576, 4096)):
        weight_OI = torch.zeros(shape, device="cuda").to(torch.float8_e4m3fn)
        for num_rows in (1, least - 1, least, 64, 65, 96, 97, 128, 129, most, most + 1):
            x_MI = weight_OI[:1].expand(num_rows, -1).contiguous()
            matmul = Matmul(x_MI, weight_OI, None, torch.bfloat16, *scales_of(num_rows, shape, in_blocks))
            is_accepted = hopper_fp8.accepts(matmul)
            assert is_accepted == (least <= num_rows <= most)
            if is_accepted:
                tile = hopper_fp8.choose_tile(num_rows, shape[0], shape[1] // 128, in_blocks)
                assert tile.m * (1 if num_rows <= 128 else 2) >= num_rows
                assert tile.programs <= shape[1] // 128


def test_what_the_copy_engine_does_not_take_stays_with_the_others() -> None:
    from npu_runner.platforms.cuda.matmul.hopper_fp8 import accepts
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    def accepted(x_MI: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> bool:
        return accepts(Matmul(x_MI, weight_OI, None, dtype, *scales_of(len(x_MI), weight_OI.shape, False)))

    weight_OI = torch.zeros(1024, 1032, device="cuda").to(torch.float8_e4m3fn)
    x_MI = torch.zeros(40, 1032, device="cuda").to(torch.float8_e4m3fn)
    assert not accepted(x_MI, weight_OI, torch.bfloat16)
    assert not accepted(x_MI[:, :1024], weight_OI[:, :1024].contiguous(), torch.bfloat16)
    whole = [x[:, :1024].contiguous() for x in (x_MI, weight_OI)]
    assert accepted(*whole, torch.bfloat16)
    assert not accepted(whole[0], whole[1][:1022], torch.bfloat16)
    assert not accepted(*whole, torch.float16)
