"""A KV cache of another layout than the kernels expect is refused where it is bound."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npu_runner.errors import ConfigError
from npu_runner.layers.attention import PagedAttention, bind_kv_cache

# L layers, NB blocks, S block size, K kv heads, H head dim
L, NB, S, K, H = 2, 3, 4, 2, 8


def attention_layers() -> nn.Module:
    context: Any = SimpleNamespace(attention=None, ops=None)  # binding runs no kernel
    return nn.ModuleList(PagedAttention(index, K, H, context) for index in range(L))


def cache(*sizes: int) -> Tensor:
    return torch.zeros(sizes)


def test_contiguous_blocks_of_tokens_of_heads_are_bound() -> None:
    layers = attention_layers()
    keys, values = cache(L, NB, S, K, H), cache(L, NB, S, K, H)
    bind_kv_cache(layers, keys, values)
    for index, layer in enumerate(layers.children()):
        layer.k_cache[1, 2] = index + 1.0
    assert keys[:, 1, 2].unique().tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("keys", "values", "what"), [
    (cache(L, NB, K, S, H), cache(L, NB, K, S, H), "keys have shape"),  # heads before tokens
    (cache(L, NB, K, S, H).transpose(2, 3), cache(L, NB, S, K, H), "keys have shape"),  # the same, seen as ours
    (cache(L, NB, S, K, H), cache(L, NB, S, H, K).transpose(3, 4), "values have shape"),
    (cache(L, NB, S, K, H), cache(L, NB + 1, S, K, H), "values have shape"),
    (cache(L, NB, S, K * H), cache(L, NB, S, K * H), "keys have shape"),
], ids=["other order", "a view of another order", "values only", "other size", "flat heads"])
def test_another_layout_is_refused_by_name(keys: Tensor, values: Tensor, what: str) -> None:
    with pytest.raises(ConfigError, match=rf"{what} .*contiguous as \(layers, blocks, block_size"):
        bind_kv_cache(attention_layers(), keys, values)
