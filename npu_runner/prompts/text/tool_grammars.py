"""Grammars of forced tool calls, in the ways that models write them. Knows schemas and Lark, no tokens or requests.

A grammar admits what the parser of the same format reads back as calls whose arguments fit their schemas, and nothing
else. Where a format cannot promise that for a schema, the request is refused with the place.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from npu_runner.errors import RequestError
from npu_runner.grammars.compile import with_grammar
from npu_runner.request.limits import field_error
from npu_runner.request.structured_outputs import StructuredOutputsParams

Tools = Sequence[Mapping[str, Any]]
_WHITE_SPACE = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,40}"}}
# What a schema of arguments may say beside its properties: each property is written and checked by itself.
_OF_OBJECTS = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema",
                         "$id", "title", "description", "default", "examples"))
# What a text may say, where it stands between tags as it is.
_OF_TEXTS = frozenset(("type", "enum", "const", "title", "description", "default", "examples", "nullable"))
_TAGS = ("</parameter>", "<parameter=", "</function>", "<function=", "</tool_call>", "<tool_call>")

_MOST_STEPS = 64
"""References and branches that lead further say nothing, nor do cycles."""
_OF_VALUES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array",
              dict: "object"}
_OF_KEYWORDS = {"properties": "object", "additionalProperties": "object", "patternProperties": "object",
                "required": "object", "items": "array", "prefixItems": "array"}


def calls_grammar(tools: Tools, call: Callable[[Mapping[str, Any], str, str], str], *, is_single: bool) -> str:
    """One call or, unless `is_single`, one behind the other, each on lines of its own. Lark.

    call(function, rule, where): the rules of one function's call, the first of which is `rule`; `where` names the
    schema of its arguments. Raises RequestError for a schema that cannot be served.
    """
    rules = [f"call_{number}" for number in range(len(tools))]
    lines = ["start: call" if is_single else 'start: call ("\\n" call)*', "call: " + " | ".join(rules)]
    for tool, rule in zip(tools, rules, strict=True):
        function = tool["function"]
        where = f"tools.{function['name']}.parameters"
        # The whole schema first: what is wrong with it has a place in it.
        with_grammar(StructuredOutputsParams(json=arguments_schema(function, where), origin=where))
        lines.append(call(function, rule, where))
    return "\n".join(lines) + "\n"


def arguments_schema(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object. Raises RequestError where it says something else."""
    schema = dict(function.get("parameters") or {})
    if schema.setdefault("type", "object") != "object":
        raise RequestError(f"{where}: arguments are an object, and the schema's type is {schema['type']!r}",
                           "invalid_value", "tools")
    return schema


def hermes_call(function: Mapping[str, Any], rule: str, where: str) -> str:
    head = f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": '
    schema = arguments_schema(function, where)
    return f"{rule}: {_text(head)} {rule}_arguments {_text('}' + chr(10) + '</tool_call>')}\n" \
           f"{rule}_arguments: %json {json.dumps({**schema, **_WHITE_SPACE})}"


def qwen3_coder_call(function: Mapping[str, Any], rule: str, where: str) -> str:
    """A tag for each argument, in the order of the schema; what need not be there may be left out."""
    schema = arguments_schema(function, where)
    _refuse_others(schema, _OF_OBJECTS, where)
    properties = schema.get("properties") or {}
    required = set(schema.get("required") or ())
    if missing := sorted(required - properties.keys()):
        raise _unserved(f"{where}#/required", f"{missing[0]!r} is none of the properties")
    head = _text(f"<tool_call>\n<function={function['name']}>\n")
    parts, rules = [head], []
    for number, (name, value) in enumerate(properties.items()):
        part = f"{rule}_{number}"
        parts.append(part if name in required else f"{part}?")
        place = f"{where}#/properties/{name}"
        if any(character in name for character in ">\n<"):
            raise _unserved(place, "a name with these characters cannot stand in a tag")
        rules += [f"{part}: {_text(f'<parameter={name}>{chr(10)}')} {part}_value",
                  *_value_rules(f"{part}_value", value, schema, place)]
    parts.append(_text("</function>\n</tool_call>"))
    return "\n".join([f"{rule}: {' '.join(parts)}", *rules])


