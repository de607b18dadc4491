"""Attention of prompts on Hopper through the kernel in CUDA C++. Knows nothing of models.

T tokens, B sequences, N query heads, K kv heads, G = N / K, H head dim, W blocks a sequence, NB blocks of S tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from npu_runner.platforms.cuda.compiled_source import tensor_map
from npu_runner.platforms.cuda.hopper_attention import HopperAttention, Shape, why_not_hopper

_SHAPE = Shape(dims=128)
# Tokens that one copy brings, all of one block.
_CHUNK = 64
# New tokens of a step, and of a sequence on average, from which on it is faster than Triton's kernel (H100).
_LEAST_TOKENS, _LEAST_A_SEQUENCE = 1024, 64


def why_no_prompts(head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> str | None:
    """None where the kernel takes such heads on this GPU, else the reason. `group`: query heads of a kv head."""
    if head_dim != _SHAPE.dims or group > _SHAPE.rows:
        return f"the kernel for Hopper has head dim {_SHAPE.dims} and up to {_SHAPE.rows} query heads of a kv head"
    if block_size % _CHUNK:
        return f"the kernel for Hopper takes block sizes that are multiples of {_CHUNK}"
    return why_not_hopper(dtype)


class PromptAttention:
    """The kernel for one shape of heads."""

    def __init__(self, *, num_kv_heads: int, group: int, block_size: int, dtype: torch.dtype):
        self._num_kv_heads, self._group = num_kv_heads, group
        self.tokens_a_tile = _SHAPE.rows // group
        self.kernel = HopperAttention("prompt", _SHAPE, {"QUERY_HEADS": group, "BLOCK_SIZE": block_size}, dtype)

    def takes(self, query_lens_B: Sequence[int]) -> bool:
        """Whether a step of so many new tokens is faster by it. The first call waits until it is compiled."""
        least = max(_LEAST_TOKENS, _LEAST_A_SEQUENCE * len(query_lens_B))
        return self.kernel.is_there and sum(query_lens_B) >= least

    def attend(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, tables_BW: Tensor,
               scale: float) -> Tensor:
        """Causal attention of a step, (T, N, H). `tiles` as in PrefillPlan, of `tokens_a_tile` tokens; `scale` above 0.

        Queries and caches: 16-byte addresses and strides, heads of consecutive elements.
        """
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        box_dims = _SHAPE.span // 2
        maps = [tensor_map(q_TNH, (self.tokens_a_tile, self._group, box_dims)),
                *(tensor_map(cache, (1, _CHUNK, 1, box_dims)) for cache in (k_cache, v_cache))]
        self.kernel.launch(maps, tiles, self._num_kv_heads, out_TNH, scale, tables_BW,
                           ctypes.c_int(tables_BW.stride(0)))
        return out_TNH
