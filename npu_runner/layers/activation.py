"""Activations by the names that config.json has for them. Know no model.

Each takes the linear in front with it: some platforms compute both in one operator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from npu_runner.errors import ModelError
from npu_runner.layers.linear import ColumnParallelLinear

ACTIVATED: dict[str, Callable[[ColumnParallelLinear, Tensor], Tensor]] = {
    "gelu_pytorch_tanh": lambda linear, x: linear.gelu_forward(x, "tanh"),
    "gelu": lambda linear, x: linear.gelu_forward(x, "none"),
    "quick_gelu": lambda linear, x: linear.ops.quick_gelu(linear(x)),
    "silu": lambda linear, x: F.silu(linear(x)),
}


def known_activation(name: str, field: str) -> str:
    """`name`, which `field` of config.json has. Raises ModelError where it is none of ours."""
    if name not in ACTIVATED:
        raise ModelError(f"{field} {name!r} is not supported; supported are {', '.join(ACTIVATED)}")
    return name
