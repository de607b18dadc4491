"""Finds stop strings in a text that grows at the end. Knows text alone.

The work for a character does not depend on how many stop strings there are or how long they are (Aho and Corasick's
automaton). Its nodes are made when a text first gets there: of 64 strings with 1,024 characters each nearly all are
never begun.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

_CACHED_AUTOMATA = 64


class StopSearch:
    """How far one text has come in its stop strings."""

    def __init__(self, stops: Sequence[str]):
        self._root = _root(tuple(stops))
        self._node = self._root
        self._length = 0
        self._mark = (self._root, 0)

    def feed(self, fresh: str, *, is_allowed: bool) -> tuple[int, str] | None:
        """(position in the text, stop string) of the one that `fresh` completes first, of several the longest."""
        node, at = self._node, self._length
        for char in fresh:
            node = node.next.get(char) or _step(node, char, self._root)
            at += 1
            if is_allowed and node.completed:
                return at - len(node.completed), node.completed
        self._node, self._length = node, at
        return None

    def mark(self) -> None:
        """Remember this place: what follows may be taken back."""
        self._mark = (self._node, self._length)

    def take_back(self) -> None:
        """Forget what came after the mark."""
        self._node, self._length = self._mark

    def num_begun(self, *, at_mark: bool) -> int:
        """Characters at the end of the text that begin a stop string; `at_mark`: of the text up to the mark."""
        node = self._mark[0] if at_mark else self._node
        while node.fallback is not None and not node.continuations:
            node = node.fallback  # a whole stop string that was not allowed begins nothing
        return node.depth


class _Node:
    """A beginning of stop strings: the longest that the text ends with."""

    __slots__ = ("completed", "continuations", "depth", "fallback", "next")

    def __init__(self, depth: int, stops: Sequence[str]):
        """stops: all that begin with these `depth` characters."""
        self.depth = depth
        self.next: dict[str, _Node] = {}
        """By the character that follows, as far as texts have got."""
        self.continuations: dict[str, list[str]] = {}
        """By the character that follows: the stop strings that go on with it."""
        self.fallback: _Node | None = None
        """The longest beginning that ends this one and is shorter; None at the root."""
        self.completed = ""
        """The longest stop string that this ends with."""
        for stop in stops:
            if len(stop) > depth:
                self.continuations.setdefault(stop[depth], []).append(stop)
            else:
                self.completed = stop


@functools.lru_cache(maxsize=_CACHED_AUTOMATA)
def _root(stops: tuple[str, ...]) -> _Node:
    return _Node(0, stops)


def _step(node: _Node, char: str, root: _Node) -> _Node:
    """The node behind `node` and `char`, made with all that it falls back to if no text has been there."""
    made: list[tuple[_Node, _Node]] = []
    target, parent = root, node
    while True:
        known = parent.next.get(char)
        if known is not None:
            target = known
            break
        if char in parent.continuations:
            made.append((parent, _Node(parent.depth + 1, parent.continuations[char])))
        if parent.fallback is None:
            break
        parent = parent.fallback
    for parent, child in reversed(made):
        child.fallback = target
        child.completed = child.completed or target.completed
        parent.next[char] = child
        target = child
    return target
