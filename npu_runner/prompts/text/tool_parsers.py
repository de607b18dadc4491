"""Parses tool calls in the formats that models write. Knows text and schemas, no tokens or requests.

A package may bring a parser of its own: an entry point "npu_runner.tool_parsers", a subclass of ToolParser.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from npu_runner.checkpoint.files import registered
from npu_runner.errors import ConfigError
from npu_runner.grammars.compile import followed
from npu_runner.prompts.text.tool_grammars import ArgumentTypes, calls_grammar, hermes_call, qwen3_coder_call
from npu_runner.prompts.text.tools import arguments_object
from npu_runner.request.limits import field_error, shown
from npu_runner.request.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)
ENTRY_POINTS = "npu_runner.tool_parsers"
_OPEN = "<tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
# What ends without its closing tag ends with what is around it.
_END_OF_VALUE = re.compile(r"</parameter>|(?=<parameter=|</function>|</tool_call>)|\Z")
_END_OF_FUNCTION = re.compile(r"\s*(?:</function>|(?=</tool_call>)|\Z)")
_END_OF_BLOCK = re.compile(r"\s*(?:</tool_call>|\Z)")
_END_OF_UNREAD = re.compile(r"</tool_call>|(?=<tool_call>)|\Z")
_SPACE = re.compile(r"\s*")
_MOST_DIGITS = 4000  # Python's own limit is 4,300
_HALF_PAIR = re.compile("[\ud800-\udfff]")


class _Number(NamedTuple):
    """A JSON number that Python has no number for, as it is written."""

    text: str


def _float(text: str) -> float | _Number:
    return float(text) if math.isfinite(float(text)) else _Number(text)


def _int(text: str) -> int | _Number:
    return int(text) if len(text) <= _MOST_DIGITS else _Number(text)


# Models write raw line ends and tabs within texts. NaN and Infinity are no JSON: null.
_JSON = json.JSONDecoder(strict=False, parse_float=_float, parse_int=_int, parse_constant=lambda _: None)


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments`: JSON text of an object, as OpenAI has it."""

    name: str
    arguments: str


class ToolParser(ABC):
    """One way to write calls. Without state: `parse` is called for answers of all kinds of requests."""

    @abstractmethod
    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
        """The answer's text without its calls, and the calls in order; `tools`: the request's.

        A call that cannot be read is left in the text. Where the parser raises ValueError, the whole answer is text.
        """

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, is_single: bool) -> str | None:
        """A grammar (llguidance's Lark) for an answer of calls alone: one or more calls of these tools. Arguments fit
        their schemas as `parse` reads them. None: no call can be forced in this format.

        Raises RequestError, with the place, for a schema that it cannot be done for.
        """
        return None

    def reads(self, template: str) -> bool:
        """Whether a chat template of this source prescribes this format; `auto` then selects this parser."""
        return False


class HermesParser(ToolParser):
    """JSON between tags: <tool_call>{"name": ..., "arguments": {...}}</tool_call>; Qwen2.5, Qwen3, Hermes."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
        return _blocks(text, self._read)

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, is_single: bool) -> str:
        return calls_grammar(tools, hermes_call, is_single=is_single)

    def reads(self, template: str) -> bool:
        return _OPEN in template and "<function=" not in template

    def _read(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        call, end = _JSON.raw_decode(text, _skip(_SPACE, text, at))  # a tag within its strings ends nothing
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("a call has no name")
        arguments = arguments_object(call.get("arguments"), _JSON.decode)
        if not isinstance(arguments, dict):
            raise ValueError("a call's arguments are no object")
        return [ToolCall(call["name"], _as_json(arguments))], end


class Qwen3CoderParser(ToolParser):
    """Tags for each argument: <tool_call><function=NAME><parameter=NAME>value</parameter></function></tool_call>;
    Qwen3-Coder, Qwen3.5 and later. Values are text, and become what the tool's schema says."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ToolCall]]:
        return _blocks(text, functools.partial(self._read, tools=tools))

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, is_single: bool) -> str:
        return calls_grammar(tools, qwen3_coder_call, is_single=is_single)

    def reads(self, template: str) -> bool:
        return _OPEN in template and "<function=" in template

    def _read(self, text: str, at: int, tools: Sequence[Mapping[str, Any]]) -> tuple[list[ToolCall], int]:
        calls = []
        while (function := _FUNCTION.match(text, at)) is not None:
            arguments, at = self._arguments(text, function.end(), _types_of(function[1].strip(), tools))
            calls.append(ToolCall(function[1].strip(), _as_json(arguments)))
        if not calls:
            raise ValueError("a call names no function")
        return calls, at

    def _arguments(self, text: str, at: int, types: Mapping[str, frozenset[str]]) -> tuple[dict[str, Any], int]:
        """The arguments that begin at `at`, and the place behind their function."""
        arguments: dict[str, Any] = {}
        while (parameter := _PARAMETER.match(text, at)) is not None:
            name = parameter[1].strip()
            arguments[name], at = _value_at(text, parameter.end(), types.get(name, frozenset()))
        return arguments, _skip(_END_OF_FUNCTION, text, at)


_BUILT_IN: dict[str, type[ToolParser]] = {"hermes": HermesParser, "qwen3_coder": Qwen3CoderParser}


