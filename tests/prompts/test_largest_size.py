"""The search for the image of which a foreign processor makes the most: no other image has more.

The oracle is a definition of each kind of processor, asked for every size of a grid.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from npu_runner.prompts.media.largest_size import LargestSize, Measured, Size

GRID = [(width, height) for width in range(40, 4000, 130) for height in range(40, 4000, 130)]


def fixed(size: Size) -> Measured:
    return 256, 3 * 336 * 336


def by_area(size: Size) -> Measured:
    """One token for 28 x 28 pixels, of at most 4 million pixels."""
    width, height = size
    scale = min(1.0, (4e6 / (width * height)) ** 0.5)
    num_tokens = max(1, int(width * scale) // 28) * max(1, int(height * scale) // 28)
    return num_tokens, num_tokens * 28 * 28 * 3


def by_tiles(size: Size) -> Measured:
    """Up to 12 tiles in the grid whose shape is nearest, with the whole image as one more; a token ends each row."""
    width, height = size
    grids = [(columns, rows) for columns in range(1, 13) for rows in range(1, 13) if columns * rows <= 12]
    columns, rows = min(grids, key=lambda grid: (abs(grid[0] / grid[1] - width / height), grid[0] * grid[1]
                                                 * (-1 if width * height > 448 * 448 * 4 else 1)))
    num_tiles = columns * rows + (columns * rows > 1)
    return num_tiles * 256 + rows, num_tiles * 448 * 448 * 3


def by_tiles_of_few_tokens(size: Size) -> Measured:
    """As many tokens for any image, of up to 9 tiles."""
    num_tiles = min(9, max(1, size[0] * size[1] // 448**2))
    return 64, num_tiles * 448 * 448 * 3


def by_tiles_of_which_a_part_counts(size: Size) -> Measured:
    """Up to 36 tiles; beyond 9 of them their tokens are made fewer."""
    num_tiles = min(36, max(1, size[0] * size[1] // 448**2))
    return num_tiles * 81 if num_tiles <= 9 else 700, num_tiles * 448 * 448 * 3


@pytest.mark.parametrize("measure", [fixed, by_area, by_tiles, by_tiles_of_few_tokens])
@pytest.mark.parametrize("max_tokens", [1 << 20, 3000, 700])
def test_no_size_of_a_grid_has_an_eighth_more(measure: Callable[[Size], Measured], max_tokens: int) -> None:
    num_tokens, num_values = measure(LargestSize(measure).find(max_tokens))
    assert num_tokens <= max_tokens
    fitting = [found for size in GRID if (found := measure(size))[0] <= max_tokens]
    assert max(found[0] for found in fitting) <= num_tokens * 9 / 8
    assert max(found[1] for found in fitting) <= num_values * 9 / 8


def test_larger_arrays_come_before_more_tokens() -> None:
    """The tower takes memory by them."""
    size = LargestSize(by_tiles_of_which_a_part_counts).find(1 << 20)
    assert by_tiles_of_which_a_part_counts(size) == (700, 36 * 448 * 448 * 3)


def test_the_one_with_the_fewest_where_none_fits() -> None:
    assert LargestSize(by_area).find(3) == (37, 112)
    assert LargestSize(fixed).find(100) == (112, 112)


def test_sizes_that_the_processor_refuses_are_left_out() -> None:
    search = LargestSize(lambda size: None if max(size) > 1000 else by_area(size))
    assert search.find(1 << 20) == (896, 896)


@pytest.mark.parametrize("max_tokens", [1 << 20, 500])
def test_large_images_are_tried_only_where_they_have_more(max_tokens: int) -> None:
    """They cost seconds of a start."""
    tried: list[int] = []
    LargestSize(lambda size: (tried.append(size[0] * size[1]), by_tiles(size))[1]).find(max_tokens)
    assert sum(pixels > 2e6 for pixels in tried) <= 1
    assert len(tried) <= 20
