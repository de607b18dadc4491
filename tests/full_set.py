"""What a test leaves to the full set, while the rest of it stays in the fast one: some of its cases, or examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

Place = TypeVar("Place")
is_fast = False
"""This run is the fast set's (tests/conftest.py)."""


def examples(count: int) -> int:
    """How many examples a test of random traffic tries: `count`, and an eighth of them in the fast set."""
    return max(count // 8, 5) if is_fast else count


def only_full(reason: str, *cases: Any) -> list[Any]:
    """Cases of pytest.mark.parametrize, marked `full` with this reason. A tuple is one value for each parameter."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full(reason))
            for case in cases]


def every(count: int) -> int:
    """The stride of a test through places that it can only count: one in `count` in the fast set, else each."""
    return count if is_fast else 1


def some_of(places: Sequence[Place], count: int) -> Sequence[Place]:
    """Of the places that a test goes through: all of them, and so many, evenly spread, in the fast set."""
    return places[:: max(len(places) // count, 1)] if is_fast else places
