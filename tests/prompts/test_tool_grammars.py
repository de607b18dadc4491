"""Forced calls: whatever a grammar lets through, its parser reads as calls, and jsonschema finds that they fit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from npu_runner.errors import RequestError
from npu_runner.prompts.text.tool_parsers import forced_calls, parse_calls
from tests.oracle.random_schemas import random_schema

EOS = "<|im_end|>"


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXTS = {"type": "object", "properties": {
    "text": {"type": "string", "description": "as long as you like"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "colour": {"enum": ["red", "dark blue"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99},
    "tags": {"type": "array", "maxItems": 2, "items": {
        "type": "string", "pattern": "^(<\\/?tool_call>|<\\/parameter>|a)$"}},
    "on": {"type": "boolean"}, "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]}, "any": {},
    "shade": {"$ref": "#/$defs/shade", "description": "an enum of pydantic's"}, "level": {"enum": [1, 2]},
    "points": {"items": {"$ref": "#/$defs/x"}, "maxItems": 2, "type": "array"},
    "flag": {"allOf": [{"$ref": "#/$defs/x"}]},
    "ref": {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "required": ["x"],
            "additionalProperties": False},
}, "required": ["text", "size", "tags"], "$defs": {
    "x": {"type": ["boolean", "null"]}, "shade": {"enum": ["light", "dark"], "type": "string"}}}  # fmt: skip


class Walker:
    """Says what a grammar allows, token by token, with no model to choose."""

    def __init__(self, path: Path):
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.eos = tokenizer.token_to_id(EOS)
        self.tokens = LLTokenizer(tokenizer.to_str(), eos_token=self.eos)
        self.end_of_text = self.tokens.tokenize_str("\n</parameter>\n")

    def walk(self, grammar: str, rng: random.Random) -> str:
        from llguidance import LLMatcher

        matcher = LLMatcher(self.tokens, grammar)
        said: list[int] = []
        while len(said) < 2000:
            if rng.random() < 0.2 and matcher.validate_tokens(self.end_of_text) == len(self.end_of_text):
                said += self.end_of_text  # by chance alone a free text hardly ends
                matcher.consume_tokens(self.end_of_text)
                continue
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            assert not matcher.is_error(), matcher.get_error()
            token = self.eos if self.eos in allowed and rng.random() < 0.5 else rng.choice(allowed)
            if token == self.eos:
                return str(self.tokens.decode_str(said))
            matcher.consume_token(token)
            said.append(token)
        raise AssertionError(f"no end: {self.tokens.decode_str(said)[:500]!r}")


@pytest.fixture(scope="module")
def walker(checkpoint: Callable[..., Path]) -> Walker:
    return Walker(checkpoint("qwen3"))


def check(walker: Walker, parser: str, tools: list[dict[str, Any]], rng: random.Random, **asked: Any) -> list[str]:
    grammar = forced_calls(parser, tools, **{"name": None, "is_parallel": True, **asked})
    text = walker.walk(grammar.compiled, rng)
    content, calls = parse_calls(parser, text, tools)
    assert calls, text
    assert content.strip() == ""
    schemas = {item["function"]["name"]: item["function"].get("parameters") or {} for item in tools}
    for call in calls:
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        jsonschema.Draft202012Validator(schemas[call.name]).validate(arguments)
    return [call.name for call in calls]


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
def test_arguments_always_fit_their_schema(walker: Walker, parser: str) -> None:
    rng = random.Random(1)
    tools = [tool("texts", TEXTS), {"type": "function", "function": {"name": "nothing"}},
             tool("none", {"type": "object", "properties": {}, "additionalProperties": False})]  # fmt: skip
    if parser == "hermes":
        del tools[1:2]  # any object at all: by chance its strings hardly end
        tools[0]["function"]["parameters"] = {**TEXTS, "properties": {
            **TEXTS["properties"], "any": {"type": "boolean"}, "text": {"type": "string", "maxLength": 9},
            "maybe": {"type": ["boolean", "null"]}, "either": {"type": "integer", "maximum": 9, "minimum": 0}},
            "additionalProperties": False}  # fmt: skip
    names = [check(walker, parser, tools, rng) for _ in range(60)]
    assert {name for said in names for name in said} == {item["function"]["name"] for item in tools}
    assert max(map(len, names)) > 1


def test_arguments_of_random_schemas_fit(walker: Walker) -> None:
    rng = random.Random(2)
    for number in range(60):
        schema = random_schema(rng)
        text = json.dumps(schema)  # names that are free hardly end
        is_closed = text.count('"properties"') == text.count('"additionalProperties": false')
        if schema.get("type") == "object" and is_closed and "maxProperties" not in text:
            check(walker, "hermes", [tool(f"f{number}", schema)], rng)


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
def test_a_named_tool_is_called_once_and_without_parallel_calls_one_is(walker: Walker, parser: str) -> None:
    rng = random.Random(3)
    closed = {"type": "object", "properties": {"on": {"type": "boolean"}}, "additionalProperties": False}
    tools = [tool("a", closed), tool("b", closed)]
    assert {tuple(check(walker, parser, tools, rng, name="b")) for _ in range(10)} == {("b",)}
    assert {tuple(check(walker, parser, tools, rng, is_parallel=False)) for _ in range(20)} == {("a",), ("b",)}


REFUSED: list[tuple[str, Any, str]] = [
    ("hermes", {"properties": {"a": {"not": {}}}}, "tools.f.parameters: the schema cannot be served at #/properties/a"),
    ("hermes", {"type": "array"}, "arguments are an object"),
    ("qwen3_coder", {"minProperties": 1}, "tools.f.parameters#/minProperties"),
    ("qwen3_coder", {"properties": {"a": {"type": "string", "maxLength": 3}}}, "#/properties/a/maxLength"),
    ("qwen3_coder", {"properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": {"type": "string", "maxLength": 3}}},
     "#/properties/a/maxLength"),
    ("qwen3_coder", {"properties": {"a": {"$ref": "#/$defs/t", "type": "string"}}, "$defs": {"t": {"enum": ["x"]}}},
     "it says in two places what a text may be"),
    ("qwen3_coder", {"properties": {"a>": {}}}, "cannot stand in a tag"),
    ("qwen3_coder", {"properties": {"a": {"enum": [1, "x"]}}}, "cannot be written as text between tags"),
    ("qwen3_coder", {"required": ["a"]}, "'a' is none of the properties"),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "parameters", "what"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_promised_is_refused_with_the_place(parser: str, parameters: Any, what: str) -> None:
    with pytest.raises(RequestError) as refusal:
        forced_calls(parser, [tool("f", parameters)], name=None, is_parallel=True)
    assert what in refusal.value.message
    with pytest.raises(RequestError, match="with tool_call_parser none calls are text"):
        forced_calls(None, [tool("f", {})], name=None, is_parallel=True)
    with pytest.raises(RequestError, match="'g' is none of the tools"):
        forced_calls(parser, [tool("f", {})], name="g", is_parallel=True)


@pytest.mark.parametrize(("parser", "text", "arguments"), [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>', {"a": "</tool_call>"}),
    ("qwen3_coder", '<tool_call>\n<function=f>\n<parameter=l>\n["</parameter>", "</tool_call>"]\n</parameter>\n'
     "</function>\n</tool_call>", {"l": ["</parameter>", "</tool_call>"]}),
])  # fmt: skip
def test_a_tag_within_a_string_of_json_ends_nothing(parser: str, text: str, arguments: Any) -> None:
    tools = [tool("f", {"properties": {"l": {"type": "array"}}})]
    (call,) = parse_calls(parser, text, tools)[1]
    assert json.loads(call.arguments) == arguments
