"""How families come from an image's sides to those that their towers take: the rules of transformers' image processors.
Knows no file and no pixels.
"""

from __future__ import annotations

import math
from enum import Enum


class Resizing(Enum):
    """Sides become multiples of one token's, and the area comes between two bounds. Families differ in the rest."""

    AREA = "area"
    """Nothing else (Qwen2-VL)."""
    SHORT_SIDE = "short_side"
    """A side shorter than a token's first becomes as long, and the other grows with it (PaddleOCR-VL)."""
    FRAMES = "frames"
    """An image with such a side first grows as a whole, and the area is that of all frames of a patch (GLM-4V)."""

    def enlarged(self, height: int, width: int, side: int) -> tuple[int, int]:
        """(height, width) before the area is looked at. `side`: of one token, in pixels."""
        if min(height, width) >= side or self is Resizing.AREA:
            return height, width
        return _with_a_longer_side(height, width, side) if self is Resizing.SHORT_SIDE else grown(height, width, side)


def _with_a_longer_side(height: int, width: int, side: int) -> tuple[int, int]:
    if height < side:
        height, width = side, round(width * side / height)
    if width < side:
        height, width = round(height * side / width), side
    return height, width


def grown(height: int, width: int, side: int) -> tuple[int, int]:
    """(height, width), scaled up so that the shorter one is about `side`."""
    scale = max(side / height, side / width)
    return int(height * scale), int(width * scale)


def within_bounds(height: int, width: int, side: int, bounds: tuple[int, int], *, num_frames: int = 1,
                  num_counted: int = 1) -> tuple[int, int]:
    """(height, width) as multiples of `side`, in a shape as near as the bounds on the area allow.

    `bounds`: pixels of all frames, from the least to the most. An image that is out of them is scaled by what
    `num_frames` have; whether it is, is seen by `num_counted`, for which incomplete groups are rounded.
    """
    least, most = bounds
    rounded = round(height / side) * side, round(width / side) * side
    num_pixels = num_counted * rounded[0] * rounded[1]
    if num_pixels > most:
        shrink = math.sqrt((num_frames * height * width) / most)
        return (max(side, math.floor(height / shrink / side) * side),
                max(side, math.floor(width / shrink / side) * side))
    if num_pixels < least:
        grow = math.sqrt(least / (num_frames * height * width))
        return math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
    return rounded
