"""What a test leaves to the full set, while the rest of it stays in the fast one: some of its cases, or examples."""

from __future__ import annotations

from typing import Any

import pytest

is_fast = False
"""This run is the fast set's (tests/conftest.py)."""


def examples(count: int) -> int:
    """How many examples a test of random traffic tries: `count`, and a third of them in the fast set."""
    return count // 3 if is_fast else count


def only_full(reason: str, *cases: Any) -> list[Any]:
    """These cases of pytest.mark.parametrize, marked `full`. A tuple is one value for each parameter.

    To be called within the decorator, with the reason as it stands in docs/testing.md (tests/core/test_fast_set.py).
    """
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full(reason))
            for case in cases]
