"""Finds the place in a JSON schema that a compiler refuses. Knows neither compiler nor message.

The compiler says what is wrong and not where. So one part after the other is replaced by a schema that asks for
nothing: where the complaint goes away lies the cause, and the smallest such part is the place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

# Each try is a compilation; what is not found by then is named less closely.
_LEAST_TRIES, _MOST_TRIES, _MOST_CHARS = 20, 400, 4_000_000
_Path = tuple[str | int, ...]


def place_of(schema: Any, failure: Callable[[Any], str | None]) -> str:
    """Where in `schema` the failure lies, as a JSON pointer of a URI: #/properties/size. `failure` of a schema that
    can be served is None."""
    reason = failure(schema)
    num_tries, most_tries = 0, max(_LEAST_TRIES, min(_MOST_TRIES, _MOST_CHARS // len(json.dumps(schema))))
    place: _Path = ()
    while True:
        for step in _steps(_at(schema, place)):
            num_tries += 1
            if num_tries > most_tries:
                return _pointer(place)
            if failure(_replaced(schema, (*place, *step))) != reason:
                place = (*place, *step)
                break
        else:
            return _pointer(place)


def _steps(node: Any) -> Iterator[_Path]:
    """The ways to the schemas right below a schema; more than these need not be told apart."""
    for name, value in node.items() if isinstance(node, dict) else ():
        if isinstance(value, dict):
            yield (name,)
        for key, item in value.items() if isinstance(value, dict) else ():
            if isinstance(item, (dict, bool)):
                yield (name, key)
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, dict):
                yield (name, index)


def _at(schema: Any, path: _Path) -> Any:
    for key in path:
        schema = schema[key]
    return schema


def _replaced(schema: Any, path: _Path) -> Any:
    """A copy with a schema that asks for nothing at `path`."""
    if not path:
        return {}
    copy: Any = dict(schema) if isinstance(schema, dict) else list(schema)
    copy[path[0]] = _replaced(copy[path[0]], path[1:])
    return copy


def _pointer(path: _Path) -> str:
    return "#" + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)
