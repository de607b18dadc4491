"""Makes command-line options of dataclass fields, with the string under each field as its help text.

So an option, its default and its explanation are written once. Knows nothing of what the options mean.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from npu_runner.request.limits import shown

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def add_options(parser: argparse._ActionsContainer, settings: type, *, without: Collection[str] = ()) -> None:
    """An option per field of the dataclass `settings`. What is not given is not in the parsed result at all."""
    kinds, texts = typing.get_type_hints(settings), field_docstrings(settings)
    for field in dataclasses.fields(settings):
        if field.name not in without:
            _add_option(parser, field, kinds[field.name], texts.get(field.name, ""))


def given(arguments: argparse.Namespace, settings: type) -> dict[str, Any]:
    """The fields of `settings` that the command line named."""
    names = {field.name for field in dataclasses.fields(settings)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def field_docstrings(settings: type) -> dict[str, str]:
    """The string literal that stands under each field in the class's source."""
    definition = ast.parse(inspect.getsource(settings)).body[0]
    assert isinstance(definition, ast.ClassDef), f"{settings} is not a class statement"
    texts: dict[str, str] = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


def _add_option(parser: argparse._ActionsContainer, field: dataclasses.Field[Any], kind: Any, text: str) -> None:
    flag = "--" + field.name.replace("_", "-")
    kind = _without_none(kind)
    is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    default = "" if is_needed or field.default is None else f"default: {_show(field.name, field.default)}"
    text = text.replace("None:", "default:")  # what is not given is None
    explanation = f"{text.rstrip('.')} ({default})" if text and default else text or default
    options: dict[str, Any] = {"help": explanation.replace("%", "%%"), "default": argparse.SUPPRESS}
    if kind is bool:
        action = "store_true" if field.default is False else argparse.BooleanOptionalAction
        parser.add_argument(flag, action=action, **options)
        return
    options["required"] = is_needed
    if typing.get_origin(kind) is tuple:
        parser.add_argument(flag, type=_integers, metavar="N,N,...", **options)
    elif typing.get_origin(kind) is Mapping:
        parser.add_argument(flag, type=_json_object, metavar="JSON", **options)
    elif kind is int and field.name.endswith("_bytes"):
        parser.add_argument(flag, type=_size, metavar="SIZE", **options)
    elif kind == int | str:
        parser.add_argument(flag, type=_number_or_word, metavar="N|auto", **options)
    else:
        if "alone" in field.metadata:  # what the option stands for without a value
            options |= {"nargs": "?", "const": field.metadata["alone"]}
        metavar = {int: "N", float: "X", str: "TEXT", Path: "PATH"}[kind]
        parser.add_argument(flag, type=kind, metavar=metavar, **options)


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kinds = [item for item in typing.get_args(kind) if item is not type(None)]
        return kinds[0] if len(kinds) == 1 else kind
    return kind


def _number_or_word(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


def _show(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if name.endswith("_bytes"):
        for suffix in ("g", "m", "k"):
            if value and value % _SIZES[suffix] == 0:
                return f"{value // _SIZES[suffix]}{suffix.upper()}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size(text: str) -> int:
    """A number of bytes; K, M, G and T (also KiB, KB, ...) multiply by powers of 1024."""
    match = re.fullmatch(r"(\d+)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 1073741824, 1024M or 1G")
    return int(match[1]) * _SIZES[match[2]]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{shown(text)} is not a JSON object like {{"enable_thinking": false}}')
    return value


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers like 1,2,4") from None
