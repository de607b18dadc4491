"""The floats of a tower from pixels that travelled as uint8. Knows no tower."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_runner.request.prompt_inputs import PixelScaling


def scaled(pixels: Tensor, scaling: PixelScaling) -> Tensor:
    """float32 of uint8 `pixels`, on their device."""
    mean, std = (torch.from_numpy(values).to(pixels.device) for values in scaling.constants(pixels.shape))
    return (pixels.float() * scaling.factor - mean) / std
