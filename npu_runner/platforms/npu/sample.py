"""Samples from the whole vocabulary in few launches of plain operators. Knows no slots and no parameters.

B rows, V vocabulary; a 1 is a kept dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Probabilities become integers: multiples of one over this, whose sum stays below 2^31.
_UNITS = float(2**30)


def sample_from_softmax(logits_BV: Tensor, temperature_B1: Tensor, uniform_B1: Tensor) -> Tensor:
    """See Ops.softmax_sampler. A token less probable than 2^-30 weighs nothing.

    Sums of integers are exact in any order. So the running sum never falls, and it has grown where it first passes the
    target. The token found needs no further check. All of it runs on the AI core, as searchsorted and running sums of
    int64 do not.
    """
    shares_BV = (logits_BV / temperature_B1).softmax(-1)  # float32, by the temperature's
    is_unusable_B1 = shares_BV[:, :1] != shares_BV[:, :1]  # one NaN makes all of a row NaN
    running_BV = shares_BV.mul_(_UNITS).to(torch.int32).cumsum(-1, dtype=torch.int32)
    # Below the total also when the uniform is the last one before 1: float32 rounds by less than it lacks.
    target_B1 = (uniform_B1 * running_BV[:, -1:]).to(torch.int32)
    return (running_BV <= target_B1).sum(-1, keepdim=True, dtype=torch.int32).masked_fill_(is_unusable_B1, -1)
