"""Carries arrays from the host to a device without waiting for it. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_DTYPES = {"int32": torch.int32, "float32": torch.float32}


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
    """int32 and float32 arrays on the device, each in its shape and dtype, by a single copy."""
    flat = upload(np.concatenate([array.ravel().view(np.int32) for array in arrays]), device)
    parts = zip(flat.split([array.size for array in arrays]), arrays, strict=True)
    return [part.view(_DTYPES[array.dtype.name]).view(array.shape) for part, array in parts]
