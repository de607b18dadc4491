"""Finds the place in a JSON schema that a compiler refuses. Knows neither compiler nor message.

The compiler says what is wrong and not where. So parts are emptied, half of them at a time: where the complaint goes
away lies the cause, and the smallest such part is the place. A branch is not emptied but closed: one that admits
everything would make a complaint about any other go away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

_Path = tuple[str | int, ...]
_MOST_ASKED = 100
_MOST_SECONDS = 0.5
_OF_BRANCHES = ("anyOf", "oneOf")


def place_of(schema: Any, reason: str, failure: Callable[[Any], str | None],
             spent: Callable[[], float] = time.thread_time) -> str:  # fmt: skip
    """Where in `schema` the failure lies, as a JSON pointer of a URI: #/properties/size. `failure` of the whole is
    `reason`, of one that can be served None; it is asked as often as the logarithm of the number of parts, times the
    depth. What was found by the hundredth time, or when half a second of the processor was `spent`, is the answer."""
    place: _Path = ()
    num_asked, began = 0, spent()

    def is_enough() -> bool:
        return num_asked >= _MOST_ASKED or spent() - began > _MOST_SECONDS

    def goes_away(keys: Sequence[str | int]) -> bool:
        nonlocal num_asked
        num_asked += 1
        emptied = schema
        for key in keys:
            emptied = _emptied(emptied, (*place, key))
        return failure(emptied) != reason

    while True:
        keys = _parts(_at(schema, place))
        if not keys or is_enough() or not goes_away(keys):
            return "#" + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in place)
        while len(keys) > 1 and not is_enough():
            half = keys[: len(keys) // 2]
            keys = half if goes_away(half) else keys[len(half):]
        if len(keys) == 1:
            place = (*place, *keys)


def _parts(node: Any) -> list[str | int]:
    """The keys of what can be looked into."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [key for key, value in items if isinstance(value, (dict, list)) and value]


def _at(schema: Any, path: _Path) -> Any:
    for key in path:
        schema = schema[key]
    return schema


def _emptied(schema: Any, path: _Path, name: str | int | None = None) -> Any:
    """A copy with nothing in the object or list at `path`, or with no way into it if it is a branch of `name`."""
    if not path:
        return False if name in _OF_BRANCHES and isinstance(schema, dict) else type(schema)()
    copy: Any = dict(schema) if isinstance(schema, dict) else list(schema)
    copy[path[0]] = _emptied(copy[path[0]], path[1:], name if isinstance(schema, list) else path[0])
    return copy
