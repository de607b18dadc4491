"""Finds the place in a JSON schema that a compiler refuses. Knows neither compiler nor message.

The compiler says what is wrong and not where. So parts are emptied, half of them at a time: where the complaint goes
away lies the cause, and the smallest such part is the place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_Path = tuple[str | int, ...]


def place_of(schema: Any, failure: Callable[[Any], str | None]) -> str:
    """Where in `schema` the failure lies, as a JSON pointer of a URI: #/properties/size. `failure` of a schema that
    can be served is None; it is asked as often as the logarithm of the number of parts, times the depth."""
    reason = failure(schema)
    place: _Path = ()

    def goes_away(keys: Sequence[str | int]) -> bool:
        emptied = schema
        for key in keys:
            emptied = _emptied(emptied, (*place, key))
        return failure(emptied) != reason

    while True:
        keys = _parts(_at(schema, place))
        if not keys or not goes_away(keys):
            return "#" + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in place)
        while len(keys) > 1:
            half = keys[: len(keys) // 2]
            keys = half if goes_away(half) else keys[len(half):]
        place = (*place, *keys)


def _parts(node: Any) -> list[str | int]:
    """The keys of what can be looked into."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [key for key, value in items if isinstance(value, (dict, list)) and value]


def _at(schema: Any, path: _Path) -> Any:
    for key in path:
        schema = schema[key]
    return schema


def _emptied(schema: Any, path: _Path) -> Any:
    """A copy with nothing in the object or list at `path`."""
    if not path:
        return type(schema)()
    copy: Any = dict(schema) if isinstance(schema, dict) else list(schema)
    copy[path[0]] = _emptied(copy[path[0]], path[1:])
    return copy
