"""Brings tensors from a device to the host behind the work that makes them. Knows nothing of what they mean."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_POLL_SECONDS = 0.00002
_MOST_POLLING_SECONDS = 5.0


class Download:
    """A tensor on its way to host memory. `event` is recorded behind the copy; None where there is nothing to wait for.

    Work that is handed to the device later is not waited for. `is_idle` says whether the device has nothing to do: one
    that loses work may lose the event, too, and what the host then has is not what was asked for.
    """

    def __init__(self, host: Tensor, event: Any = None, is_idle: Callable[[], bool] | None = None):
        self._host = host
        self._event = event
        self._is_idle = is_idle

    @classmethod
    def start(cls, tensor: Tensor, event: Any, is_idle: Callable[[], bool] | None = None) -> Download:
        """Copy behind what the current stream has to do, through pinned memory; `event` is of that device."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event.record()
        return cls(host, event, is_idle)

    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> np.ndarray:
        """The values, once they are there. Raises what the device's waiting raises."""
        if self._event is not None and not self._is_lost():
            self._event.synchronize()
        return self._host.numpy()

    def _is_lost(self) -> bool:
        """Waits for the event, but not for ever: what takes longer may be stuck, and then the device's own waiting is
        what says so. Whether the event will never come."""
        if self._is_idle is None:
            return False
        deadline = time.monotonic() + _MOST_POLLING_SECONDS
        while not self._event.query() and time.monotonic() < deadline:
            if self._is_idle():
                return not self._event.query()
            time.sleep(_POLL_SECONDS)
        return False
