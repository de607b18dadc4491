"""The part of a Gated DeltaNet layer that carries a state. Knows its slice of the state pool, not who sized it.

T tokens of the step, L layers with states, C channels, W convolution kernel, Nv value heads, K and V their dims.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import GatedDeltaNetConfig, ModelConfig
from npu_runner.errors import ModelError
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.platforms.gated_delta import GatedDeltaShape, Ring, RingedGatedDelta
from npu_runner.platforms.step_inputs import AttentionMetadata


class GatedDelta(nn.Module):
    """Convolution, then the gated delta rule. `bind_states` gives it conv_state (slots, W - 1 or more, C), state
    (slots, Nv, V, K) and, where decode steps do not write every state, a ring."""

    conv_state: Tensor
    state: Tensor
    ring: Ring | None = None

    def __init__(self, state_layer: int, context: LayerContext):
        """state_layer counts the layers that have a state."""
        super().__init__()
        assert context.gated_delta is not None, "the runner makes a backend for a model that has such layers"
        self.state_layer = state_layer
        self.backend = context.gated_delta

    def forward(self, x_TC: Tensor, conv_CW: Tensor, a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor,
                metadata: AttentionMetadata) -> Tensor:
        """(T, Nv, V). The arguments are those of GatedDeltaBackend."""
        qkv_TC = self.backend.convolve(x_TC, conv_CW, self.conv_state, metadata)
        if self.ring is None or metadata.is_prefill:
            return self.backend.delta_rule(qkv_TC, a_TV, b_TV, neg_exp_A_V, dt_bias_V, self.state, metadata)
        assert isinstance(self.backend, RingedGatedDelta), "no other is given a ring"
        return self.backend.step_in_ring(qkv_TC, a_TV, b_TV, neg_exp_A_V, dt_bias_V, self.state, self.ring, metadata)


def gated_delta_shape(model_config: ModelConfig, tp: TensorParallel) -> GatedDeltaShape | None:
    """This rank's share of every Gated DeltaNet layer; None where there is none.

    Heads are cut by groups of value heads that use the same key head. Raises ModelError where layers differ.
    """
    shapes = {_shape(layer, tp) for layer in model_config.state_layers}
    if len(shapes) > 1:
        raise ModelError("the Gated DeltaNet layers differ in their sizes, which is not supported: all states lie in "
                         "one pool")
    return shapes.pop() if shapes else None


def _shape(layer: GatedDeltaNetConfig, tp: TensorParallel) -> GatedDeltaShape:
    num_k_heads = tp.share(layer.num_k_heads, "linear_num_key_heads")[1]
    return GatedDeltaShape(
        num_k_heads=num_k_heads, num_v_heads=layer.num_v_heads // layer.num_k_heads * num_k_heads,
        head_k_dim=layer.head_k_dim, head_v_dim=layer.head_v_dim, conv_kernel_size=layer.conv_kernel_size)


def unbind_states(model: nn.Module) -> None:
    """Let go of the pool, so that another can take its memory."""
    for module in model.modules():
        if isinstance(module, GatedDelta):
            module.conv_state = module.state = torch.empty(0)
            module.ring = None


def bind_states(model: nn.Module, conv_states: Tensor, states: Tensor, rings: Ring | None = None) -> None:
    """Give every GatedDelta of `model` its layer of the pool: (L, slots, W - 1 or more, C) and (L, slots, Nv, V, K).

    `rings`: a dimension of layers before those of a Ring, except for `starts`. Backends that use none are given none.
    """
    layers = {module.state_layer: module for module in model.modules() if isinstance(module, GatedDelta)}
    assert sorted(layers) == list(range(len(states))), f"layers {sorted(layers)} against a pool of {len(states)}"
    for index, layer in layers.items():
        layer.conv_state, layer.state = conv_states[index], states[index]
        if rings is not None and isinstance(layer.backend, RingedGatedDelta):
            layer.ring = rings.for_layer(index)
