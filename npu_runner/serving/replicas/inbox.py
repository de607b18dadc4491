"""Messages from one thread to another, bounded by their bytes. Knows nothing of what is in them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any


class Inbox:
    """`put` waits while what lies here is larger than `max_bytes`; after `close` it drops what it gets."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._messages: deque[tuple[Any, int]] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, message: Any, num_bytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_bytes < self._max_bytes or self._is_closed)
            if not self._is_closed:
                self._messages.append((message, num_bytes))
                self._num_bytes += num_bytes
                self._changed.notify_all()

    def get(self, timeout_seconds: float) -> Any:
        """The oldest message; None where none comes within the time."""
        if not self._messages and timeout_seconds <= 0:
            return None
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._messages), timeout_seconds):
                return None
            message, num_bytes = self._messages.popleft()
            self._num_bytes -= num_bytes
            self._changed.notify_all()
            return message

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._messages.clear()
            self._num_bytes = 0
            self._changed.notify_all()
