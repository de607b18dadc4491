"""Carries one step's host arrays to the device in a single copy. Knows nothing of what they mean.

All arrays lie one after the other in one pinned buffer of int32; floats and int64 travel as their bits. Every step
has a buffer of its own: a step that samples nothing is not waited for, and the next must not overwrite its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.memory import Memory

# Each array starts on a 64-byte boundary.
_ALIGNMENT = 16

# Of the buffer's elements, 4 bytes each.
_DTYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.int64): torch.int64}

Layout = dict[str, tuple[int, tuple[int, ...], torch.dtype]]
"""name -> (first element, shape, dtype)."""


def plan_layout(arrays: Mapping[str, np.ndarray], start: int = 0) -> tuple[Layout, int]:
    """Where each of `arrays` lies, the first at element `start`, and where they end."""
    layout: Layout = {}
    for name, array in arrays.items():
        dtype = _DTYPES.get(array.dtype, torch.int32)
        layout[name] = (start, array.shape, dtype)
        start += -(-_num_elements(array.shape, dtype) // _ALIGNMENT) * _ALIGNMENT
    return layout, start


def _num_elements(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize // 4


def views(buffer: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The arrays inside a buffer, int32 (num_elements,)."""
    found = {}
    for name, (start, shape, dtype) in layout.items():
        found[name] = buffer[start : start + _num_elements(shape, dtype)].view(dtype).view(shape)
    return found


def to_device(memory: Memory, arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """All of `arrays` (int32, int64 or float32) on the device, through one copy."""
    layout, num_elements = plan_layout(arrays)
    host = memory.host_buffer(num_elements)
    for name, view in views(host, layout).items():
        view.numpy()[:] = arrays[name]
    buffer = torch.empty(num_elements, dtype=torch.int32, device=device)
    buffer.copy_(host, non_blocking=True)
    return views(buffer, layout)
