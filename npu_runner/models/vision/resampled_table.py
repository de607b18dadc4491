"""A learned vector for each place of a square grid, resampled to the grid of each image's patches. Knows no tower.

What `torch.nn.functional.interpolate` computes without antialiasing, as a weighted sum of rows of the table, so that
images of whatever sizes go through it together. The cubic kernel is Keys' with a = -0.75.

P patches of all images, G groups of four places that a patch is a sum over, K places along an axis, C hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.layers.parallel import LayerContext
from npu_runner.models.vision.parts import block_order, cached_by_size

_CUBIC = -0.75

AxisTaps: TypeAlias = Callable[[int, int], tuple[np.ndarray, np.ndarray]]
"""Maps (size, side) to the K positions in a table of `side` rows and their weights for each of `size` patches along an
axis: (size, K) int64, within the table, and (size, K) float32."""


class ResampledTable(nn.Module):
    """Its weight is the checkpoint's table, row after row of a square. `axis_taps`: the family's way to resample it."""

    def __init__(self, num_places: int, hidden_size: int, axis_taps: AxisTaps, context: LayerContext):
        super().__init__()
        self.weight = context.parameter(num_places, hidden_size)
        self.side, self.axis_taps = math.isqrt(num_places), axis_taps

    def forward(self, x_PC: Tensor, taps_GP4: Tensor, weights_GP4: Tensor) -> Tensor:
        """x + the table at the patches' places: summed in float32, rounded to the dtype of x, added."""
        # Four taps at a time: all sixteen of the cubic kernel would make the tower's largest tensor.
        sums = ((F.embedding(taps_P4, self.weight) * weights_P4[..., None]).sum(1)
                for taps_P4, weights_P4 in zip(taps_GP4, weights_GP4, strict=True))
        return x_PC + reduce(torch.add, sums).to(x_PC.dtype)

    def places(self, grids: Sequence[tuple[int, int]], merge: int) -> list[np.ndarray]:
        """The arguments of `forward` for images of these (height, width) in patches, each in merge-block order: rows of
        the table (G, P, 4) int32 and their weights (G, P, 4) float32."""
        columns = zip(*(_table_taps(*grid, merge, self.side, self.axis_taps) for grid in grids), strict=True)
        return [np.concatenate(column, axis=1) for column in columns]


def bilinear(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """align_corners false: the middles of patches and of places meet."""
    low, share = _below(np.maximum(_middles(size, side), 0))
    return _taps(low, [0, 1], [1 - share, share], side)


def bicubic(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """align_corners false. Places beyond an edge are the edge's."""
    low, share = _below(_middles(size, side))
    return _taps(low, [-1, 0, 1, 2], [_cubic(np.abs(share - step)) for step in (-1, 0, 1, 2)], side)


def bilinear_corners(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """align_corners true: the first and the last patch are the table's first and last place."""
    low, share = _below(torch.linspace(0, side - 1, size, dtype=torch.float32).numpy())
    return _taps(low, [0, 1], [1 - share, share], side)


def _middles(size: int, side: int) -> np.ndarray:
    return (np.arange(size) + 0.5) * (side / size) - 0.5


def _below(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The whole number below each, and how far it is above that."""
    low = np.floor(places)
    return low.astype(np.int64), places - low


def _taps(low: np.ndarray, steps: Sequence[int], weights: Sequence[np.ndarray],
          side: int) -> tuple[np.ndarray, np.ndarray]:
    taps = np.clip(low[:, None] + np.array(steps), 0, side - 1)
    return taps, np.stack(weights, axis=-1).astype(np.float32)


def _cubic(distance: np.ndarray) -> np.ndarray:
    a, x = _CUBIC, distance
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, far)


@cached_by_size
def _table_taps(height: int, width: int, merge: int, side: int, axis_taps: AxisTaps) -> tuple[np.ndarray, np.ndarray]:
    """As `places`, of one image."""
    (rows_PK, down_PK), (columns_PK, right_PK) = (
        [values[block_order(height, width, merge)[:, axis]] for values in axis_taps(size, side)]
        for axis, size in enumerate((height, width)))
    taps_PKK = rows_PK[:, :, None] * side + columns_PK[:, None, :]
    weights_PKK = down_PK[:, :, None] * right_PK[:, None, :]
    taps_GP4, weights_GP4 = (np.ascontiguousarray(values.reshape(height * width, -1, 4).swapaxes(0, 1))
                             for values in (taps_PKK, weights_PKK))
    return taps_GP4.astype(np.int32), weights_GP4
