"""Raises at a chosen line or call of our own code, as an interrupt may, and finds the lines that a call runs.
Holds no tests.

This thread's lines only: what other threads run meanwhile is neither found nor stopped.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import npu_runner

_PACKAGE = Path(npu_runner.__file__).parent
FRONT = ("llm/", "ray_data.py", "serving/")
"""Between a caller and the engine: files and folders of the package."""
Line = tuple[str, int]
"""Of a file, by its path in the package, and a line's number."""


class Injected(BaseException):
    """Not an Exception, as KeyboardInterrupt is none."""


def lines_of(call: Callable[[], Any], where: tuple[str, ...] = FRONT) -> Counter[Line]:
    """How often the call runs each line, in the order in which they come."""
    found: Counter[Line] = Counter()
    with _tracing(where, lambda line: found.update([line])):
        call()
    return found


@contextmanager
def raising_at(line: Line, at_hit: int, where: tuple[str, ...] = FRONT) -> Iterator[None]:
    """Before this line runs for that time, from 1; once."""
    num_hits = 0

    def seen(found: Line) -> None:
        nonlocal num_hits
        num_hits += found == line
        if found == line and num_hits == at_hit:
            raise Injected(f"{line[0]}:{line[1]}")  # which ends the tracing, too

    with _tracing(where, seen):
        yield


@contextmanager
def _tracing(where: tuple[str, ...], seen: Callable[[Line], None]) -> Iterator[None]:
    names: dict[str, str | None] = {}

    def name_of(path: str) -> str | None:
        if path not in names:
            name = path.removeprefix(f"{_PACKAGE}/") if path.startswith(f"{_PACKAGE}/") else None
            names[path] = name if name is not None and name.startswith(where) else None
        return names[path]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        name = name_of(frame.f_code.co_filename)
        if name is None:
            return None
        if event == "line":
            seen((name, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def raising(owner: Any, name: str, at_call: int, *, after: bool = False) -> Iterator[Callable[[], int]]:
    """The call of that number to `owner.name` raises, before or after the real one. Gives how many there were."""
    real: Callable[..., Any] = getattr(owner, name)
    num_calls = 0

    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at_call and not after:
            raise Injected
        result = real(*arguments, **keywords)
        if num_calls == at_call:
            raise Injected
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield lambda: num_calls
