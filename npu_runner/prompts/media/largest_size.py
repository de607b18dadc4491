"""The size of an image of which a foreign processor makes the most. Knows a processor by its results alone.

Processors differ: a fixed number of tokens, tiles whose number depends on the shape, or tokens in proportion to the
area, up to a bound. Sizes are tried from small to large, as large images cost seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

Size = tuple[int, int]
"""Width and height in pixels."""
Measured = tuple[int, int]
"""The tokens of an image, and the numbers in its arrays."""

_SIDES = (112, 224, 448, 896, 1344, 2048, 3072)
# Upright shapes: where rows and columns have tokens of their own, they have no fewer than wide ones.
_SHAPES = ((3, 4), (2, 3), (1, 2), (1, 3))
# The second square has 1.9 times the area of the first. Tiles are whole, so their number grows otherwise.
_AREAS = ((448, 448), (616, 616))


class LargestSize:
    """`measure`: the results of a grey image; None: the processor refuses its size."""

    def __init__(self, measure: Callable[[Size], Measured | None]):
        self._measure = cache(measure)

    def find(self, max_tokens: int) -> Size:
        """The size with the largest arrays and the most tokens, up to `max_tokens`. If no size fits, the one with the
        fewest tokens."""
        sizes = {size: measured for size in self._tried(max_tokens) if (measured := self._measure(size))}
        fitting = {size: measured[::-1] for size, measured in sizes.items() if measured[0] <= max_tokens}
        return max(fitting, key=lambda size: fitting[size]) if fitting else min(sizes, key=lambda size: sizes[size])

    def _tried(self, max_tokens: int) -> list[Size]:
        squares, is_cut_off = self._squares(max_tokens)
        top = squares[-1][0]
        fits = {size[0]: measured[0] for size in squares
                if (measured := self._measure(size)) and measured[0] <= max_tokens}
        best = max(fits, key=lambda side: fits[side]) if fits else top
        if not fits or not self._follows_area:
            sides = sorted({best, min(top, 1344), *([top] if is_cut_off else ())})
            return squares + [(side * short // long, side) for side in sides for short, long in _SHAPES]
        if not is_cut_off:
            return squares
        # Between the last square that fits and the first that does not.
        side = min(top, int(best * (max_tokens / fits[best]) ** 0.5))
        return [*squares, (side, side), (side * 15 // 16, side * 15 // 16)]

    def _squares(self, max_tokens: int) -> tuple[list[Size], bool]:
        """Squares up to the first with too many tokens, and True; or to one that is as good as the largest."""
        squares = []
        for side in _SIDES:
            squares.append((side, side))
            measured = self._measure((side, side))
            if measured is not None and measured[0] > max_tokens:
                return squares, True
            if side in (896, 1344) and measured == self._measure((_SIDES[-1], _SIDES[-1])):
                break
        return squares, False

    @property
    def _follows_area(self) -> bool:
        small, larger = (self._measure(size) for size in _AREAS)
        return small is not None and larger is not None and 1.6 < larger[0] / small[0] < 2.2
