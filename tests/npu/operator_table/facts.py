"""The stored table of names: what a wheel says of one."""

from __future__ import annotations

import json

from tests.npu.operator_table.__main__ import TABLE

STORED = json.loads(TABLE.read_text())


def fact(wheel: str, path: str) -> str | None:
    found = [text for text, wheels in STORED["names"][path].items() if wheels == "all" or wheel in wheels.split()]
    return found[0] if found else None
