"""The type of a table's column: the schema's where there is one and the values fit it, else that of the values.

A column whose values are of several types is text. A number that is infinite or NaN has no value: JSON has no such
number, so the formats would differ. Knows nothing of files or formats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_runner.batch.rows.logprobs_json import encoded

BOOL, INT64, UINT64, DOUBLE, TEXT, VECTOR32 = "bool", "int64", "uint64", "double", "text", "vector"
LIST = "list of "
_INT64 = (-(2**63), 2**63 - 1)
_EXACT = 2**53
"""Whole numbers up to here are the same as floating-point numbers."""
_DECLARED = {"string": TEXT, "integer": INT64, "number": DOUBLE, "boolean": BOOL}
_MAX_REFERENCES = 8


@dataclass
class Seen:
    """The values of a column so far. `declared`: the type that its schema says; None: none, or several."""

    declared: str | None = None
    num_rows: int = 0
    lowest: int = 0
    highest: int = 0
    kinds: set[str] = field(default_factory=set)
    """The types of the values: bool, int, float, str, list, dict."""
    items: Seen | None = None
    """The values in lists."""

    def add(self, value: Any) -> None:
        self.num_rows += 1
        if value is None or _is_no_number(value):
            return
        kind = type(value).__name__
        if kind == "float" and self.declared == INT64 and value.is_integer():
            value, kind = int(value), "int"  # in JSON, 3.0 is a whole number
        self.kinds.add(kind)
        if kind == "int":
            self.lowest, self.highest = min(self.lowest, value), max(self.highest, value)
        if kind == "list":
            if self.items is None:
                declared = self.declared or ""
                self.items = Seen(declared.removeprefix(LIST) if declared.startswith(LIST) else None)
            for item in value:
                self.items.add(item)

    @property
    def type(self) -> str:
        """One of the types above, or a list of one of them."""
        if not self.kinds:
            return self.declared or TEXT
        if self.kinds == {"bool"}:
            return BOOL
        if self.kinds == {"int"} and self.declared != DOUBLE:
            return self._whole()
        if self.kinds <= {"int", "float"}:
            is_exact = self.lowest >= -_EXACT and self.highest <= _EXACT
            return DOUBLE if is_exact else TEXT
        if self.kinds == {"list"}:
            assert self.items is not None, "a list was seen"
            return TEXT if self.items.kinds & {"list", "dict"} else LIST + self.items.type
        return TEXT

    def _whole(self) -> str:
        if _INT64[0] <= self.lowest and self.highest <= _INT64[1]:
            return INT64
        return UINT64 if self.lowest >= 0 and self.highest < 2**64 else TEXT

    @property
    def is_mixed(self) -> bool:
        """It is text, or lists of texts, because its values are of several types."""
        is_of_several = self.type == TEXT and len(self.kinds) > 1
        return is_of_several or (self.items is not None and self.items.is_mixed)


def as_type(value: Any, kind: str) -> Any:
    """The value as a column of this type has it. JSON can spell half a surrogate pair, which is no text: it becomes
    "?"."""
    if value is None or _is_no_number(value):
        return None
    if kind == TEXT:
        text = value if isinstance(value, str) else _as_json(value)
        return text if text.isascii() else encoded(text).decode()
    if kind == DOUBLE:
        return float(value)
    if kind in (INT64, UINT64):
        return int(value)
    if kind.startswith(LIST):
        return [as_type(item, kind.removeprefix(LIST)) for item in value]
    return value


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_with_nulls(value), ensure_ascii=False)


def _with_nulls(value: Any) -> Any:
    """A copy with null for each number that JSON cannot spell."""
    if isinstance(value, dict):
        return {name: _with_nulls(item) for name, item in value.items()}
    if isinstance(value, list):
        return list(map(_with_nulls, value))
    return None if _is_no_number(value) else value


def declared_types(schema: Any) -> dict[str, str | None]:
    """The properties of the objects that a schema is for, in order, with their types; None: several, or any."""
    found = _resolved(schema, schema)
    properties = found.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _declared(_resolved(part, schema), schema) for name, part in properties.items()}


def _declared(part: Mapping[str, Any], schema: Any) -> str | None:
    kinds = part.get("type")
    named = kinds if isinstance(kinds, list) else [kinds]
    left = [kind for kind in named if kind != "null"]
    if "anyOf" in part and kinds is None:
        parts = [_resolved(each, schema) for each in part["anyOf"] if isinstance(part["anyOf"], list)]
        left = [each.get("type") for each in parts if each.get("type") != "null"]
        part = next((each for each in parts if each.get("type") != "null"), {})
    if len(left) != 1 or not isinstance(left[0], str):
        return None
    if left[0] == "array":
        inner = _declared(_resolved(part.get("items"), schema), schema)
        return None if inner is None or inner.startswith(LIST) else LIST + inner
    return _DECLARED.get(left[0])


def _resolved(part: Any, schema: Any) -> Mapping[str, Any]:
    """A part of a schema, its reference within the schema followed."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(part, dict):
            return {}
        reference = part.get("$ref")
        if not isinstance(reference, str):
            return part
        part = schema
        for name in reference.removeprefix("#").strip("/").split("/") if reference != "#" else []:
            part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    return {}
