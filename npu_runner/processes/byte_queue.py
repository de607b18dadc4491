"""A queue between threads, bounded by the bytes and the number of its messages. Knows nothing of what they are.

Made of the interpreter's own locks and queues only: an interrupt (Ctrl-C) between any two lines leaves no lock held.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from typing import Any


class ByteBoundedQueue:
    """Full while its messages have `max_bytes`, or are `max_messages`: so what it holds is that and one message."""

    def __init__(self, max_bytes: float, max_messages: float = math.inf):
        self._max_bytes, self._max_messages = max_bytes, max_messages
        self._messages: queue.SimpleQueue[tuple[Any, int]] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Something for each `put` that waits, once there is room."""
        self._lock = threading.Lock()
        self._num_bytes = self._num_messages = self._num_waiting = 0
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        return self._num_bytes >= self._max_bytes or self._num_messages >= self._max_messages

    def put(self, message: Any, num_bytes: int, *, waits: bool = True) -> None:
        """Wait for room, unless `waits` says otherwise, and append the message. Once closed it is dropped."""
        while not self._reserve(num_bytes, waits):
            self._room.get()
        if not self._is_closed:
            self._messages.put((message, num_bytes))

    def get(self, timeout_seconds: float = 0.0) -> Any:
        """The oldest message; None where none comes within the time."""
        try:
            message, num_bytes = (self._messages.get(timeout=timeout_seconds) if timeout_seconds > 0
                                  else self._messages.get_nowait())
        except queue.Empty:
            return None
        self._remove(1, num_bytes)
        return message

    def get_waiting(self, most_bytes: int) -> list[Any]:
        """The oldest messages, up to the one with which they have `most_bytes`; none are waited for. The lock is taken
        once for all of them: a thread that puts meanwhile would wait for the interpreter each time."""
        found: list[Any] = []
        total = 0
        with contextlib.suppress(queue.Empty):
            while total < most_bytes:
                message, num_bytes = self._messages.get_nowait()
                found.append(message)
                total += num_bytes
        self._remove(len(found), total)
        return found

    def close(self) -> None:
        """Drop all messages, and those that come later."""
        with self._lock:
            self._is_closed = True
            self._wake_all()
        with contextlib.suppress(queue.Empty):
            while True:
                self._messages.get_nowait()

    def _reserve(self, num_bytes: int, waits: bool) -> bool:
        with self._lock:
            if waits and self.is_full and not self._is_closed:
                self._num_waiting += 1
                return False
            self._num_messages += 1
            self._num_bytes += num_bytes
            return True

    def _remove(self, num_messages: int, num_bytes: int) -> None:
        with self._lock:
            self._num_messages -= num_messages
            self._num_bytes -= num_bytes
            self._wake_all()

    def _wake_all(self) -> None:
        for _ in range(self._num_waiting):
            self._room.put(None)
        self._num_waiting = 0
