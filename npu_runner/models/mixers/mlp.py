"""The gated MLP as a channel mixer. Knows nothing of the layer around it.

T tokens in the step, D hidden size, I width of this rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from npu_runner.checkpoint.model_config import MLPConfig
from npu_runner.layers.linear import ColumnParallelLinear, RowParallelLinear, split_parts
from npu_runner.layers.parallel import LayerContext


class DecoderMLP(nn.Module):
    """down(silu(gate) * up). Without `reduces` each rank returns its own summand."""

    def __init__(self, hidden_size: int, mlp: MLPConfig, context: LayerContext, *, reduces: bool = True):
        super().__init__()
        self.ops = context.ops
        parts = split_parts(("gate_proj", "up_proj"), mlp.intermediate_size, context)
        self.gate_up_proj = ColumnParallelLinear(hidden_size, parts, bias=mlp.bias, context=context)
        self.down_proj = RowParallelLinear(
            "down_proj", mlp.intermediate_size, hidden_size, bias=mlp.bias, context=context, reduces=reduces
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x_TD)))
