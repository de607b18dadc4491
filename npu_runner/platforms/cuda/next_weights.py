"""The weights that the products behind a product read. It asks for the first bytes of them to come into the L2 cache,
so that the memory is read on while attention, a norm or an activation runs between the two. Knows no product.

The order is that of the run that warms a graph up; products of the run that is captured are told what follows them. So
a weight that is named is one that the same graph reads by itself, and no result depends on it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

MOST_FOLLOWERS = 2
# Bytes of all weights that a product asks for.
MOST_BYTES = 24 << 20


class Layout(NamedTuple):
    """Where programs of a product find their part of a weight. `tiles` are shared evenly, and in their order, by
    clusters of `parts` programs. Tiles lie in groups, these one behind the other. A program begins with `rows` rows at
    once, whose lengths are `pitch` bytes, or of each the part that its place in its cluster names."""

    values: Tensor
    tiles: int
    tiles_of_group: int
    clusters: int
    parts: int
    group_bytes: int
    pitch: int
    rows: int


class Order:
    """Weights in the order in which products of a run read them."""

    def __init__(self) -> None:
        self._layouts: list[Layout] = []
        self._place = 0
        self._is_known = False

    def end(self) -> None:
        """What comes now is the same run again."""
        self._is_known = True

    def behind(self, layout: Layout) -> list[Layout]:
        """Of weights behind this one, the first MOST_FOLLOWERS; none before the order is known."""
        if not self._is_known:
            # The first product of its kind is computed several times, to have its kernels.
            if not self._layouts or not _is_same(self._layouts[-1], layout):
                self._layouts.append(layout)
            return []
        for place in range(self._place, len(self._layouts)):
            if _is_same(self._layouts[place], layout):
                self._place = place + 1
                return self._layouts[self._place:self._place + MOST_FOLLOWERS]
        return []


def _is_same(one: Layout, other: Layout) -> bool:
    return one.values.data_ptr() == other.values.data_ptr() and one[1:] == other[1:]


_orders: list[Order] = []


@contextlib.contextmanager
def ordered() -> Iterator[Order]:
    """Products within it tell their order, and behind `Order.end` are told it."""
    order = Order()
    _orders.append(order)
    try:
        yield order
    finally:
        _orders.remove(order)


class NextWeight(ctypes.Structure):
    """As in hopper.cu."""

    _fields_ = (("values", ctypes.c_void_p), ("bytes", ctypes.c_longlong), ("group_bytes", ctypes.c_longlong),
                *((name, ctypes.c_int) for name in ("tiles", "tiles_of_group", "clusters", "parts", "pitch", "rows",
                                                    "length")))


NextWeights = NextWeight * MOST_FOLLOWERS


def behind(layout: Layout) -> ctypes.Array[NextWeight]:
    """What a product with this weight asks for; without rows where nothing is known to follow."""
    import os
    found, left = NextWeights(), MOST_BYTES
    budgets = os.environ.get("NXT_MBS")
    if budgets and _orders:
        order = _orders[-1]
        followers = order.behind(layout)
        left = int(float(budgets.split(",")[(order._place - 1) % 4]) * 2**20)
        followers = followers[:int(os.environ.get("NXT_FOLLOWERS", "2"))]
    else:
        followers = _orders[-1].behind(layout) if _orders else []
    for place, each in zip(found, followers):
        asked = _asked(each, left)
        if asked is None:
            break
        ctypes.pointer(place)[0] = NextWeight(*asked[0])
        left -= asked[1]
    return found


def _asked(layout: Layout, most_bytes: int) -> tuple[tuple[int, ...], int] | None:
    """NextWeight's fields for up to so many bytes, and how many they are."""
    num_bytes = layout.values.numel() * layout.values.itemsize
    row, programs = layout.pitch // layout.parts, layout.clusters * layout.parts
    most = min(most_bytes, num_bytes) // programs
    rows = layout.rows
    if most >= rows * row:
        rows, length = most // row, row
    else:
        length = most // rows // 128 * 128
    if length <= 0:
        return None
    return (layout.values.data_ptr(), num_bytes, layout.group_bytes, layout.tiles, layout.tiles_of_group,
            layout.clusters, layout.parts, layout.pitch, rows, length), rows * length * programs
