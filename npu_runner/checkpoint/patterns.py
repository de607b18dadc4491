"""Regular expressions of a checkpoint's config files, matched in bounded time. Knows no format.

Python's own engine tries one way after another, so nested repetitions keep it busy for years. Here each part of a
pattern maps the set of places where it may begin to the set of places where it may end, and steps are counted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from npu_runner.errors import ModelError
from npu_runner.request.limits import shown

_parser = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_MOST_STEPS = 20_000
"""For one pattern and one name; usual ones take some hundred."""
_FEW_REPETITIONS, _SHORT_NAME = 3, 128
_PEFT_PREFIX = r"(.*\.)?"
_CATEGORIES: Mapping[str, Callable[[str], bool]] = {
    "DIGIT": str.isdecimal, "SPACE": str.isspace, "WORD": lambda char: char.isalnum() or char == "_"}


class _Refused(Exception):
    """The reason why a pattern is not matched."""


def matches(pattern: str, name: str, where: str) -> bool:
    """Whether `re.match(pattern, name)` finds anything. `where`: the field that holds the pattern, for errors.

    Raises ModelError for a pattern that is none, and for one that would take too long. Where repetitions are many or
    nested, flags, back references and possessive repetitions are refused too.
    """
    try:
        plain = _plain(pattern) if len(name) <= _SHORT_NAME else None
        if plain is not None:
            return plain.match(name) is not None
        return bool(_Match(name).ends(_parsed(pattern), {0}))
    except (re.error, _Refused, RecursionError, OverflowError) as error:
        raise ModelError(f"{where} has the pattern {shown(pattern)}, which is not supported: {error}; write a simpler "
                         "one") from error


@lru_cache(maxsize=1024)
def _plain(pattern: str) -> re.Pattern[str] | None:
    """Python's own engine, which is 50 times faster, for a pattern with few repetitions and none of a group."""
    rest = pattern.removeprefix(_PEFT_PREFIX)
    is_plain = len(re.findall(r"[*+?{]", rest)) <= _FEW_REPETITIONS and not re.search(r"\)[*+?{]", rest)
    return re.compile(pattern) if is_plain else None


@lru_cache(maxsize=1024)
def _parsed(pattern: str) -> Any:
    parsed = _parser.parse(pattern)
    if parsed.state.flags != re.UNICODE.value:
        raise _Refused("it has flags")
    return parsed


class _Match:
    """One name, and the steps that were taken over it."""

    def __init__(self, name: str):
        self._name, self._num_steps = name, 0

    def ends(self, parts: Sequence[tuple[Any, Any]], starts: set[int]) -> set[int]:
        """The places where `parts`, one after the other, may end, if they begin at one of `starts`."""
        self._count(len(starts))
        for kind, value in parts:
            self._count(len(starts))
            part = getattr(self, f"_{str(kind).lower()}", None)
            if part is not None:
                starts = part(value, starts)
            elif str(kind) in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
                items = value if str(kind) == "IN" else [(kind, value)]
                starts = {place + 1 for place in starts if place < len(self._name) and _fits(items, self._name[place])}
            else:
                raise _Refused(f"{str(kind).lower()} is not known here")
            if not starts:
                break
        return starts

    def _count(self, num_starts: int) -> None:
        self._num_steps += 1 + num_starts
        if self._num_steps > _MOST_STEPS:
            raise _Refused(f"it takes more than {_MOST_STEPS} steps for one name")

    def _branch(self, value: Any, starts: set[int]) -> set[int]:
        return set().union(*(self.ends(parts, starts) for parts in value[1]))

    def _subpattern(self, value: Any, starts: set[int]) -> set[int]:
        _, added, removed, parts = value
        if added or removed:
            raise _Refused("it has flags")
        return self.ends(parts, starts)

    def _max_repeat(self, value: Any, starts: set[int]) -> set[int]:
        least, most, parts = value
        found: set[int] = set()
        for count in range(most + 1):
            if count >= least:
                if starts <= found:
                    break
                found |= starts
            if count == most or not starts:
                break
            starts = self.ends(parts, starts)
        return found

    _min_repeat = _max_repeat

    def _assert(self, value: Any, starts: set[int]) -> set[int]:
        direction, parts = value
        width = 0 if direction > 0 else parts.getwidth()[0]
        return {place for place in starts if place >= width
                and (found := self.ends(parts, {place - width})) and (direction > 0 or place in found)}

    def _assert_not(self, value: Any, starts: set[int]) -> set[int]:
        return starts - self._assert(value, starts)

    def _at(self, value: Any, starts: set[int]) -> set[int]:
        kind, length = str(value), len(self._name)
        if kind in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return starts & {0}
        if kind in ("AT_END", "AT_END_STRING"):
            before_line_end = {length - 1} if kind == "AT_END" and self._name.endswith("\n") else set()
            return starts & ({length} | before_line_end)
        is_word = _CATEGORIES["WORD"]
        at_edge = {place for place in starts if len(
            {0 <= each < length and is_word(self._name[each]) for each in (place - 1, place)}) == 2}
        return at_edge if kind == "AT_BOUNDARY" else starts - at_edge


def _fits(items: Any, char: str) -> bool:
    """Whether a character is one of a class."""
    is_wanted = True
    for kind, value in items:
        name = str(kind)
        if name == "NEGATE":
            is_wanted = False
        elif name == "ANY":
            return char != "\n"
        elif name == "NOT_LITERAL":
            return ord(char) != value
        elif (name == "LITERAL" and ord(char) == value) or (name == "RANGE" and value[0] <= ord(char) <= value[1]):
            return is_wanted
        elif name == "CATEGORY":
            category = str(value).removeprefix("CATEGORY_")
            if _CATEGORIES[category.removeprefix("NOT_")](char) != category.startswith("NOT_"):
                return is_wanted
    return not is_wanted
