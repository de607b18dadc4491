"""Values for templates that are nested deeply."""

from __future__ import annotations

from typing import Any


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value
