"""Root-mean-square norm. Knows nothing of where it stands."""

from __future__ import annotations

from torch import Tensor, nn

from npu_runner.layers.parallel import LayerContext


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        self.eps = eps
        self.weight = context.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
