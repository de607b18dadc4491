"""Random rules for answers, most of them legal, many extreme, some broken: what a row might bring. Holds no tests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.oracle.random_schemas import random_schema

Rule = dict[str, Any]
"""Fields of StructuredOutputsParams."""
_NUMBERS: list[Any] = [0, -1, 1, 7, 0.1, -0.05, 0.15, 1e-9, 1e300, 2**31, 2**32, 2**53, 2**53 + 1, 2**63 - 1,
    2**63, -(2**63),
                       2**64, 10**20, -(10**21), 1e20, 99991, 1e-300, 12345678901234567, None, "1", [],
                           True]  # fmt: skip
_COUNTS = [0, 1, 5, 100, 5000, 10**6, 2**31 - 1, 2**31, 2**63, -1, 1.5]
_EXPRESSIONS = ["a+", "(a|b)*c", "[a-z]{3,9}", "\\w+@\\w+\\.com", "(a?){30}a{30}", ".*", "[^\"]*",
    "(?i)straße", "\\p{L}{2,5}",
                "(a|b)*a(a|b){12}", "x{1000}", "((ab){1,50}c?){1,50}", "(?s:.){5}", "^a$",
                    "\\d+(\\.\\d+)?"]  # fmt: skip
_GRAMMARS = [
    'start: "x" (" y" | " z")+ "."',
    'start: expr\nexpr: term (("+" | "-") term)*\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]{1,4}/',
    'start: e\ne: e e | "a" | ""',
    'start: "{" pair ("," pair)* "}"\npair: KEY ":" %json {"type": "integer"}\nKEY: "k" | "l"\n%ignore / /',
    'root ::= "yes" | "no" [a-z]{2}\n',
    'start: w{2,4} [T] "é"i\nw[capture]: "a".."f"\nT: /x/ & ~/y/ | "q" ~ 2..3',
    'start: head body\nhead[suffix="\\n"]: /.{1,9}/\nbody: %lark {\nstart: "in" "ner"\n}',
    'start: a::0x0\na::_: "x" a::set_bit(1) %if bit_clear(1) | "end"',
]
_PIECES = ["(", ")", "|", "&", "~", "*", "+", "?", "{3}", "{1000}", "{0,100000}", '"a"', "/b*/", " start ",
    "\n", "T", ":", "[", "]",
           "%json {}", "<|im_end|>", "_", "\\", "//", "#", "::"]  # fmt: skip


def random_rule(rng: random.Random) -> Rule:
    kinds: list[Callable[[random.Random], Rule]] = [_schema, _schema, _chain, _wide, _grammar, _expression, _choice]
    return rng.choice(kinds)(rng)


def _schema(rng: random.Random) -> Rule:
    schema = json.loads(json.dumps(random_schema(rng)))
    for _ in range(rng.choice((0, 0, 1, 2, 4))):
        _change(schema, rng)
    return {"json": schema}


def _change(schema: Any, rng: random.Random) -> None:
    """A keyword with an extreme value, somewhere."""
    nodes: list[dict[str, Any]] = []
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            nodes.append(node)
        waiting += node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    rng.choice(nodes).update([rng.choice([
        (rng.choice(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
            rng.choice(_NUMBERS)),
        (rng.choice(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")),
         rng.choice(_COUNTS)),
        ("pattern", rng.choice(_EXPRESSIONS)), ("format", rng.choice(("date", "email", "uri", "none", "ipv6"))),
        ("const", rng.choice(_NUMBERS)), ("enum", rng.sample(_NUMBERS, 3)), ("$ref", rng.choice(("#", "#/a",
            "#/$defs/a"))),
        ("type", rng.choice(("integer", "string", ["number", "null"], "strin", 5, "object", "array"))),
        ("allOf", [{"pattern": expression} for expression in rng.sample(_EXPRESSIONS, rng.randint(1, 9))]),
        ("anyOf", [random_schema(rng) for _ in range(3)]), ("oneOf", [{"type": "integer"}, {"type": "string"}]),
        ("patternProperties", {rng.choice(_EXPRESSIONS): {"type": "integer"}}), ("not", {}), ("required", ["zzz"]),
        ("additionalProperties", rng.choice((True, False, {"type": "null"}))), ("$defs", {"a": {"type": "null"}}),
    ])])  # fmt: skip


def _chain(rng: random.Random) -> Rule:
    count = rng.choice((3, 40, 300, 500, 510, 600, 1040, 2494, 3500))
    wraps: list[Callable[[Any], Any]] = [
        lambda one: one, lambda one: {"type": "array", "items": one, "maxItems": 1},
            lambda one: {"anyOf": [{"type": "null"}, one]},
        lambda one: {"allOf": [one]}, lambda one: {"oneOf": [one]}, lambda one: {"type": "array",
            "prefixItems": [one], "maxItems": 1},
        lambda one: {"type": "object", "properties": {"a": one}, "additionalProperties": False},
        lambda one: {"type": "object", "additionalProperties": one, "maxProperties": 1},
    ]  # fmt: skip
    if rng.random() < 0.5:
        wrap = rng.choice(wraps)
        links = {f"d{number}": wrap({"$ref": f"#/$defs/d{number + 1}"}) for number in range(count)}
        end = rng.choice(({"type": "boolean"}, {"$ref": "#/$defs/d0"}, {"type": "integer", "maximum": 10**30}))
        return {"json": {"$defs": {**links, f"d{count}": end}, "$ref": "#/$defs/d0"}}
    name = rng.choice("rT")
    body = rng.choice(("{}", '"a" {}', "({} /b/)?", '"b" | {}', "(((((({}))))))", "~{}", "{} & /[a-z]+/", "({} /c/)*"))
    lines = [f"{name}{number}: {body.replace('{}', f'{name}{number + 1}')}" for number in range(count)]
    return {"grammar": "\n".join([f"start: {name}0", *lines, f'{name}{count}: "a"'])}


def _wide(rng: random.Random) -> Rule:
    count = rng.choice((10, 300, 1000, 2000, 4000, 5000))
    names = [f"n{number}" for number in range(count)]
    closed: Rule = {"type": "object", "additionalProperties": False}
    return rng.choice([
        {"json": {**closed, "properties": {name: {"type": "boolean"} for name in names}}},
        {"json": {**closed, "properties": {name: {"type": "null"} for name in names}, "required": names}},
        {"json": {"enum": names}}, {"json": {"enum": [[number] for number in range(count)]}},
        {"json": {"type": "array", "items": {"anyOf": [{**closed, "properties": {name: {"type": "null"},
            "k": {}}} for name in names]}}},
        {"json": {"oneOf": [{"const": name} for name in names]}},
        {"json": {"$defs": {name: {"const": name} for name in names},
            "anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}},
        {"grammar": "start: " + " | ".join(f'"{name}" r' for name in names) + '\nr: "x"'},
        {"grammar": "start: " + " ".join(f'"{name}"' for name in names)}, {"choice": names},
        {"json": {"const": "x" * count * 10}}, {"regex": "|".join(names)},
    ])  # fmt: skip


def _grammar(rng: random.Random) -> Rule:
    return {"grammar": _changed(rng.choice(_GRAMMARS), rng, _PIECES)}


def _expression(rng: random.Random) -> Rule:
    parts = rng.sample(_EXPRESSIONS, rng.randint(1, 4))
    return {"regex": _changed(rng.choice(("", "|")).join(parts), rng, ["(", ")", "{2,}", "*", "?", "[", "]",
        "\\b", "(?=", "{9999}"])}


def _changed(text: str, rng: random.Random, pieces: list[str]) -> str:
    for _ in range(rng.choice((0, 0, 1, 2, 5))):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        text = rng.choice((text[:at] + text[end:], text[:end] + text[at:end] * 3 + text[end:],
                           text[:at] + rng.choice(pieces) + text[at:])) or "a"  # fmt: skip
    return text[:20_000]


def _choice(rng: random.Random) -> Rule:
    texts = ["circle", "<|im_end|>", "größe", '"quoted"', "a\nb", "\x7f", "\ud800", "日本", "x" * 5000]
    return {"choice": rng.sample(texts, rng.randint(1, 4))}
