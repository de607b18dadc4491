"""Brings tensors from a device to the host behind the work that makes them. Knows nothing of what they mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Download:
    """A tensor on its way to host memory. `event` is recorded behind the copy; None where there is nothing to wait for.

    Work that is handed to the device later is not waited for.
    """

    def __init__(self, host: Tensor, event: Any = None):
        self._host = host
        self._event = event

    @classmethod
    def start(cls, tensor: Tensor, event: Any) -> Download:
        """Copy behind what the current stream has to do, through pinned memory; `event` is of that device."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event.record()
        return cls(host, event)

    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> np.ndarray:
        """The values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
