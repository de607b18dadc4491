"""One decode layer of a dense Qwen3 in torch_npu's own operators, and the same layer in plain torch for comparison.

What a platform will launch for each layer, small enough to read. Knows nothing of how it is compiled or captured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from torch import Tensor

BLOCK_SIZE = 128

# T tokens (one for each sequence), D hidden, N query heads, K key heads, H head dim, F feed-forward


@dataclasses.dataclass
class LayerShape:
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    feed_forward: int = 192
    num_blocks: int = 8
    epsilon: float = 1e-6


class DecodeLayer(torch.nn.Module):
    def __init__(self, shape: LayerShape, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.attention: Callable[..., Any] = torch_npu.npu_fused_infer_attention_score
        generator = torch.Generator().manual_seed(seed)

        def weight(*sizes: int) -> torch.nn.Parameter:
            values = torch.randn(sizes, generator=generator) / sizes[-1] ** 0.5
            return torch.nn.Parameter(values.to(dtype), requires_grad=False)

        qkv_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv, self.out = weight(qkv_rows, shape.hidden), weight(shape.hidden, shape.heads * shape.head_dim)
        self.gate_up, self.down = weight(2 * shape.feed_forward, shape.hidden), weight(shape.hidden, shape.feed_forward)
        self.norm1, self.norm2 = weight(shape.hidden), weight(shape.hidden)
        self.q_norm, self.k_norm = weight(shape.head_dim), weight(shape.head_dim)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        q, k, v = qkv.split([s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim], dim=-1)
        return q.unflatten(-1, (s.heads, -1)), k.unflatten(-1, (s.kv_heads, -1)), v.unflatten(-1, (s.kv_heads, -1))

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        table: Tensor,
        mask: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        q_lengths: list[int] | Tensor,
        kv_lengths: list[int] | Tensor,
    ) -> tuple[Tensor, Tensor]:
        s = self.shape
        hidden, _, residual = torch_npu.npu_add_rms_norm(hidden, residual, self.norm1, s.epsilon)
        q, k, v = self.split(torch.nn.functional.linear(hidden, self.qkv))
        q, k = (
            torch_npu.npu_rms_norm(q, self.q_norm, s.epsilon)[0],
            torch_npu.npu_rms_norm(k, self.k_norm, s.epsilon)[0],
        )
        q, k = torch_npu.npu_apply_rotary_pos_emb(q, k, cos.unsqueeze(1), sin.unsqueeze(1), layout="TND")
        torch_npu.npu_scatter_pa_kv_cache(k, v.contiguous(), key_cache, value_cache, slots, cache_mode="Norm")
        attended = self.attention(
            q,
            key_cache.flatten(2),
            value_cache.flatten(2),
            atten_mask=mask,
            block_table=table,
            input_layout="TND",
            block_size=BLOCK_SIZE,
            actual_seq_lengths=q_lengths,
            actual_seq_lengths_kv=kv_lengths,
            num_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            scale=s.head_dim**-0.5,
            sparse_mode=3,
        )[0]
        hidden = torch.nn.functional.linear(attended.flatten(1), self.out)
        hidden, _, residual = torch_npu.npu_add_rms_norm(hidden, residual, self.norm2, s.epsilon)
        hidden = torch.nn.functional.linear(hidden, self.gate_up)
        return torch.nn.functional.linear(torch_npu.npu_swiglu(hidden), self.down), residual

    def reference(
        self,
        hidden: Tensor,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        table: Tensor,
        cache: Tensor,
        kv_lengths: list[int],
    ) -> tuple[Tensor, Tensor]:
        """The same on the CPU in float32, without any vendor operator; writes into `cache` too."""
        s, f = self.shape, torch.nn.functional

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return f.rms_norm(x, weight.shape, weight.float(), s.epsilon)

        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

        residual = hidden + residual
        q, k, v = self.split(f.linear(norm(residual, self.norm1), self.qkv.float()))
        q, k = turn(norm(q, self.q_norm)), turn(norm(k, self.k_norm))
        cache[0].flatten(0, 1)[slots.long()] = k
        cache[1].flatten(0, 1)[slots.long()] = v
        rows = []
        for row, length in enumerate(kv_lengths):
            keys, values = (part[table[row].long()].flatten(0, 1)[:length].transpose(0, 1) for part in cache)
            group = s.heads // s.kv_heads
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            rows.append(f.scaled_dot_product_attention(q[row].unsqueeze(1), keys, values).flatten())
        hidden = f.linear(torch.stack(rows), self.out.float())
        residual = hidden + residual
        gate, up = f.linear(norm(residual, self.norm2), self.gate_up.float()).chunk(2, -1)
        return f.linear(f.silu(gate) * up, self.down.float()), residual


def step_inputs(shape: LayerShape, kv_lengths: list[int], seed: int) -> dict[str, Tensor]:
    """CPU float32 inputs of one decode step; sequence i owns blocks 1 + 2 i and 2 + 2 i, block 0 is nobody's."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(kv_lengths)
    position = torch.tensor(kv_lengths) - 1
    angles = position.unsqueeze(1) / 10000 ** (torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.cat((angles, angles), -1)
    table = torch.stack([torch.tensor([1 + 2 * row, 2 + 2 * row]) for row in range(rows)]).int()
    slots = table[torch.arange(rows), position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    return {
        "hidden": torch.randn(rows, shape.hidden, generator=generator),
        "residual": torch.randn(rows, shape.hidden, generator=generator),
        "cos": angles.cos(), "sin": angles.sin(), "slots": slots.int(), "table": table,
    }  # fmt: skip


def empty_cache(shape: LayerShape, filled: bool = True) -> Tensor:
    """(2, blocks, block size, K, H) on the CPU."""
    generator = torch.Generator().manual_seed(99)
    sizes = (2, shape.num_blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    return torch.randn(sizes, generator=generator) if filled else torch.zeros(sizes)


def causal_mask() -> Tensor:
    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1).npu()
