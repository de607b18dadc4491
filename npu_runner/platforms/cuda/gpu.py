"""The GPU of this process: its multiprocessors, its shared memory, and whether it is Hopper. Knows no kernel."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

# An H100's values; Triton's interpreter, which has no GPU, uses them.
_NUM_SMS, _SHARED_BYTES = 132, 232_448
_HOPPER = (9, 0)


class Gpu(NamedTuple):
    """The number of multiprocessors, and the bytes of shared memory that one program may have."""

    num_sms: int
    shared_bytes: int

    @classmethod
    def current(cls) -> Gpu:
        if not torch.cuda.is_available():
            return cls(_NUM_SMS, _SHARED_BYTES)
        properties = torch.cuda.get_device_properties()
        return cls(properties.multi_processor_count, properties.shared_memory_per_block_optin)


@functools.cache
def is_hopper() -> bool:
    """The CUDA C++ kernels are compiled for sm_90a, which runs on no other GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == _HOPPER


@functools.cache
def num_sms() -> int:
    return Gpu.current().num_sms
