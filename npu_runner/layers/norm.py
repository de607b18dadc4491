"""Norms. Know nothing of where they stand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from npu_runner.layers.parallel import LayerContext


class RMSNorm(nn.Module):
    """With `is_zero_centred` the checkpoint's weights are less 1; here they are whole, in float32, lest 1 + w round."""

    def __init__(self, size: int, eps: float, context: LayerContext, *, is_zero_centred: bool = False):
        super().__init__()
        self.ops = context.ops
        self.eps = eps
        self.weight = context.parameter(size, dtype=torch.float32 if is_zero_centred else None)
        self.weight_offset = 1.0 if is_zero_centred else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Weight and bias (size,), of the model's dtype."""

    def __init__(self, size: int, eps: float, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        self.eps = eps
        self.weight = context.parameter(size)
        self.bias = context.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class GatedRMSNorm(nn.Module):
    """norm(x) * weight * silu(gate), over the last dim."""

    def __init__(self, size: int, eps: float, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        self.eps = eps
        self.weight = context.parameter(size)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.ops.gated_rms_norm(x, gate, self.weight, self.eps)
