"""A schema in the words that the grammar library keeps exactly. Knows schemas and the library's options, no tokens.

The library admits a declared key a second time if it is spelled with an escape, 29 February in every year, and
a leap second at any time; it reads expressions as Rust does and not as ECMA-262. Here a schema is written so that
none of this is left.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from npu_runner.grammars.rule_size import OutOfBounds
from npu_runner.grammars.schema_bounds import COUNTS, escaped

OPTIONS = "x-guidance"
_DATA = frozenset(("const", "enum", "default", "examples"))
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_NEEDS_ESCAPE = re.compile(r'["\\\x00-\x1f\x7f]')
# A key of this kind has one spelling: an expression of the library's never spells a printable character as \u.
_PLAIN_KEY = r'^[^"\\\x00-\x1f\x7f]*$'
# Every character has one spelling; control characters without a short escape have none.
_SHORT_ESCAPES = 'nrbtf\\"'
_HAS_NO_SHORT_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u00|\x7f")
# Leap seconds beside offsets make an expression long: 2 ms each time.
_MOST_WITH_OFFSETS = 4

_Node = dict[str, Any]
_Change = Callable[[_Node, str], _Node]


def exact_schema(schema: Mapping[str, Any]) -> _Node:
    """The same schema for the library. Some keys and texts have fewer spellings there."""
    has_plain_keys = _place_of_other_keys(schema) is None
    times = _times(has_offsets=_num_times(schema) <= _MOST_WITH_OFFSETS)
    changed: _Node = _mapped(schema, lambda node, _: _exact(node, times, has_plain_keys))
    if not has_plain_keys and isinstance(changed.get(OPTIONS, {}), Mapping):
        changed[OPTIONS] = {**changed.get(OPTIONS, {}), "json_allowed_escapes": _SHORT_ESCAPES}
    return changed


def check_keys(schema: Any) -> None:
    """Raises OutOfBounds for what the library cannot keep: keys that are counted though one may come twice, and, where
    each character has one spelling, a value that has none."""
    _mapped(schema, _check_count)
    place = _place_of_other_keys(schema)
    if place is None:
        return
    if not _knows_escapes():
        raise OutOfBounds(place, "patternProperties, and names with quotes, backslashes or control characters beside "
                                 f"free keys, need llguidance 1.8 or newer; {version('llguidance')} is installed")
    _mapped(schema, _check_values)


def _mapped(node: Any, change: _Change, place: str = "#") -> Any:
    """A copy with each schema in it changed, the innermost first. Unknown keywords may hold schemas, too."""
    if isinstance(node, list):
        return [_mapped(item, change, f"{place}/{number}") for number, item in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    copy: _Node = {}
    for name, value in node.items():
        below = f"{place}/{escaped(name)}"
        if name in _MAPS and isinstance(value, Mapping):
            copy[name] = {key: _mapped(item, change, f"{below}/{escaped(key)}") for key, item in value.items()}
        else:
            copy[name] = value if name in _DATA or name == OPTIONS else _mapped(value, change, below)
    return change(copy, place)


def _named(node: _Node) -> list[str]:
    """The keys that a schema names."""
    properties, required = node.get("properties"), node.get("required")
    return [name for names in (properties, required) if isinstance(names, (Mapping, list)) for name in names
            if isinstance(name, str)]


def _place_of_other_keys(schema: Any) -> str | None:
    """Where a schema says of keys what _PLAIN_KEY cannot; None: nowhere. Newer libraries check declared names against
    patternProperties, too, so free keys with a schema of their own belong here."""
    places: list[str] = []
    escaped_names: list[str] = []
    free_keys: list[str] = []

    def visit(node: _Node, place: str) -> _Node:
        names = _named(node)
        others = node.get("additionalProperties", True)
        if isinstance(node.get("patternProperties"), Mapping) or (
                names and others not in (True, False, {}) and _knows_escapes()):
            places.append(place)
        if any(map(_NEEDS_ESCAPE.search, names)):
            escaped_names.append(place)
        if names and others is not False:
            free_keys.append(place)
        return node

    _mapped(schema, visit)
    return next(iter([*places, *(escaped_names if free_keys else ())]), None)


@functools.cache
def _knows_escapes() -> bool:
    return tuple(map(int, version("llguidance").split(".")[:2])) >= (1, 8)


def _check_count(node: _Node, place: str) -> _Node:
    least, required, kinds = node.get("minProperties"), node.get("required"), node.get("type", "object")
    is_free = node.get("additionalProperties") is not False or bool(node.get("patternProperties"))
    is_object = not isinstance(kinds, (str, list)) or "object" in kinds
    if is_free and is_object and isinstance(least, (int, float)):
        num_required = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
        if least - num_required > 1:
            raise OutOfBounds(f"{place}/minProperties", (
                f"{least} different keys cannot be asked for where keys are free, as one may be written twice; "
                "name them in required, or set additionalProperties to false"))
    return node


def _check_values(node: _Node, place: str) -> _Node:
    for name in ("const", "enum"):
        if name in node and _HAS_NO_SHORT_ESCAPE.search(json.dumps(node[name], ensure_ascii=False)):
            raise OutOfBounds(f"{place}/{name}", "a value with a control character that has no short escape does not "
                                                 "go with patternProperties and other rules of keys")
    return node


def _num_times(schema: Any) -> int:
    found: list[str] = []

    def visit(node: _Node, place: str) -> _Node:
        if node.get("format") in ("time", "date-time"):
            found.append(place)
        return node

    _mapped(schema, visit)
    return len(found)


def _exact(node: _Node, times: Mapping[str, str], has_plain_keys: bool) -> _Node:
    for name in COUNTS:
        if isinstance(node.get(name), float) and node[name].is_integer():
            node[name] = int(node[name])
    if isinstance(node.get("pattern"), str):
        node["pattern"] = as_rust(node["pattern"])
    if isinstance(node.get("patternProperties"), Mapping):
        node["patternProperties"] = {as_rust(name): item for name, item in node["patternProperties"].items()}
    if isinstance(node.get("format"), str) and node["format"] in times:
        expression = times[node.pop("format")]
        if "pattern" not in node:
            node["pattern"] = expression
        else:
            others = node.get("allOf")
            node["allOf"] = [*(others if isinstance(others, list) else ()), {"pattern": expression}]
    if has_plain_keys and _named(node) and node.get("additionalProperties") is not False:
        # Beside each other: the library reads a schema piece by piece, in its order.
        free = node.pop("additionalProperties", True)
        node |= {"patternProperties": {_PLAIN_KEY: free}, "additionalProperties": False}
    return node


# -- expressions -------------------------------------------------------------------------------------------------------

_SPACES = r"\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_PIECES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\.", re.DOTALL)
_IN_CLASS = re.compile(r"\\.|[\[&~]|--", re.DOTALL)
_HAS_FLAGS = re.compile(r"\(\?[a-zA-Z-]+[:)]")
_CLASSES = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}


def as_rust(expression: str) -> str:
    """An expression of ECMA-262 in Rust's syntax: white space, the dot, and what a class holds."""
    dot = "." if _HAS_FLAGS.search(expression) else r"[^\n\r\u2028\u2029]"

    def in_class(found: re.Match[str]) -> str:
        piece = found[0]
        return r"-\-" if piece == "--" else _CLASSES.get(piece, piece if piece[0] == "\\" else "\\" + piece)

    def outside(found: re.Match[str]) -> str:
        piece = found[0]
        if piece[0] == "[":
            return "[" + _IN_CLASS.sub(in_class, piece[1:])
        return dot if piece == "." else _CLASSES.get(piece, piece)

    return _PIECES.sub(outside, expression)


