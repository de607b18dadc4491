"""Tools and tool calls of a conversation, checked: what a chat template may see of them. Knows no tokens or templates.

A call's arguments are JSON text in OpenAI's messages and an object for templates, as in vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npu_runner.request.limits import LIMITS, check_count, field_error, plain_json, shown, wrong_type

_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,64}")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


def parse_tools(tools: Any, *, is_call_forced: bool = False) -> list[dict[str, Any]]:
    """A checked copy of `tools`, as the template sees it. Raises RequestError naming the field.

    `is_call_forced`: the answer is calls, by a grammar of their schemas. `strict` is accepted then, and only then.
    """
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise wrong_type("tools", "a list", tools)
    check_count("tools", "tools", tools, LIMITS.max_tools)
    plain = plain_json("tools", list(tools), max_nesting=LIMITS.max_tools_nesting, max_chars=LIMITS.max_tools_chars)
    names = [_checked_tool(tool, f"tools[{index}]", is_call_forced) for index, tool in enumerate(plain)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise field_error("tools", f"the function {twice!r} is there twice")
    return list(plain)


def parse_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message, arguments as objects. Raises RequestError naming the field."""
    if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
        raise wrong_type(where, "a list", calls)
    check_count(where, "calls", calls, LIMITS.max_tools)
    return [_checked_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def arguments_object(given: Any, loads: Callable[[str], Any]) -> Any:
    """A call's arguments, which may be JSON text; null and the empty text are {}. Raises the errors of `loads`,
    ValueError or RecursionError. The caller refuses values that are no object."""
    value = (loads(given) if given.strip() else None) if isinstance(given, str) else given
    return {} if value is None else value


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Plain JSON with every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    return [map_strings(item, change) for item in value] if isinstance(value, list) else value


def strings_in(value: Any) -> list[str]:
    """Every string in plain JSON, keys too."""
    if isinstance(value, str):
        return [value]
    items = [*value, *value.values()] if isinstance(value, Mapping) else value if isinstance(value, list) else []
    return [text for item in items for text in strings_in(item)]


def _checked_tool(tool: Any, where: str, is_call_forced: bool) -> str:
    function = _function_of(tool, where, ("type", "function"))
    for name in function.keys() - set(_FUNCTION_FIELDS):
        raise field_error(f"{where}.function.{name[:60]}", "unknown field", "unknown_parameter")
    _check_strict(function.get("strict"), f"{where}.function.strict", is_call_forced)
    if not isinstance(function.get("description", ""), (str, type(None))):
        raise wrong_type(f"{where}.function.description", "text", function["description"])
    if not isinstance(function.get("parameters", {}), (dict, type(None))):
        raise wrong_type(f"{where}.function.parameters", "a JSON schema, an object,", function["parameters"])
    return _name_of(function, where)


def _check_strict(strict: Any, field: str, is_call_forced: bool) -> None:
    if not isinstance(strict, (bool, type(None))):
        raise wrong_type(field, "true, false or null", strict)
    if strict and not is_call_forced:
        raise field_error(field, "true is accepted where a row forces the call (tool_choice required, or a function's "
                          "name): then arguments always fit. Elsewhere they are what the model writes: force the call, "
                          "or set it to false", "unsupported_parameter")


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    function = _function_of(call, where, ("id", "type", "function", "index"))
    for name in function.keys() - {"name", "arguments"}:
        raise field_error(f"{where}.function.{str(name)[:60]}", "unknown field", "unknown_parameter")
    checked = {"type": "function", "function": {
        "name": _name_of(function, where),
        "arguments": _arguments(function.get("arguments"), f"{where}.function.arguments"),
    }}
    if call.get("id") is None:
        return checked
    if not isinstance(call["id"], str):
        raise wrong_type(f"{where}.id", "text", call["id"])
    return {"id": call["id"], **checked}


def _arguments(given: Any, where: str) -> dict[str, Any]:
    try:
        arguments = arguments_object(given, json.loads)
    except (ValueError, RecursionError) as error:
        raise field_error(where, f"not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise wrong_type(where, "an object, or one as JSON text,", given)
    plain: dict[str, Any] = plain_json(
        where, arguments, max_nesting=LIMITS.max_tools_nesting, max_chars=LIMITS.max_tools_chars)
    return plain


def _function_of(value: Any, where: str, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong_type(where, "an object", value)
    for name in value.keys() - set(known):
        raise field_error(f"{where}.{str(name)[:60]}", "unknown field", "unknown_parameter")
    if value.get("type", "function") != "function":
        raise field_error(f"{where}.type", f"{shown(value['type'])} is not supported; function is", "unsupported_value")
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise wrong_type(f"{where}.function", "an object", function)
    return function


def _name_of(function: Mapping[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        field = f"{where}.function.name"
        raise field_error(field, f"{shown(name)} is no name; 1 to 64 letters, digits, dashes, dots and underscores are")
    return name
