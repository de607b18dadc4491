"""A mixture of experts as a channel mixer: router, experts, and the one that every token sees.

Knows nothing of the layer around it. Sources: Mixtral (arXiv 2401.04088), shared experts as in Qwen1.5-MoE.

T tokens in the step, D hidden size, E experts, K of them a token, I width of an expert on this rank.
"""

from __future__ import annotations

from torch import Tensor, nn

from npu_runner.checkpoint.model_config import MLPConfig, MoEConfig
from npu_runner.layers.expert_weights import ExpertWeights
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.mixers.mlp import DecoderMLP


class SparseMoE(nn.Module):
    """Experts are cut by their width over the ranks, the router is everybody's; one sum over the ranks at the end."""

    def __init__(self, hidden_size: int, moe: MoEConfig, context: LayerContext):
        super().__init__()
        self.ops, self.tp = context.ops, context.tp
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
        out_TD = self.ops.experts(x_TD, weights_TK, experts_TK, self.experts.gate_up, self.experts.down)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out_TD = self.ops.add_gated(out_TD, self.shared_expert(x_TD), self.shared_expert_gate(x_TD))
        return self.tp.all_reduce(out_TD)


class _Router(nn.Module):
    """Logits of each expert (or of the shared one's gate) for each token; the same on every rank."""

    def __init__(self, hidden_size: int, num_outputs: int, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        self.weight = context.parameter(num_outputs, hidden_size)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.ops.linear(x_TD, self.weight, None)
