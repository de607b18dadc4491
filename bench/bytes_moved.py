"""The bytes that a decode step must move: weights, chosen experts, keys and values, states."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import GatedDeltaNetConfig
from npu_runner.layers.expert_weights import ExpertWeights
from npu_runner.platforms import pick_platform

_MOST_LAYERS = 1024


class RouterRecord:
    """The experts that the last forward chose in each layer, by number of tokens; of a graph, its own tensors."""

    def __init__(self) -> None:
        self.chosen: dict[int, deque[Tensor]] = defaultdict(lambda: deque(maxlen=_MOST_LAYERS))

    def last(self, num_tokens: int, num_layers: int) -> list[Tensor]:
        experts = list(self.chosen[num_tokens])[-num_layers:]
        assert len(experts) == num_layers, "the router of compiled code is not seen; take another --graph-mode"
        return experts


@contextmanager
def recorded_routes(platform_name: str) -> Iterator[RouterRecord]:
    """Records the platform's router. Compiled code is not recorded."""
    record, ops = RouterRecord(), type(pick_platform(platform_name).make_ops())
    route: Any = ops.route

    def recorded(self: Any, logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        weights_TK, experts_TK = route(self, logits_TE, top_k, renormalise)
        if not torch.compiler.is_compiling():
            record.chosen[len(logits_TE)].append(experts_TK)
        return weights_TK, experts_TK

    ops.route = recorded  # type: ignore[method-assign,assignment]
    try:
        yield record
    finally:
        ops.route = route  # type: ignore[method-assign]


def bytes_per_step(runner: Any, batch_size: int, context: int, chosen: RouterRecord | None) -> dict[str, int | None]:
    """Bytes of a step of `batch_size` sequences with `context` tokens each. States are read and written, all else is
    read. With rings they are the mean of as many steps as a ring has tokens. `expert_bytes` is None without `chosen`.
    """
    model, config = runner.get_model(), runner.model_config
    layers = [module for module in model.modules() if isinstance(module, ExpertWeights)]
    active: list[Tensor] | None = []
    if layers:
        active = chosen.last(batch_size, len(layers)) if chosen is not None else None
    kv_bytes = 2 * len(config.attention_layers) * config.num_kv_heads * config.head_dim * runner.k_cache.element_size()
    ring_length = runner.settings.state_ring_length
    state_bytes = sum(_state_bytes(layer.mixer, ring_length, runner.dtype.itemsize) for layer in config.layers
                      if isinstance(layer.mixer, GatedDeltaNetConfig))
    return {"weight_bytes": _weight_bytes(model, config.tie_word_embeddings) - sum(map(_bytes, layers)),
            "expert_bytes": None if active is None else
            sum(_bytes(layer) // len(layer.gate_up) * len(experts_TK.cpu().unique())
                for layer, experts_TK in zip(layers, active, strict=True)),
            "kv_bytes": batch_size * context * kv_bytes, "state_bytes": batch_size * state_bytes}


def _weight_bytes(model: Any, is_tied: bool) -> int:
    """All weights but the rows of an embedding that is not the output head."""
    decoder, head = getattr(model, "base", None) or model.decoder, getattr(model, "causal_lm", model).lm_head
    return _bytes(decoder) + (0 if is_tied else _bytes(head) - _bytes(decoder.embed_tokens))


def _bytes(module: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in module.parameters())


def _state_bytes(mixer: GatedDeltaNetConfig, ring_length: int, element_bytes: int) -> int:
    """Bytes of one sequence and layer: the float32 matrices and the ring, without the convolution's few inputs."""
    state = 4 * mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim
    if not ring_length:
        return 2 * state
    token = (4 * mixer.num_v_heads * (mixer.head_v_dim + 1) + element_bytes * mixer.num_k_heads * mixer.head_k_dim)
    # Of L steps one writes the state, the others a token each; they find 0 to L - 1 tokens.
    return state + (state + (ring_length - 1) * token) // ring_length + (ring_length - 1) * token // 2
