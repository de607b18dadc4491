"""Attention over the paged cache, one per decoder layer. Knows its slice of the cache, not who sized it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.weights_reader import WeightsReader, renamed_tensor
from npu_runner.errors import ConfigError
from npu_runner.layers.parallel import LayerContext
from npu_runner.platforms.ops import HeadNorms
from npu_runner.platforms.pools import zeros
from npu_runner.platforms.step_inputs import AttentionMetadata

# T tokens in the step, N query heads, K kv heads, H head dim, R dims that turn, NB blocks, S block size


class PagedAttention(nn.Module):
    """Writes the step's keys and values, then attends. `bind_kv_cache` gives it k_cache and v_cache (NB, S, K, H).

    Returns (T, N, H); with `AttentionMetadata.ends` those of their rows, (B, N, H).
    """

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, layer_index: int, num_kv_heads: int, head_dim: int, context: LayerContext, *,
                 scale: float | None = None, window: int | None = None):
        """num_kv_heads: this rank's. scale: of the scores; None: head_dim ** -0.5.

        window: a token sees this many tokens, itself included; None: all.
        """
        super().__init__()
        self.layer_index = layer_index
        self.heads = (num_kv_heads, head_dim)
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.ops = context.ops
        self.backend = context.attention

    def forward(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, metadata: AttentionMetadata) -> Tensor:
        self.backend.write_kv(k_TKH, v_TKH, self.k_cache, self.v_cache, metadata.slot_mapping_T)
        return self._attend(q_TNH, metadata)

    def norm_rotary_forward(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, norms: HeadNorms | None,
                            cos_TR: Tensor, sin_TR: Tensor, metadata: AttentionMetadata) -> Tensor:
        """`forward` of q and k after their heads' norms, if there are any, and the rotary embedding of R dims."""
        q_TNH = self.backend.norm_rotary_store(
            self.ops, q_TNH, k_TKH, v_TKH, norms, cos_TR, sin_TR, k_cache=self.k_cache, v_cache=self.v_cache,
            slot_mapping_T=metadata.slot_mapping_T)
        return self._attend(q_TNH, metadata)

    def _attend(self, q_TNH: Tensor, metadata: AttentionMetadata) -> Tensor:
        if metadata.ends is not None:
            q_TNH, metadata = metadata.of_ends(q_TNH), metadata.as_decode()
        attend = self.backend.prefill if metadata.is_prefill else self.backend.decode
        return attend(q_TNH, self.k_cache, self.v_cache, metadata, self.scale, window=self.window)


def make_kv_cache(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys and values, zeros, (layers, NB, S, K, H) each.

    Tensors of their own: graph compilers leave a write in place only where the arguments that it writes do not share
    their memory.
    """
    return zeros(sizes, dtype, device), zeros(sizes, dtype, device)


def bind_kv_cache(model: nn.Module, keys: Tensor, values: Tensor) -> None:
    """Give every PagedAttention of `model` its layer of the caches, (layers, NB, S, K, H) each.

    Raises ConfigError for another layout: kernels take the memory for what they expect, and some of them write it wrong
    without a word.
    """
    layers = _attention_layers(model)
    assert sorted(layers) == list(range(len(keys))), f"layers {sorted(layers)} against a cache {tuple(keys.shape)}"
    heads = {layer.heads for layer in layers.values()}
    for name, cache in (("keys", keys), ("values", values)):
        if not (cache.is_contiguous() and cache.shape == keys.shape and heads == {tuple(cache.shape[3:])}):
            raise ConfigError(
                f"the KV cache's {name} have shape {tuple(cache.shape)} and strides {cache.stride()}; allocate keys "
                "and values alike and contiguous as (layers, blocks, block_size, kv heads, head dim), the last two "
                f"{sorted(heads)}")
    for index, layer in layers.items():
        layer.k_cache, layer.v_cache = keys[index], values[index]


def load_kv_scales(model: nn.Module, reader: WeightsReader, renamed: Mapping[str, str],
                   device: torch.device) -> tuple[int, int]:
    """Give each PagedAttention the checkpoint's scales for a cache in e4m3, those of all heads on every rank. Returns
    how many layers have some, and how many there are.

    `renamed` as in `load_weights`.
    """
    num_scaled = num_layers = 0
    for name, module in model.named_modules():
        if isinstance(module, PagedAttention):
            beside = f"{name.rpartition('.')[0]}.k_scale"
            scales = reader.kv_scales(renamed_tensor(beside, renamed).removesuffix(".k_scale"))
            num_layers += 1
            if scales is not None:
                num_scaled += 1
                module.backend = module.backend.with_kv_scales(torch.tensor(scales, device=device))
    return num_scaled, num_layers


def resolve_windows(model: nn.Module, max_model_len: int) -> list[int | None]:
    """The sliding window of each layer, in the cache's order; the layers' backend will plan for these.

    A window that no sequence of `max_model_len` tokens outgrows is none.
    """
    layers = [layer for _, layer in sorted(_attention_layers(model).items())]
    for layer in layers:
        if layer.window is not None and layer.window >= max_model_len:
            layer.window = None
    windows = [layer.window for layer in layers]
    for layer in layers:
        layer.backend.windows = tuple(dict.fromkeys(windows))
    return windows


def _attention_layers(model: nn.Module) -> dict[int, PagedAttention]:
    return {module.layer_index: module for module in model.modules() if isinstance(module, PagedAttention)}
