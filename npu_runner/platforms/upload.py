"""Carries arrays from the host to a device without waiting for it. Knows nothing of what they mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

_DTYPES = {"uint8": torch.uint8, "int32": torch.int32, "float32": torch.float32}
# Each of several arrays begins at a multiple of it, as memory of its own would.
_ALIGNMENT_BYTES = 64

Shape = tuple[tuple[int, ...], str]
"""Of an array: extents, and the name of its dtype."""


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on the device, through pinned memory."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
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

    The memory that it writes to is pinned, where there is such a thing, and kept for later calls. It is not handed out
    again before the copy is done. On the device all share memory, but for the first `num_kept`: these are put aside
    together, so that they may outlive the others.
    """
    starts, num_bytes = [], 0
    for extents, dtype in shapes:
        starts.append(num_bytes)
        size = math.prod(extents) * _DTYPES[dtype].itemsize
        num_bytes += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
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
