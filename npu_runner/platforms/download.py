"""Brings tensors from a device to the host behind the work that makes them. Knows nothing of what they mean."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

_POLL_SECONDS = 0.00002
_MOST_POLLING_SECONDS = 1.0


class Download:
    """A tensor on its way to host memory. `event` is recorded behind the copy; None where there is nothing to wait for.

    Work that is handed to the device later is not waited for. `stream` is given where a device may lose work: with it
    goes the event, and what the host then has is not what was asked for.
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
        """Not for ever: a stream that has nothing to do has lost the event, and one that takes long may be stuck, which
        only waiting for it tells. Asking a stream raises what failed on it."""
        deadline = time.monotonic() + _MOST_POLLING_SECONDS
        while not self._event.query():
            if self._stream.query() and not self._event.query():
                return
            if time.monotonic() > deadline:
                self._stream.synchronize()
                return
            time.sleep(_POLL_SECONDS)
        self._event.synchronize()  # for what it raises
