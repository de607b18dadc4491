"""Products in CUDA C++ on Hopper: no further from float64 than twice what the same formula in plain torch is.

M rows, I input features, O output features.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.ops import FP8, FP8_BLOCKS
from tests.cuda.paged_work import need_hopper
from tests.cuda.test_quantised_products import assert_near, exact, plain_product, rounded, rows_of, weight_of

FORMS = (FP8, FP8_BLOCKS, torch.bfloat16, torch.float16)
PROGRAMS = (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    need_hopper(device)


class Work:
    """One product, its definition in float64, and the same in plain torch."""

    def __init__(self, form: Any, num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool, seed: int = 0):
        generator = torch.Generator("cuda").manual_seed(seed)
        self.dtype = torch.bfloat16 if isinstance(form, str) else form
        x_MI = rows_of(num_rows, num_inputs, generator, self.dtype)
        self.bias = torch.randn(num_outputs, generator=generator, device="cuda").to(self.dtype) if has_bias else None
        if isinstance(form, str):
            blocks = (-(-num_outputs // 128) * 128, num_inputs)  # those of an edge are cut short
            weight = weight_of(form, *(blocks if form == FP8_BLOCKS else (num_outputs, num_inputs)), generator)
            rows = rounded(form, x_MI)
            self.x, self.weight, self.scales = rows[0], weight[0][:num_outputs], (rows[1], weight[1])
            self.expected = exact(rows, weight, None)[:, :num_outputs]
            self.plain = plain_product(form, rows, weight, None)[:, :num_outputs]
        else:
            weight = torch.randn(num_outputs, num_inputs, generator=generator, device="cuda").mul(num_inputs**-0.5)
            weight = weight.to(form)
            self.x, self.weight, self.scales = x_MI, weight, None
            self.expected, self.plain = x_MI.double() @ weight.double().T, x_MI @ weight.T
        if self.bias is not None:
            self.expected = self.expected + self.bias.double()
            self.plain = self.expected.to(self.dtype)

    def run(self, tile: Any) -> Tensor:
        from npu_runner.platforms.cuda.hopper_products import multiply

        return multiply(self.x, self.weight, self.bias, self.dtype, tile, self.scales)

    def check(self, tile: Any) -> None:
        found = self.run(tile)
        assert_near(found, self.plain, self.expected)
        assert torch.equal(self.run(tile), found), "sums are added in one order"


def tiles() -> list[Any]:
    from npu_runner.platforms.cuda.hopper_products import TILES

    return list(TILES)


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_each_tile(form: Any, has_bias: bool) -> None:
    """One row, tiles that are filled, and what is left over of rows, outputs and slices."""
    for tile, programs in itertools.product(tiles(), PROGRAMS):
        inputs = 1536 if form == FP8_BLOCKS else 1552
        for num_rows, shape in ((1, (1024, 1024)), (tile.rows - 3, (1352, inputs)), (2 * tile.rows + 5, (392, 2048)),
                                (tile.rows, (4096, 4096))):
            Work(form, num_rows, *shape, has_bias).check(tile._replace(programs=programs))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_product_that_is_taken(form: Any) -> None:
    """What each size of step gets, kernels of several tiles one behind the other."""
    from npu_runner.platforms.cuda import hopper_products

    for shape in ((1280, 1024), (4096, 1536), (12_288, 1024), (1024, 12_288)):
        for num_rows in (2, 16, 17, 33, 64, 65, 128, 200, 256, 512):
            work = Work(form, num_rows, *shape, False, seed=num_rows)
            scale = work.scales and work.scales[1]
            hopper_products.prepare(work.weight, scale, work.dtype)
            tile = hopper_products.taken(work.x, work.weight, scale, work.dtype)
            if tile is not None:
                work.check(tile)