def _value_rules(rule: str, schema: Any, root: Mapping[str, Any], place: str) -> Iterator[str]:
    """A value and the end of its tag."""
    end = "\n</parameter>\n"
    types = ArgumentTypes(root)  # as the parser of calls sees them
    kinds = types.find(schema)
    if "string" in kinds or not kinds:
        # What is written is text then, whatever else it might be.
        yield from _text_rules(rule, _text_branch(schema, types, place), end, place)
        return
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    whole = {**schema, **definitions, **_WHITE_SPACE} if isinstance(schema, dict) else schema
    yield f"{rule}: {rule}_json {_text(end)}"
    yield f"{rule}_json: %json {json.dumps(whole)}"


def _text_rules(rule: str, schema: Any, end: str, place: str) -> Iterator[str]:
    """Text as it is, or one of those that the schema names."""
    given = schema if isinstance(schema, dict) else {}
    _refuse_others(given, _OF_TEXTS, place)
    values = [given["const"]] if "const" in given else given.get("enum")
    if values is None:
        # `suffix` ends the text where its tag ends it; another tag in it would end it elsewhere for who reads it.
        tags = "|".join(tag.replace("/", "\\/") for tag in _TAGS)
        yield f"{rule}[suffix={_text(end)}]: {rule.upper()}_TEXT"
        yield f"{rule.upper()}_TEXT: /(?s:.*)/ & ~/(?s:.*)({tags})(?s:.*)/"
        return
    texts = [value for value in values if isinstance(value, str) and not any(tag in value for tag in _TAGS)]
    if len(texts) < len(values) or not texts:
        raise _unserved(place, "one of the values cannot be written as text between tags")
    yield f"{rule}: ({' | '.join(map(_text, texts))}) {_text(end)}"


def _text_branch(schema: Any, types: ArgumentTypes, place: str) -> Mapping[str, Any]:
    """The part of a schema that constrains texts."""
    for _ in range(_MOST_STEPS):
        if not isinstance(schema, dict):
            return {}
        others = list(schema.get("allOf") or ())
        if isinstance(schema.get("$ref"), str):
            others.append(types.target(schema["$ref"]))
        branches = [item for name in ("anyOf", "oneOf") for item in schema.get(name) or ()
                    if "string" in types.find(item)]
        if not others and not branches:
            return schema
        if len(others) + len(branches) > 1 or schema.keys() & {"enum", "const", "type"}:
            break
        (schema,) = others or branches
    raise _unserved(place, "it says in two places what a text may be")


def _refuse_others(schema: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    other = next((name for name in schema if name not in known), None)
    if other is not None:
        raise _unserved(f"{where}/{other}" if "#" in where else f"{where}#/{other}",
                        "the way in which this model writes calls leaves no room for it")


def _unserved(place: str, why: str) -> RequestError:
    return field_error("tool_choice", f"a call cannot be forced, for {place}: {why}", "unsupported_parameter")


def _text(text: str) -> str:
    """As Lark writes it."""
    return json.dumps(text)


class ArgumentTypes:
    """The JSON types of the schemas within one schema, whose references they may have."""

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._known: dict[str, frozenset[str]] = {}

    def find(self, schema: Any, num_steps: int = 0) -> frozenset[str]:
        """Names of JSON types; empty where the schema does not say. A branch of anyOf adds its own to the others."""
        if not isinstance(schema, Mapping) or num_steps > _MOST_STEPS:
            return frozenset()
        said = [_stated(schema), *(self.find(each, num_steps + 1) for each in _list(schema.get("allOf")))]
        for name in ("anyOf", "oneOf"):
            branches = (self.find(each, num_steps + 1) for each in _list(schema.get(name)))
            said.append(frozenset[str]().union(*branches))
        if isinstance(schema.get("$ref"), str):
            said.append(self._of_reference(schema["$ref"], num_steps + 1))
        return functools.reduce(_both, said)

    def target(self, reference: str) -> Any:
        """The target of a reference within the schema; None if there is none, or if it lies elsewhere."""
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
            self._known[reference] = self.find(self.target(reference), num_steps)
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
