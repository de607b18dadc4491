"""Images that come as arrays or tensors, made Pillow's. Knows nothing of prompts; imports no torch.

H, W sides of the image, C its colours: 1 (grey), 3 or 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from npu_runner.errors import RequestError

_COLOURS = (1, 3, 4)


def as_image(value: Any, where: str) -> Any:
    """A PIL image of an array or a tensor, uint8 (H, W), (H, W, C) or (C, H, W); anything else as it is.

    Where both ends could be colours, the last axis is. Raises RequestError naming `where` for other numbers or shapes.
    """
    if isinstance(value, Image.Image) or not hasattr(value, "__array__"):
        return value
    try:
        pixels = value.numpy(force=True) if hasattr(value, "detach") else np.asarray(value)  # torch's, wherever it lies
    except (TypeError, ValueError, RuntimeError) as error:  # numbers that numpy has not: bfloat16
        raise RequestError(f"{where}: the array cannot be read ({error})", "invalid_type", where) from error
    if pixels.dtype != np.uint8:
        raise RequestError(f"{where}: the array holds {pixels.dtype}; uint8 is needed, 0 to 255: scale it, then "
                           ".astype('uint8')", "invalid_type", where)
    if pixels.ndim == 3 and pixels.shape[-1] not in _COLOURS and pixels.shape[0] in _COLOURS:
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[-1] not in _COLOURS):
        raise RequestError(f"{where}: the array has the shape {pixels.shape}; (height, width, 3) is needed",
                           "invalid_type", where)
    if 0 in pixels.shape:
        raise RequestError(f"{where}: the array has the shape {pixels.shape}: no area", "image_empty", where)
    return Image.fromarray(np.ascontiguousarray(pixels))
