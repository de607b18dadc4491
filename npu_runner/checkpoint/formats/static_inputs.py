"""The one scale and the offset that a file has for all inputs of a linear. Knows no format."""

from __future__ import annotations

import math

from npu_runner.checkpoint.weights_reader import CheckpointReader, Int8Inputs
from npu_runner.errors import WeightsError

_MOST_OFFSET = 256
"""Up to this bfloat16 has all whole numbers."""


def static_inputs(reader: CheckpointReader, scale_name: str, offset_name: str | None) -> Int8Inputs:
    """Inputs x are round(x / scale + offset); without `offset_name` it is 0.

    Raises WeightsError for a scale that is not above 0, and for an offset that bfloat16 does not hold.
    """
    scale = reader.read(scale_name).double().item()
    offset = 0.0 if offset_name is None else reader.read(offset_name).double().item()
    if not 0 < scale < math.inf or offset != round(offset) or abs(offset) > _MOST_OFFSET:
        raise WeightsError(f"{scale_name} is {scale} and {offset_name or 'its offset'} {offset}; a scale of inputs is "
                           f"above 0, an offset a whole number of at most {_MOST_OFFSET}; copy the checkpoint again "
                           "from its source")
    return Int8Inputs(scale, offset)
