"""Makes command-line options of settings: their dataclass fields, with the string under each as its help text.

So an option, its default, its choices and its explanation are written once; scripts/options_page.py makes
docs/options.md of them too. Knows nothing of what the options mean.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_runner import config
from npu_runner.assets import SHAPES_VL
from npu_runner.config import RunnerConfig, flat_fields, from_keywords, part_of
from npu_runner.request.limits import shown

_SIZES = {"g": 1 << 30, "m": 1 << 20, "k": 1 << 10}
_VALUES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class Option:
    """A setting as users see it."""

    field: dataclasses.Field[Any]
    kind: Any
    """Its type without None."""
    text: str
    """The docstring under the field."""

    @property
    def flag(self) -> str:
        return "--" + self.field.name.replace("_", "-")

    @property
    def is_needed(self) -> bool:
        return self.field.default is dataclasses.MISSING

    @property
    def default(self) -> str:
        """Empty where `text` names the default."""
        return "" if self.is_needed or self.field.default in (None, ()) else _show(self.field.name, self.field.default)

    @property
    def choices(self) -> tuple[str, ...]:
        """Empty where the values are not one of a few words."""
        found: tuple[str, ...] = self.field.metadata.get("choices", ())
        return found

    @property
    def values(self) -> str:
        """The values that may stand behind the flag."""
        if self.choices:
            return "|".join(self.choices)
        if self.kind is bool:
            return ""
        if "values" in self.field.metadata:
            return str(self.field.metadata["values"])
        if typing.get_origin(self.kind) is tuple:
            return "N,N,..."
        if typing.get_origin(self.kind) is Mapping:
            return "JSON"
        if self.kind is int and self.field.name.endswith("_bytes"):
            return "SIZE"
        return "N|auto" if self.kind == int | str else _VALUES[self.kind]


@functools.cache
def options_of(settings: type) -> tuple[Option, ...]:
    """The options of the dataclass `settings` itself, without those of its parts."""
    kinds, texts = typing.get_type_hints(settings), field_docstrings(settings)
    return tuple(Option(field, _without_none(kinds[field.name]), _without_none_words(texts.get(field.name, "")))
                 for field in dataclasses.fields(settings)
                 if part_of(field) is None and "in_python_only" not in field.metadata)


def with_parts(title: str, settings: type) -> list[tuple[str, type]]:
    """`settings` under this title, and its parts under their names."""
    parts = ((field.name, part_of(field)) for field in dataclasses.fields(settings))
    return [(title, settings), *((name, kind) for name, kind in parts if kind is not None)]


def add_options(parser: argparse.ArgumentParser, settings: type, title: str,
                defaults: Mapping[str, tuple[str, str]] | None = None) -> None:
    """An option per setting, in a group per part. An option that is not given is not in the parsed result at all.

    `defaults`: values, and how they are shown, of settings that have none of their own.
    """
    for name, kind in with_parts(title, settings):
        group = parser.add_argument_group(name)
        for option in options_of(kind):
            _add_option(group, option, (defaults or {}).get(option.field.name))


def add_some_options(parser: argparse.ArgumentParser, settings: type, title: str, names: Collection[str]) -> None:
    """As `add_options`, those of `names` alone, in one group."""
    group = parser.add_argument_group(title)
    for _, kind in with_parts(title, settings):
        for option in options_of(kind):
            if option.field.name in names:
                _add_option(group, option, None)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    shown_default = "the embedded shapes-vl, which knows drawn shapes only"
    add_options(parser, RunnerConfig, "model", defaults={"model": (str(SHAPES_VL), shown_default)})


def named_settings(arguments: argparse.Namespace, *settings: type) -> dict[str, Any]:
    """The settings that the command line named, by their flat names."""
    names = {name for kind in settings for name in flat_fields(kind)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def read_settings(arguments: argparse.Namespace, *kinds: type, **more: Any) -> tuple[Any, ...]:
    """One object of each kind. `more`: settings under flat names. Raises ConfigError for a wrong value."""
    return from_keywords(named_settings(arguments, *kinds) | more, *kinds)


def read_model_settings(arguments: argparse.Namespace, *kinds: type, **more: Any) -> tuple[Any, ...]:
    """The RunnerConfig, and one object of each kind. Warns where the embedded model is used, since a forgotten --model
    asks it."""
    config, *others = read_settings(arguments, RunnerConfig, *kinds, **more)
    if config.model == str(SHAPES_VL):
        print("the embedded shapes-vl answers, which knows drawn shapes only; --model names another one",
              file=sys.stderr)
    return config, *others


@functools.cache
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


def _without_none_words(text: str) -> str:
    """Users see no None: it is a default."""
    return re.sub(r"(^|\. )None:", r"\1Default:", text).replace("None:", "default:")


def _add_option(group: argparse._ArgumentGroup, option: Option, default: tuple[str, str] | None) -> None:
    metadata, text = option.field.metadata, option.text
    shown_default = option.default if default is None else default[1]
    if shown_default:
        text = f"{text.rstrip('.')} (default: {shown_default})"
    settings: dict[str, Any] = {"help": text.replace("%", "%%")}
    settings["default"] = argparse.SUPPRESS if default is None else default[0]
    flags = [metadata["short"], option.flag] if "short" in metadata else [option.flag]
    if option.kind is bool:
        action = "store_true" if option.field.default is False else argparse.BooleanOptionalAction
        group.add_argument(*flags, action=action, **settings)
        return
    settings |= {"required": option.is_needed and default is None, "type": _reader(option), "metavar": option.values}
    if option.kind == tuple[str, ...]:  # named once for each value
        settings |= {"action": "append", "type": str}
    if "alone" in metadata:  # what the option stands for without a value
        settings |= {"nargs": "?", "const": metadata["alone"]}
    group.add_argument(*flags, **settings)


def _reader(option: Option) -> Any:
    """The function that makes the option's value of a text."""
    special: dict[str, Any] = {"N,N,...": _integers, "JSON": _json_object, "SIZE": read_size, "N|auto": _number_or_word}
    return special.get(option.values, option.kind)


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
        for suffix, size in _SIZES.items():
            if value and value % size == 0:
                return f"{value // size}{suffix.upper()}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_size(text: str) -> int:
    """A number of bytes, as settings have it."""
    try:
        return config.read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
