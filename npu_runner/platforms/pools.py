"""Memory of pools that a runner keeps: zeros, of which little may be written for long. Knows no model."""

from __future__ import annotations

import errno
import math
import mmap

import torch
from torch import Tensor


def zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Contiguous zeros of `sizes`, allocated flat: a device may keep memory of five dimensions in another layout.

    In host memory they are pages of the operating system, each of which is taken when it is first written. Raises
    MemoryError where the system refuses them, and RuntimeError of an allocator that has no more.
    """
    num_elements = math.prod(sizes)
    if device.type != "cpu" or not num_elements:
        return torch.zeros(num_elements, dtype=dtype, device=device).view(sizes)
    num_bytes = num_elements * dtype.itemsize
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as refusal:
        if refusal.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"the system has no {num_bytes} bytes") from refusal
    return torch.frombuffer(pages, dtype=dtype).view(sizes)