@functools.lru_cache(maxsize=32)
def tool_parser(name: str) -> ToolParser:
    """The parser of that name. Raises ConfigError where there is none, or where a package's does not load."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    points = {point.name: point for point in registered(ENTRY_POINTS)}
    if name not in points:
        known = ", ".join(["auto", "none", *_BUILT_IN, *sorted(points)])
        raise ConfigError(f"tool_call_parser: {name!r} is not one of {known}")
    try:
        parser = points[name].load()()
    except Exception as error:  # the border to another package
        raise ConfigError(f"tool_call_parser {name!r} does not load ({type(error).__name__}: {error})") from error
    if not isinstance(parser, ToolParser):
        raise ConfigError(f"tool_call_parser {name!r}: {points[name].value} is no ToolParser")
    return parser


def find_tool_parser(setting: str, template: str | None) -> str | None:
    """The name of the parser that `setting` means for this template; None: calls stay text, or none is known.

    Raises ConfigError for an unknown name.
    """
    if setting != "auto":
        if setting != "none":
            tool_parser(setting)  # raises where there is none
        return None if setting == "none" else setting
    names = [*_BUILT_IN, *sorted(point.name for point in registered(ENTRY_POINTS))]
    return next((name for name in names if template and tool_parser(name).reads(template)), None)


def forced_calls(name_of_parser: str | None, tools: Sequence[Mapping[str, Any]], *, name: str | None,
                 is_parallel: bool) -> StructuredOutputsParams:
    """The grammar of calls of `tools`; of the one called `name` alone, once. Raises RequestError where none can be."""
    field = "tool_choice"
    wanted = [tool for tool in tools if name in (None, tool["function"]["name"])]
    if not wanted:
        raise field_error(field, f"{name!r} is none of the tools")
    grammar = None
    if name_of_parser is not None:
        grammar = tool_parser(name_of_parser).grammar(wanted, is_single=name is not None or not is_parallel)
    if grammar is None:
        why = "with tool_call_parser none calls are text" if name_of_parser is None else (
            f"the parser {name_of_parser!r} has no grammar of calls")
        raise field_error(field, f"a call cannot be forced: {why}", "unsupported_parameter")
    return followed(grammar, field)


def parse_calls(name: str, text: str, tools: Sequence[Mapping[str, Any]], *,
                is_parallel: bool = True) -> tuple[str, list[ToolCall]]:
    """(content, calls) of an answer. What cannot be read as calls is content, all of it; without `is_parallel` the
    first call alone counts."""
    try:
        content, calls = tool_parser(name).parse(text, tools)
    except (ValueError, RecursionError):  # json's errors are ValueErrors
        return text, []
    except Exception as error:  # noqa: BLE001 - the border to a package's parser; one answer of it may fail
        logger.warning("tool_call_parser %r failed (%s: %s); the answer is text", name, type(error).__name__, error)
        return text, []
    return (content, calls if is_parallel else calls[:1]) if calls else (text, [])


def _blocks(text: str, read: Callable[[str, int], tuple[list[ToolCall], int]]) -> tuple[str, list[ToolCall]]:
    """The text around the tagged blocks, and the calls in them. read(text, place behind an opening tag): the calls of
    that block, and their end. A block that cannot be read is text, up to its closing tag or to the next block."""
    content, calls, at = "", [], 0
    while (start := text.find(_OPEN, at)) >= 0:
        content += text[at:start]
        try:
            found, at = read(text, start + len(_OPEN))
            at = _skip(_END_OF_BLOCK, text, at)
            calls += found
        except (ValueError, RecursionError):  # json's errors are ValueErrors
            end = _END_OF_UNREAD.search(text, start + len(_OPEN))
            assert end is not None, "the text's end is one"
            content, at = content + text[start : end.end()], end.end()
    return content + text[at:], calls


def _skip(what: re.Pattern[str], text: str, at: int) -> int:
    """The place behind `what`. Raises ValueError where something else stands there."""
    match = what.match(text, at)
    if match is None:
        raise ValueError(f"a call holds text outside of its parts: {shown(text[at : at + 40])}")
    return match.end()


def _value_at(text: str, at: int, types: frozenset[str]) -> tuple[Any, int]:
    """A parameter's value, and the place behind its tag. JSON is read as it is: a tag within a string ends nothing."""
    if types and "string" not in types:
        try:
            value, end = _JSON.raw_decode(text, _skip(_SPACE, text, at))
        except (ValueError, RecursionError):
            value, end = None, -1
        match = _END_OF_VALUE.match(text, _skip(_SPACE, text, end)) if end >= 0 else None
        if match is not None:
            return value, match.end()
    match = _END_OF_VALUE.search(text, at)
    assert match is not None, "the text's end is one"
    return _value(_without_line_ends(text[at : match.start()]), types), match.end()


def _types_of(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """JSON types of each parameter of the function, as far as its schema says."""
    function: Mapping[str, Any] = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties")
    if not isinstance(properties, dict):
        return {}
    types = ArgumentTypes(parameters)
    return {key: types.find(schema) for key, schema in properties.items()}


def _value(text: str, types: frozenset[str]) -> Any:
    """Text, but for a parameter whose schema wants something else and whose text is that."""
    if text.strip() == "null" and "null" in types:
        return None
    if not types or "string" in types:
        return text
    spelled = text.strip().lower() if "boolean" in types and text.strip() in ("True", "False") else text
    try:
        return _JSON.decode(spelled)
    except (ValueError, RecursionError):
        return text


def _without_line_ends(text: str) -> str:
    """A value stands on lines of its own."""
    return text.removeprefix("\n").removesuffix("\n")


def _as_json(value: Any) -> str:
    """Half a surrogate pair, which no UTF-8 holds, keeps its escape."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_as_json(key)}: {_as_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_json, value)) + "]"
    if isinstance(value, _Number):
        return value.text
    return _HALF_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False))
