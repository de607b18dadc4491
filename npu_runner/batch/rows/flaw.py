"""The reasons why a result row is no whole answer. Imports nothing: options name them."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Flaw(enum.IntFlag):
    """Why a result row is no whole answer; WHOLE: it is one. The names, in lower case, are those of `--retry`."""

    ERRORS = 1
    """The row has failed."""
    CUT_OFF = 2
    """A completion ended at its limit of tokens."""
    REPETITION = 4
    """A completion ended because it repeated itself."""
    UNPARSED = 8
    """A rule asked for JSON, and a completion is none."""

    @classmethod
    def parse(cls, names: Iterable[str]) -> Flaw:
        """The union of these names. Raises ValueError for an unknown one."""
        found = cls(0)
        for name in names:
            if name.upper() not in cls.__members__ or name != name.lower():
                raise ValueError(f"{name!r} is none of {', '.join(cls.all_names())}")
            found |= cls[name.upper()]
        return found

    @classmethod
    def all_names(cls) -> list[str]:
        return [name.lower() for name in cls.__members__]

    @property
    def names(self) -> list[str]:
        return [name.lower() for name, flaw in type(self).__members__.items() if flaw in self]


WHOLE = Flaw(0)
