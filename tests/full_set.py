"""Cases of a test that are left to the full set, while others of it stay in the fast one."""

from __future__ import annotations

from typing import Any

import pytest


def only_full(reason: str, *cases: Any) -> list[Any]:
    """These cases of pytest.mark.parametrize, marked `full`. A tuple is one value for each parameter.

    To be called within the decorator, with the reason as it stands in docs/testing.md (tests/core/test_fast_set.py).
    """
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full(reason))
            for case in cases]
