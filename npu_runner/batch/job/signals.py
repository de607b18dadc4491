"""SIGINT and SIGTERM stop a job: the first one in good order, the second one at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal arrived while there was nothing worth finishing. Not an Exception: no row's border may catch it."""


class StopSignals:
    """While entered: a signal sets `is_requested` and, inside `interrupting`, raises Interrupted.

    Outside of the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._name = ""
        self._is_deferred = True
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise Interrupted within, unless `defer` is called; at once for a signal that has come already.

        What must be undone is entered before and left after: an exception between a lock and the `with` that holds it
        would leave the lock.
        """
        self._is_deferred = False
        try:
            if self.is_requested:
                raise Interrupted(self._name)
            yield
        finally:
            self.defer()

    def defer(self) -> None:
        """From here on the job polls `is_requested` by itself."""
        self._is_deferred = True

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._name = name = signal.Signals(number).name
        if self.is_requested:
            _say(f"{name} again: ending at once\n")
            os._exit(1)  # the workers die with their parent, and so do the ranks
        self.is_requested = True
        _say(f"{name}: stopping; once more to end at once\n")
        if not self._is_deferred:
            raise Interrupted(name)


def _say(line: str) -> None:
    """Print in one write: the handler may run in the midst of another one, where buffered text is lost."""
    sys.stderr.write(line)
    sys.stderr.flush()
