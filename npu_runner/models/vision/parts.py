"""Parts of vision towers: patch embedding, attention within images, MLPs, a merger, and positions of patches. Knows no
tower.

P patches of all images, M = P / merge^2 image tokens, X values of a patch (row, column, frame of a video, channel), C
hidden size, N heads, H head dim, Q = H / 4 frequencies of an axis, D hidden size of the decoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import VisionConfig
from npu_runner.errors import ModelError
from npu_runner.layers.linear import ColumnParallelLinear, OutputPart, Padding, RowParallelLinear
from npu_runner.layers.norm import LayerNorm, RMSNorm
from npu_runner.layers.parallel import LayerContext, TensorParallel, WeightPart
from npu_runner.platforms.attention import AttentionBackend, tower_head_dim

# What depends on an image's size alone is kept for the last sizes, 40 bytes of the host's memory for each patch.
cached_by_size = lru_cache(maxsize=64)

Norm: TypeAlias = LayerNorm | RMSNorm
MakeNorm: TypeAlias = Callable[[int], Norm]
"""A norm of that size."""

ACTIVATED: dict[str, Callable[[ColumnParallelLinear, Tensor], Tensor]] = {
    "gelu_pytorch_tanh": lambda linear, x: linear.gelu_forward(x, "tanh"),
    "gelu": lambda linear, x: linear.gelu_forward(x, "none"),
    "quick_gelu": lambda linear, x: linear.ops.gelu(linear(x), "sigmoid"),
    "silu": lambda linear, x: F.silu(linear(x)),
}
"""By the names that config.json has. Each takes the linear in front with it: some platforms compute both in one
operator."""


def known_activation(name: str, field: str) -> str:
    """`name`, which `field` of config.json has. Raises ModelError where it is none of ours."""
    if name not in ACTIVATED:
        raise ModelError(f"{field} {name!r} is not supported; supported are {', '.join(ACTIVATED)}")
    return name


class PatchEmbed(nn.Module):
    """The checkpoint's convolution, whose stride equals its kernel, as the matmul it is. In 3-D with the frames of a
    patch, in 2-D where a patch has one.

    An image is a video of equal frames: one frame goes through the sum of the frames' weights. Patches of a video are
    longer, the colours of each frame behind those of the one before.
    """

    def __init__(self, config: VisionConfig, context: LayerContext, *, bias: bool = True):
        super().__init__()
        self.ops = context.ops
        frames = () if config.temporal_patch_size == 1 else (config.temporal_patch_size,)
        shape = (config.hidden_size, config.in_channels, *frames, config.patch_size, config.patch_size)
        self.weight = context.parameter(*shape)
        self.bias = context.parameter(config.hidden_size) if bias else None
        self.weight_parts = {"weight": [WeightPart("patch_embed.proj.weight", shape)],
                             "bias": [WeightPart("patch_embed.proj.bias", (config.hidden_size,))]}

    def forward(self, patches_PX: Tensor) -> Tensor:
        if self.weight.dim() == 4:
            weight_CX = self.weight.permute(0, 2, 3, 1).flatten(1)
        elif patches_PX.shape[1] == self.weight[0].numel():
            weight_CX = self.weight.permute(0, 3, 4, 2, 1).flatten(1)
        else:
            weight_CX = self.weight.sum(2, dtype=torch.float32).permute(0, 2, 3, 1).flatten(1).to(self.weight.dtype)
        return self.ops.linear(patches_PX.to(self.weight.dtype), weight_CX, self.bias)


class VisionAttention(nn.Module):
    """Weights are laid out for the head dim that the kernel takes: zeros behind each half of a head.

    Halves and not heads, so that rotary embedding finds its pairs where it finds them without padding. `qkv_names`: of
    the checkpoint's linears of queries, keys and values, or of the one that has them all.
    """

    def __init__(self, config: VisionConfig, context: LayerContext, *, qkv_names: tuple[str, ...] = ("qkv",),
                 qkv_bias: bool = True, proj_bias: bool = True):
        super().__init__()
        size = config.hidden_size
        self.ops, self.backend = context.ops, context.attention
        model_head_dim = size // config.num_heads
        self.scale = model_head_dim**-0.5
        self.head_dim = tower_head_dim(context.attention.facts, model_head_dim)
        self.padding = padding = Padding(model_head_dim // 2, self.head_dim // 2)
        start, length = context.tp.share(size, "vision hidden_size")
        parts = [OutputPart(name, 3 * size // len(qkv_names), which * size + start, length)
                 for name in qkv_names for which in range(3 // len(qkv_names))]
        self.qkv = ColumnParallelLinear(size, parts, bias=qkv_bias, context=context, padding=padding)
        self.proj = RowParallelLinear("proj", size, size, bias=proj_bias, context=context, padding=padding)

    def forward(self, x_PC: Tensor, cos_PH: Tensor, sin_PH: Tensor, plan: Any) -> Tensor:
        qkv_P3NH = self.qkv(x_PC).unflatten(-1, (3, -1, self.head_dim))
        q_PNH, k_PNH = self.ops.rotary_in_float32(self.to_turn(qkv_P3NH[:, :2]), cos_PH, sin_PH)
        return self.proj(self.backend.vision(q_PNH, k_PNH, qkv_P3NH[:, 2], plan, self.scale).flatten(-2))

    def to_turn(self, qk_P2NH: Tensor) -> Tensor:
        """Queries and keys as they go into the rotary embedding."""
        return qk_P2NH


class HeadNormVisionAttention(VisionAttention):
    """With an RMS norm of each query head and of each key head, as in GLM-OCR."""

    def __init__(self, config: VisionConfig, context: LayerContext, *, qkv_bias: bool = True, proj_bias: bool = True):
        super().__init__(config, context, qkv_bias=qkv_bias, proj_bias=proj_bias)
        head_dim = config.hidden_size // config.num_heads
        self.q_norm, self.k_norm = (PaddedHeadNorm(name, head_dim, self.padding, config.norm_eps, context)
                                    for name in ("q_norm", "k_norm"))

    def to_turn(self, qk_P2NH: Tensor) -> Tensor:
        q_PNH, k_PNH = qk_P2NH.unbind(1)
        return torch.stack((self.q_norm(q_PNH), self.k_norm(k_PNH)), dim=1)


class PaddedHeadNorm(RMSNorm):
    """An RMS norm over `size` dims that lie between zeros. The operator's mean counts the zeros: eps and weight make up
    for it, the weight in float32, so that it is not rounded once more."""

    def __init__(self, name: str, size: int, padding: Padding, eps: float, context: LayerContext):
        width = padding.padded(size)
        self.weight_dtype = None if padding.is_none else torch.float32
        super().__init__(width, eps * size / width, context)
        self.share = size / width
        if not padding.is_none:
            self.weight.zero_()
        self.weight_parts = {"weight": [
            WeightPart(f"{name}.weight", (size,), dim=0, start=start, length=length, target_start=place)
            for start, length, place in OutputPart(name, size, 0, size).runs(padding)]}

    def weights_are_loaded(self) -> None:
        if self.share < 1:
            self.weight.data.mul_(self.share**0.5)


class TwoLinears(nn.Module):
    """second(activation(first(x))), both with biases; `names` are theirs in the checkpoint."""

    def __init__(self, in_features: int, width: int, out_features: int, activation: str, names: tuple[str, str],
                 context: LayerContext):
        super().__init__()
        self.activated = ACTIVATED[activation]
        start, length = context.tp.share(width, "width of a vision MLP")
        self.first = ColumnParallelLinear(in_features, [OutputPart(names[0], width, start, length)], bias=True,
                                          context=context)
        self.second = RowParallelLinear(names[1], width, out_features, bias=True, context=context)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activated(self.first, x))


class TowerBlock(nn.Module):
    """Attention and MLP, each behind its norm, each added to what came in.

    A block leaves its last sum to the norm that follows: the next block, in one operator with its norm.
    """

    def __init__(self, config: VisionConfig, norm: MakeNorm, mlp: nn.Module, context: LayerContext,
                 attention: VisionAttention | None = None):
        super().__init__()
        self.norm1, self.norm2 = norm(config.hidden_size), norm(config.hidden_size)
        self.attn, self.mlp = attention or VisionAttention(config, context), mlp
        for last in mlp.modules():
            if isinstance(last, RowParallelLinear):
                last.stays = True

    def forward(self, x_PC: Tensor, update_PC: Tensor | None, cos_PH: Tensor, sin_PH: Tensor,
                plan: Any) -> tuple[Tensor, Tensor]:
        """The input is x + update; the result is (x, update) for the next block."""
        if update_PC is None:
            normed_PC = self.norm1(x_PC)
        else:
            normed_PC, x_PC = self.norm1.add_forward(update_PC, x_PC)
        normed_PC, x_PC = self.norm2.add_forward(self.attn(normed_PC, cos_PH, sin_PH, plan), x_PC)
        return x_PC, self.mlp(normed_PC)


class QueryMerger(nn.Module):
    """merge x merge patches, each normed, to one token of the decoder's size, as in Qwen2-VL and Qwen2.5-VL.

    The checkpoint numbers the parts: matmul, activation, matmul.
    """

    def __init__(self, config: VisionConfig, norm: MakeNorm, context: LayerContext):
        merged = config.hidden_size * config.spatial_merge_size**2
        super().__init__()
        self.ln_q = norm(config.hidden_size)
        self.mlp = TwoLinears(merged, merged, config.out_hidden_size, "gelu", ("0", "2"), context)
        self.merged = merged

    def forward(self, x_PC: Tensor, update_PC: Tensor) -> Tensor:
        """(M, D) of what the last block leaves, x + update."""
        normed_PC, _ = self.ln_q.add_forward(update_PC, x_PC)
        return self.mlp(normed_PC.reshape(-1, self.merged))


class PatchMerger(TwoLinears):
    """merge x merge patches, normed as one or each by itself, to one token of the decoder's size."""

    def __init__(self, config: VisionConfig, norm: MakeNorm, names: tuple[str, str], context: LayerContext, *,
                 norm_after_merge: bool = False):
        merged = config.hidden_size * config.spatial_merge_size**2
        super().__init__(merged, merged, config.out_hidden_size, "gelu", names, context)
        self.merged = merged
        self.norm_after_merge = norm_after_merge
        self.norm = norm(merged if norm_after_merge else config.hidden_size)

    def forward(self, x_PC: Tensor) -> Tensor:
        """(M, D)."""
        if self.norm_after_merge:
            return super().forward(self.norm(x_PC.reshape(-1, self.merged)))
        return super().forward(self.norm(x_PC).reshape(-1, self.merged))


