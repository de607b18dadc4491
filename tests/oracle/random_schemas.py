"""Random JSON schemas whose values are short, so that a random model comes to their end. Holds no tests."""

from __future__ import annotations

import random
from typing import Any

_PATTERNS = ("^[a-f]{1,4}$", "^(red|green|blue)-[0-9]{2}$", "^[A-Z][a-z]*[0-9]$", "^\\d{3}$", "[xyz]{2}")
_FORMATS = ("date", "time", "uuid", "ipv4")
_WORDS = ("a", "red", "x y", "größe", "ключ", "", "q\"uote", "new\nline", "back\\slash", "日本", "0", "true")


def random_schema(rng: random.Random) -> dict[str, Any]:
    """Objects more often than not, with definitions now and then, which may be recursive."""
    schema = _object(rng, 3) if rng.random() < 0.7 else _schema(rng, 3)
    if rng.random() < 0.15:
        list_of = {"type": "object", "properties": {"value": _scalar(rng), "next": {
            "anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}, "required": ["value", "next"],
            "additionalProperties": False}  # fmt: skip
        schema = {"$defs": {"node": list_of}, "type": "object", "required": ["first", "rest"],
                  "properties": {"first": {"$ref": "#/$defs/node"}, "rest": {key: value for key, value in schema.items()
                                                                             if key != "$defs"}},
                  "additionalProperties": False}  # fmt: skip
    return schema


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0 or rng.random() < 0.5:
        return _scalar(rng)
    kind = rng.choice(("object", "array", "tuple", "anyOf", "allOf", "map"))
    if kind == "object":
        return _object(rng, depth - 1)
    if kind == "array":
        least = rng.randint(0, 2)
        return {"type": "array", "items": _schema(rng, depth - 1), "minItems": least,
                "maxItems": least + rng.randint(0, 2)}  # fmt: skip
    if kind == "tuple":
        items = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "map":
        return {"type": "object", "additionalProperties": _scalar(rng), "maxProperties": 2}
    if kind == "anyOf":
        return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": rng.randint(3, 400)}]}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _schema(rng, depth) for name in names},
                              "required": [name for name in names if rng.random() < 0.6]}  # fmt: skip
    if rng.random() < 0.9:
        schema["additionalProperties"] = False
    return schema


def _scalar(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    most = rng.randint(0, 8)
    return rng.choice([
        {"type": "string", "maxLength": most},
        {"type": "string", "minLength": min(2, most), "maxLength": most},
        {"type": "string", "pattern": rng.choice(_PATTERNS), **({"maxLength": 8} if rng.random() < 0.5 else {})},
        {"type": "string", "format": rng.choice(_FORMATS)},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
        {"type": "integer", "exclusiveMinimum": 0, "multipleOf": rng.choice((2, 3, 7)), "maximum": 500},
        {"type": "number", "minimum": 0, "maximum": 9.5},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["boolean", "null"]},
        {"enum": rng.sample([*_WORDS, 1, 2.5, None, True, [1, "a"], {"k": 0}], rng.randint(1, 5))},
        {"const": rng.choice([*_WORDS, -3, False, None])},
    ])
