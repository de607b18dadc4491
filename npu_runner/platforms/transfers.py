"""Carries arrays to a device and tensors back to the host, without waiting. Knows no vendor, nor what they mean."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

HOST = torch.device("cpu")
"""Where numpy's arrays lie, whatever the platform."""

_POLL_SECONDS = 0.00002
_MOST_POLLING_SECONDS = 1.0
# Device types that take copies from any memory of the host.
_WITHOUT_PINNED = ("cpu", "meta")
_DTYPES = {"uint8": torch.uint8, "int32": torch.int32, "float32": torch.float32}
# Each of several arrays begins at a multiple of it, as memory of its own would.
_ALIGNMENT_BYTES = 64

Shape = tuple[tuple[int, ...], str]
"""An array's extents, and the name of its dtype."""


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on the device, through pinned memory."""
    host = torch.from_numpy(array)
    if device.type in _WITHOUT_PINNED:
        return host.to(device)
    pinned = torch.empty_like(host, pin_memory=True)
    # Not pin_memory(): that copies with all threads, and waits for those whose cores a preprocessing worker has.
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)


def upload_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """uint8, int32 and float32 arrays on the device, each in its shape and dtype, by a single copy."""

    def fill(places: Sequence[np.ndarray]) -> None:
        for place, array in zip(places, arrays, strict=True):
            np.copyto(place, array)

    return upload_filled([(array.shape, array.dtype.name) for array in arrays], fill, device)


def upload_filled(shapes: Sequence[Shape], fill: Callable[[Sequence[np.ndarray]], None], device: torch.device, *,
                  num_kept: int = 0) -> list[Tensor]:
    """Arrays of these shapes on the device, by a single copy; `fill` writes them where the copy will read them.

    The memory that it writes to is pinned, where there is such a thing, and kept for later calls. It is not reused
    before the copy is done. On the device all share memory, but for the first `num_kept`: these are put aside together,
    so that they may outlive the others.
    """
    starts, num_bytes = [], 0
    for extents, dtype in shapes:
        starts.append(num_bytes)
        size = math.prod(extents) * _DTYPES[dtype].itemsize
        num_bytes += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type not in _WITHOUT_PINNED)
    fill([view.numpy() for view in _views(host, starts, shapes)])
    sent = host.to(device, non_blocking=True)
    kept = sent[: starts[num_kept]].clone() if num_kept else sent
    return [*_views(kept, starts[:num_kept], shapes[:num_kept]), *_views(sent, starts[num_kept:], shapes[num_kept:])]


def _views(buffer: Tensor, starts: Sequence[int], shapes: Sequence[Shape]) -> list[Tensor]:
    found = []
    for start, (extents, name) in zip(starts, shapes, strict=True):
        dtype = _DTYPES[name]
        part = buffer[start : start + math.prod(extents) * dtype.itemsize]
        found.append(part.view(dtype).view(extents))
    return found


class Download:
    """A tensor on its way to host memory. `event` is recorded behind the copy; None where there is nothing to wait for.

    Does not wait for work that is submitted later. `stream` is given if the device may lose work: the event is then
    lost too, and the host's copy is not valid.
    """

    def __init__(self, host: Tensor, event: Any = None, stream: Any = None):
        self._host = host
        self._event = event
        self._stream = stream

    @classmethod
    def start(cls, tensor: Tensor, event: Any, stream: Any = None) -> Download:
        """Copy behind what the current stream has to do, through pinned memory; `event` is of that device."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event.record()
        return cls(host, event, stream)

    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> np.ndarray:
        """The values, once they are there. Raises what the device's waiting raises."""
        if self._stream is not None:
            self._wait_with_an_eye_on_the_stream()
        elif self._event is not None:
            self._event.synchronize()
        return self._host.numpy()

    def _wait_with_an_eye_on_the_stream(self) -> None:
        """Bounded: an idle stream has lost the event, and one that takes long may be stuck, which only synchronising
        shows. Querying a stream raises what failed on it."""
        deadline = time.monotonic() + _MOST_POLLING_SECONDS
        while not self._event.query():
            if self._stream.query() and not self._event.query():
                return
            if time.monotonic() > deadline:
                self._stream.synchronize()
                return
            time.sleep(_POLL_SECONDS)
        self._event.synchronize()  # for what it raises


class SideResult(Generic[T]):
    """The result of work on a side stream. Call `join` before using it."""

    def __init__(self, result: T, event: Any, device: Any):
        self.result = result
        self._event = event
        self._device = device

    def join(self, tensors: Iterable[Tensor]) -> T:
        """`result`; the current stream waits for it, the host does not.

        `tensors`: all parts that the current stream will read. Their memory belongs to the side stream, which would
        otherwise reuse it as soon as the host drops them.
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
        """Submit `work()` to the side stream: copies, kernels, and the memory that they take.

        It is not ordered behind other streams, so it may read only what the host sends, and weights. First the host
        waits until all but the last result marked by `mark_read` has been read. So memory of two results at most is in
        use: one that is read and one that is made.
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
        """Call after submitting, to the current stream, all work that reads the last joined result, and after dropping
        that result."""
        event = self._device.Event()
        event.record()
        self._read.append(event)
