"""What installed packages register with us, by entry points."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import EntryPoint, EntryPoints, entry_points


def registered(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group. Where two packages register a name, both are there, first on the path first.

    To find them the lists of all installed packages are read: 15 ms for a hundred packages. So it is done once for each
    search path of a process.
    """
    return tuple(_on_path(tuple(sys.path)).select(group=group))


@functools.lru_cache(maxsize=8)
def _on_path(_path: tuple[str, ...]) -> EntryPoints:
    return entry_points()
