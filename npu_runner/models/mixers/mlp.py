"""The channel mixers: the gated MLP, and a mixture of such experts with its router and the one that every token sees.

Know nothing of the layer around them. Sources: Mixtral (arXiv 2401.04088), shared experts as in Qwen1.5-MoE.

T tokens in the step, D hidden size, I width of this rank, E experts, K of them a token.
"""

from __future__ import annotations

from torch import Tensor, nn

from npu_runner.checkpoint.model_config import MLPConfig, MoEConfig
from npu_runner.layers.expert_weights import ExpertWeights
from npu_runner.layers.linear import ColumnParallelLinear, RowParallelLinear, side_by_side, split_parts
from npu_runner.layers.parallel import LayerContext
from npu_runner.platforms.quantised import RoundedRows


class DecoderMLP(nn.Module):
    """down(silu(gate) * up). Without `reduces` each rank returns its own summand."""

    def __init__(self, hidden_size: int, mlp: MLPConfig, context: LayerContext, *, reduces: bool = True):
        super().__init__()
        self.quantised = context.quantised
        parts = split_parts(("gate_proj", "up_proj"), mlp.intermediate_size, context)
        if mlp.is_fused:
            parts = side_by_side("gate_up_proj", parts)
        self.gate_up_proj = ColumnParallelLinear(hidden_size, parts, bias=mlp.bias, context=context)
        self.down_proj = RowParallelLinear(
            "down_proj", mlp.intermediate_size, hidden_size, bias=mlp.bias, context=context, reduces=reduces)

    def forward(self, x_TD: Tensor | RoundedRows) -> Tensor:
        return self.down_proj(self.quantised.silu_and_mul(self.gate_up_proj(x_TD), self.down_proj.form))


class SparseMoE(nn.Module):
    """Every rank has the whole router, and of each expert a slice of its width, or some experts whole; one sum over the
    ranks at the end."""

    def __init__(self, hidden_size: int, moe: MoEConfig, context: LayerContext):
        super().__init__()
        self.ops, self.tp, self.reduces = context.ops, context.tp, True
        self.top_k, self.renormalises = moe.top_k, moe.renormalise
        self.gate = _Router(hidden_size, moe.num_experts, context)
        self.experts = ExpertWeights(hidden_size, moe, context)
        self.shared_expert = self.shared_expert_gate = None
        if moe.shared_intermediate_size is not None:
            shared = MLPConfig(intermediate_size=moe.shared_intermediate_size)
            self.shared_expert = DecoderMLP(hidden_size, shared, context, reduces=False)
            self.shared_expert_gate = _Router(hidden_size, 1, context)

    def forward(self, x_TD: Tensor) -> Tensor:
        weights_TK, experts_TK = self.ops.route(self.gate(x_TD), self.top_k, self.renormalises)
        experts = self.experts
        if experts.form is None:
            out_TD = self.ops.experts(x_TD, weights_TK, experts_TK, experts.gate_up, experts.down, experts.held)
        else:
            out_TD = experts.ops.experts(x_TD, weights_TK, experts_TK, *experts.quantised, experts.held)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out_TD = self.ops.add_gated(out_TD, self.shared_expert(x_TD), self.shared_expert_gate(x_TD))
        return self.tp.all_reduce(out_TD) if self.reduces else out_TD


class _Router(nn.Module):
    """Logits of each expert (or of the shared one's gate) for each token; the same on every rank."""

    def __init__(self, hidden_size: int, num_outputs: int, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        self.weight = context.parameter(num_outputs, hidden_size)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.ops.linear(x_TD, self.weight, None)
