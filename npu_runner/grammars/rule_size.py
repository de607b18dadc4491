"""Adds up the size of a rule and the depth of its chains of definitions.

The grammar library's time and memory grow with the size or its square, and its stack with the depth. Knows neither
schemas nor grammars: their readers add their findings. Nothing here recurses, because a request decides the length of a
chain.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from npu_runner.request.limits import LIMITS, shown

M = TypeVar("M")
_MOST_ROUNDS = 4
_WRITTEN_OUT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_MAY_BE_LEFT_OUT = re.compile(r"\*|(?<!\()\?|\{\s*0*\s*,|\{0|\(\||\(\?\w*:\||\|\)|\|\|")


class OutOfBounds(ValueError):
    """`place`: in the schema or the grammar, as a message names it."""

    def __init__(self, place: str, what: str):
        super().__init__(what)
        self.place = place


def check(place: str, what: str, value: float, limit: int) -> None:
    if value > limit:
        said = shown(value) if isinstance(value, int) and value > sys.maxsize else f"{value:,}"
        raise OutOfBounds(place, f"{said} {what}, at most {limit:,} are allowed")


def num_optional_parts(expression: str) -> int:
    """The number of optional parts of a regular expression, as written."""
    return len(_MAY_BE_LEFT_OUT.findall(_WRITTEN_OUT.sub("x", expression)))


class RuleSize:
    """The size of one rule with all its parts. Raises OutOfBounds above a limit."""

    def __init__(self) -> None:
        self._num_parts = 0
        self._num_optional = 0
        self._multiple = 1

    def add_parts(self, place: str, count: int) -> None:
        self._num_parts += count
        check(place, "parts of the whole rule", self._num_parts, LIMITS.max_rule_parts)

    def add_expression(self, place: str, num_optional: int) -> None:
        """Add one expression, or one terminal with all its parts."""
        check(place, "parts of an expression that may be left out", num_optional, LIMITS.max_optional_parts)
        self._num_optional += num_optional
        check(place, "parts of all expressions that may be left out", self._num_optional,
              LIMITS.max_all_optional_parts)

    def add_multiple(self, place: str, value: int) -> None:
        """Add a multipleOf without the factors 2 and 5. The states of several multiply up to their common multiple."""
        self._multiple = math.lcm(self._multiple, value)
        check(place, "is the least common multiple of all values without the point and the factors 2 and 5",
              self._multiple, LIMITS.max_common_multiple)


@dataclass(frozen=True)
class Definition:
    """`references`: (name, levels above it within this definition). `num_levels`: of this definition alone."""

    references: Sequence[tuple[str, int]]
    num_levels: int


@dataclass(frozen=True)
class Chain:
    """An upper bound of the definitions, and of their levels together, on a chain below `name`."""

    num_links: int
    num_levels: int
    name: str


def components(graph: Mapping[str, Definition]) -> list[list[str]]:
    """Definitions that lead to each other stand together; whatever others lead to comes before them (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: list[str] = []
    found: list[list[str]] = []
    for root in graph:
        if root in index:
            continue
        work: list[tuple[str, Iterator[str]]] = []

        def enter(name: str, work: list[tuple[str, Iterator[str]]] = work) -> None:
            index[name] = low[name] = len(index)
            open_.append(name)
            work.append((name, iter([other for other, _ in graph[name].references if other in graph])))

        enter(root)
        is_open = set(open_)
        while work:
            name, others = work[-1]
            other = next(others, None)
            if other is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    found.append([])
                    while not found[-1] or found[-1][-1] != name:
                        found[-1].append(open_.pop())
                    is_open.difference_update(found[-1])
            elif other not in index:
                enter(other)
                is_open.add(other)
            elif other in is_open:
                low[name] = min(low[name], index[other])
    return found


def measure_all(graph: Mapping[str, Definition], measure: Callable[[str, Mapping[str, M]], M],
                unforced: Callable[[M], M]) -> dict[str, M]:
    """Measures by name, of definitions after those that they lead to. Definitions that lead to each other are measured
    until nothing changes; after four rounds, in which their texts became shorter, they count as `unforced`."""
    known: dict[str, M] = {}
    for names in components(graph):
        refers_to_itself = any(other == names[0] for other, _ in graph[names[0]].references)
        for number in range(_MOST_ROUNDS if len(names) > 1 else 1 + refers_to_itself):
            before = {name: known.get(name) for name in names}
            for name in names:
                known[name] = measure(name, known)
            changed = [name for name in names if before[name] != known[name]]
            if not changed:
                break
            if number == _MOST_ROUNDS - 1:
                known.update((name, unforced(known[name])) for name in changed)
    return known


def longest_chain(graph: Mapping[str, Definition]) -> Chain:
    """The longest one, at most: of definitions that lead to each other each may come once, in any order."""
    links: dict[str, int] = {}
    levels: dict[str, int] = {}
    longest = Chain(0, 0, "")
    for names in components(graph):
        inside = set(names)
        below = [(other, depth) for name in names for other, depth in graph[name].references
                 if other in graph and other not in inside]
        num_links = len(names) + max((links[other] for other, _ in below), default=0)
        own = sum(graph[name].num_levels for name in names)
        over = own if len(names) > 1 else 0
        num_levels = max(own, max((max(over, depth) + levels[other] for other, depth in below), default=0))
        for name in names:
            links[name], levels[name] = num_links, num_levels
        longest = Chain(max(longest.num_links, num_links), max(longest.num_levels, num_levels),
                        names[0] if (num_links, num_levels) > (longest.num_links, longest.num_levels)
                        else longest.name)
    return longest
