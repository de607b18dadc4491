"""Work for a device beside that of its steps: a stream of its own, and an event to wait for. Knows no vendor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class SideResult(Generic[T]):
    """What work on a side stream makes, on its way: `result` is for whoever has called `join`."""

    def __init__(self, result: T, event: Any, device: Any):
        self.result = result
        self._event = event
        self._device = device

    def join(self, tensors: Iterable[Tensor]) -> T:
        """`result`, once the current stream has been told to wait for it; the host does not.

        `tensors`: all of it that the current stream will read. Their memory belongs to the side stream, which else took
        it for its next work as soon as the host lets go of them.
        """
        stream = self._device.current_stream()
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)
        return self.result


class SideStream:
    """`device`: torch's module of the vendor, which has streams and events by the names of torch.cuda."""

    def __init__(self, device: Any):
        self._device = device
        self._stream = device.Stream()
        self._read: deque[Any] = deque()

    def run(self, work: Callable[[], T]) -> SideResult[T]:
        """Hand out `work()` to the side stream: copies, kernels, and the memory that they take.

        It waits for nothing that other streams have to do, so it may read only what the host sends and what has been
        there for long, as weights have. The host waits first, until all but the last of what `mark_read` was told of
        has been read: so there is memory of two at most, of one that is being read and one that is being made.
        """
        while len(self._read) > 1:
            if not self._read[0].query():
                self._read[0].synchronize()
            self._read.popleft()
        with self._device.stream(self._stream):
            result = work()
            event = self._device.Event()
            event.record()
        return SideResult(result, event, self._device)

    def mark_read(self) -> None:
        """The current stream has been given all that reads what was joined last, and the host has let go of that."""
        event = self._device.Event()
        event.record()
        self._read.append(event)