@functools.cache
def _times(has_offsets: bool) -> dict[str, str]:
    """Expressions of RFC 3339 by format. Leap seconds come at the end of June and December, 23:59:60 in UTC; with
    `has_offsets` beside whole and half hours, too."""
    year = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
    leap_year = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
    day = (f"(?:{year}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
           f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{leap_year}-02-29)")
    fraction, hour = r"(?:\.[0-9]+)?", "(?:[01][0-9]|2[0-3])"
    time = f"{hour}:[0-5][0-9]:[0-5][0-9]{fraction}(?:[zZ]|[+-]{hour}:[0-5][0-9])"
    second = f":60{fraction}"
    same_day, next_day = [f"23:59{second}(?:[zZ]|[+-]00:00)"], []
    for hours in range(24) if has_offsets else ():
        same_day += [f"{23 - hours:02}:59{second}-{hours:02}:00", f"{23 - hours:02}:29{second}-{hours:02}:30"]
        next_day += [f"{hours:02}:29{second}\\+{hours:02}:30"]
        next_day += [f"{hours - 1:02}:59{second}\\+{hours:02}:00"] if hours else []
    leaps = [f"{year}-(?:{days})[tT](?:{'|'.join(times)})" for days, times in (
        ("06-30|12-31", same_day), ("07-01|01-01", next_day)) if times]
    return {"date": f"^{day}$", "time": f"^(?:{'|'.join([time, *same_day, *next_day])})$",
            "date-time": f"^(?:{'|'.join([f'{day}[tT]{time}', *leaps])})$"}