def plain_block(config: VisionConfig, context: LayerContext, linears: tuple[str, str], *, eps: float = 1e-6,
                qkv_names: tuple[str, ...] = ("qkv",)) -> TowerBlock:
    """With layer norms and an MLP of two linears, by their names in the checkpoint."""
    size = config.hidden_size
    mlp = TwoLinears(size, config.intermediate_size, size, config.hidden_act, linears, context)
    attention = VisionAttention(config, context, qkv_names=qkv_names)
    return TowerBlock(config, layer_norm(context, eps), mlp, context, attention)


def layer_norm(context: LayerContext, eps: float = 1e-6) -> MakeNorm:
    return lambda size: LayerNorm(size, eps, context)


def tower_context(config: VisionConfig, context: LayerContext) -> LayerContext:
    """Heads and MLPs are cut over the ranks where they divide; otherwise every rank holds the whole tower."""
    if config.num_heads % context.tp.size or config.intermediate_size % context.tp.size:
        return on_every_rank(context)
    return context


def on_every_rank(context: LayerContext) -> LayerContext:
    """For what each rank holds and computes whole."""
    return dataclasses.replace(context, tp=TensorParallel())


def both_halves(turns_PQ: Tensor, config: VisionConfig, attention: AttentionBackend) -> Tensor:
    """(P, H) of (P, H / 2), for the head dim that weights are laid out for; there zeros turn to zeros anyhow."""
    model_head_dim = config.hidden_size // config.num_heads
    half_padding = (tower_head_dim(attention.facts, model_head_dim) - model_head_dim) // 2
    return F.pad(turns_PQ, (0, half_padding)).repeat(1, 2)


@cached_by_size
def turns(side: int, axis_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (side, Q) float32 of the angles at each place of an axis."""
    inverse_Q = 1.0 / (theta ** (torch.arange(0, axis_dim, 2, dtype=torch.float32) / axis_dim))
    angles = torch.arange(side, dtype=torch.float32)[:, None] * inverse_Q
    return angles.cos().numpy(), angles.sin().numpy()


@cached_by_size
def block_order(height: int, width: int, merge: int) -> np.ndarray:
    """(P, 2) int32 row and column of each patch, in the order in which merge x merge blocks follow each other."""
    blocks = (height // merge, merge, width // merge, merge)
    axes = np.indices((height, width), dtype=np.int32)
    return np.stack([axis.reshape(blocks).swapaxes(1, 2).ravel() for axis in axes], axis=-1)
