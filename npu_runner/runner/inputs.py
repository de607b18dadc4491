"""Carries one step's host arrays to the device in a single copy. Knows nothing of what they mean.

All arrays are 4 bytes an element, laid out one after the other in one pinned buffer; floats travel as their bits. Every
step has a buffer of its own: a step that samples nothing is not waited for, and the next must not overwrite its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.base import Platform

# Each array starts on a 64-byte boundary.
_ALIGNMENT = 16

Layout = dict[str, tuple[int, tuple[int, ...], bool]]
"""name -> (first element, shape, is float)."""


def plan_layout(shapes: Mapping[str, tuple[int, ...]], float_names: frozenset[str]) -> tuple[Layout, int]:
    """Where each array lies, and the number of elements in all."""
    layout: Layout = {}
    start = 0
    for name, shape in shapes.items():
        layout[name] = (start, shape, name in float_names)
        size = int(np.prod(shape, dtype=np.int64))
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return layout, start


def float_names(arrays: Mapping[str, np.ndarray]) -> frozenset[str]:
    return frozenset(name for name, array in arrays.items() if array.dtype == np.float32)


def views(buffer: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The arrays inside a buffer, int32 (num_elements,)."""
    found = {}
    for name, (start, shape, is_float) in layout.items():
        size = int(np.prod(shape, dtype=np.int64))
        view = buffer[start : start + size].view(shape)
        found[name] = view.view(torch.float32) if is_float else view
    return found


def to_device(platform: Platform, arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """All of `arrays` (4-byte integers or float32) on the device, through one copy."""
    layout, num_elements = plan_layout({name: array.shape for name, array in arrays.items()}, float_names(arrays))
    host = platform.host_buffer(num_elements)
    for name, view in views(host, layout).items():
        view.numpy()[:] = arrays[name]
    buffer = torch.empty(num_elements, dtype=torch.int32, device=device)
    buffer.copy_(host, non_blocking=True)
    return views(buffer, layout)
