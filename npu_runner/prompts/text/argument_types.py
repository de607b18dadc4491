"""Which JSON types a schema of an argument admits, as far as it says so. Knows schemas, no formats of calls."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

MOST_STEPS = 64
"""References and branches that lead further say nothing, nor do cycles."""
_OF_VALUES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array",
              dict: "object"}
_OF_KEYWORDS = {"properties": "object", "additionalProperties": "object", "patternProperties": "object",
                "required": "object", "items": "array", "prefixItems": "array"}


class ArgumentTypes:
    """Of the schemas within one schema, which their references lead into."""

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._known: dict[str, frozenset[str]] = {}

    def of(self, schema: Any, num_steps: int = 0) -> frozenset[str]:
        """Names of JSON types; empty where the schema does not say. A branch of anyOf adds its own to the others."""
        if not isinstance(schema, Mapping) or num_steps > MOST_STEPS:
            return frozenset()
        said = [_stated(schema), *(self.of(each, num_steps + 1) for each in _list(schema.get("allOf")))]
        for name in ("anyOf", "oneOf"):
            branches = (self.of(each, num_steps + 1) for each in _list(schema.get(name)))
            said.append(frozenset[str]().union(*branches))
        if isinstance(schema.get("$ref"), str):
            said.append(self._of_reference(schema["$ref"], num_steps + 1))
        return functools.reduce(_both, said)

    def target(self, reference: str) -> Any:
        """What a reference within the schema leads to; None where it leads nowhere or elsewhere."""
        node: Any = self._root
        if reference.partition("#")[0]:
            return None
        for part in reference.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(key)] if isinstance(node, list) else node[key]
            except (KeyError, IndexError, TypeError, ValueError):
                return None
        return node

    def _of_reference(self, reference: str, num_steps: int) -> frozenset[str]:
        if reference not in self._known:
            self._known[reference] = frozenset()  # as long as it is open: a cycle adds nothing
            self._known[reference] = self.of(self.target(reference), num_steps)
        return self._known[reference]


def _stated(schema: Mapping[str, Any]) -> frozenset[str]:
    """By the schema itself."""
    said = schema.get("type")
    names = frozenset(each for each in (_list(said) or [said]) if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    of_values = frozenset(_OF_VALUES[type(value)] for value in values if type(value) in _OF_VALUES)
    return _both(names, of_values) or frozenset(kind for name, kind in _OF_KEYWORDS.items() if name in schema)


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """Types of what fits both; a side that says nothing does not count. An integer is a number."""
    if not one or not other:
        return one or other
    common = {kind for kind in one | other if {kind, "number" if kind == "integer" else kind} & one
              and {kind, "number" if kind == "integer" else kind} & other}
    return frozenset(common) or one


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
