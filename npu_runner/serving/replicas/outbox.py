"""Messages to another process, sent by a thread of their own: who hands them in never waits for one that does not read.

Nothing bounds them here: whoever hands them in bounds the rows that are in them. Knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any

from npu_runner.processes.channel import Channel, ChannelClosed, Packed, pack


class Outbox:
    """Sends over `channel` what is put here, in order. Once the other side is gone messages are dropped: whoever
    receives from it sees its end."""

    def __init__(self, channel: Channel, name: str):
        self._channel = channel
        self._messages: queue.SimpleQueue[Packed | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=name, daemon=True)
        self._writer.start()

    def put(self, message: Any) -> None:
        """Returns at once. Raises what pickling it raises."""
        self._messages.put(pack(message))

    def join(self) -> None:
        """Wait for the thread. The caller has shut the connection down before, or it would send all there is first."""
        self._messages.put(None)
        self._writer.join()

    def _write(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while (message := self._messages.get()) is not None:
                self._channel.send_packed(message)
                del message  # pictures of many rows, perhaps, and the next message may be long in coming
