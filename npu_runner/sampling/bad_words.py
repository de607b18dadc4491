"""Finds which tokens would complete a bad word. Knows token ids alone, and runs on the host.

The words of a request lie in a tree by their tokens before the last one, the last of those first: looking up costs what
agrees with the end of the text, however many words there are. Its nodes are made on first use, so that the tree costs a
few microseconds a word.
"""

from __future__ import annotations

from collections.abc import Sequence

_FEW_WORDS = 4  # so many are compared one by one


class BadWords:
    """Words of two tokens and more; shared by all sequences of a request."""

    def __init__(self, words: Sequence[tuple[int, ...]]):
        self._root = _Node(words, 0)
        self.longest_prefix = max(map(len, words)) - 1
        self.last_of_prefixes = frozenset(word[-2] for word in words)
        self.largest_token = max(map(max, words))

    def completing(self, recent: Sequence[int]) -> list[int]:
        """The tokens that would complete a word behind `recent`, the tokens generated so far or the last of them."""
        return self._root.completing(recent)


class _Node:
    """Words whose last tokens but one, `depth` of them, are the same."""

    def __init__(self, words: Sequence[tuple[int, ...]], depth: int):
        self._words = words
        self._depth = depth
        self._children: dict[int, _Node] | None = None
        self._ends: list[int] = []

    def completing(self, recent: Sequence[int]) -> list[int]:
        found: list[int] = []
        node: _Node | None = self
        while node is not None:
            if len(node._words) <= _FEW_WORDS:
                return found + [word[-1] for word in node._words if _ends_with(recent, word[:-1])]
            found += node._split()
            node = node._child(recent[-node._depth - 1]) if node._depth < len(recent) else None
        return found

    def _child(self, token: int) -> _Node | None:
        return self._children.get(token) if self._children else None

    def _split(self) -> list[int]:
        """Make the children; returns the last tokens of the words that have no more tokens before."""
        if self._children is None:
            groups: dict[int, list[tuple[int, ...]]] = {}
            for word in self._words:
                if len(word) - 1 == self._depth:
                    self._ends.append(word[-1])
                else:
                    groups.setdefault(word[-2 - self._depth], []).append(word)
            self._children = {token: _Node(words, self._depth + 1) for token, words in groups.items()}
        return self._ends


def _ends_with(recent: Sequence[int], prefix: tuple[int, ...]) -> bool:
    return tuple(recent[len(recent) - len(prefix):]) == prefix if len(prefix) <= len(recent) else False


class Watch:
    """The last tokens of one sequence, and what may not come next."""

    def __init__(self, words: BadWords, output_token_ids: Sequence[int]):
        self._words = words
        self._recent = list(output_token_ids[-words.longest_prefix:])
        self.banned = words.completing(self._recent)

    def must_know(self, num_untold: int) -> bool:
        """Any token may begin a word."""
        return num_untold > 0

    def observe(self, token: int) -> None:
        self._recent.append(token)
        if len(self._recent) > 2 * self._words.longest_prefix + 64:
            del self._recent[: -self._words.longest_prefix]
        # Behind most tokens no word can end, and a request may have many sequences.
        self.banned = self._words.completing(self._recent) if token in self._words.last_of_prefixes else []
