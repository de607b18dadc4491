"""The floats of a tower from pixels that travelled as uint8. Knows no tower.

C channels, H, W sides of an image or of a tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu_runner.request.prompt_inputs import PixelScaling


def scaled(pixels: Tensor, scaling: PixelScaling) -> Tensor:
    """float32 of uint8 `pixels`: (..., C, H, W), or of any shape where all channels are scaled alike."""
    mean, std = (torch.tensor(values, device=pixels.device).reshape(-1, *[1] * (2 * (len(values) > 1)))
                 for values in (scaling.mean, scaling.std))
    return (pixels.float() * scaling.factor - mean) / std
