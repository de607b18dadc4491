"""The Qwen3-VL vision tower: patches in, embeddings for the decoder and its deepstack levels out. Knows no text.

P patches of all pictures, M = P / merge^2 picture tokens, X values of a patch (row, column, channel), C hidden size,
N heads, H head dim, D hidden size of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.errors import ModelError
from npu_runner.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from npu_runner.layers.parallel import LayerContext, TensorParallel, WeightPart
from npu_runner.model_config import VisionConfig
from npu_runner.platforms.torch_ops import rotate_half

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}
_LAYER_NORM_EPS = 1e-6
# What depends on a picture's size alone is kept for the last sizes, 64 bytes of the host's memory for each patch.
_cached_by_size = lru_cache(maxsize=64)


class PatchEmbed(nn.Module):
    """The checkpoint's 3-D convolution, whose stride equals its kernel, as the matmul it is.

    A picture is a film of equal frames: one frame goes through the sum of the frames' weights.
    """

    def __init__(self, config: VisionConfig, context: LayerContext):
        super().__init__()
        shape = (config.hidden_size, config.in_channels, config.temporal_patch_size, config.patch_size,
                 config.patch_size)
        self.weight = context.parameter(*shape)
        self.bias = context.parameter(config.hidden_size)
        self.weight_parts = {"weight": [WeightPart("patch_embed.proj.weight", shape)],
                             "bias": [WeightPart("patch_embed.proj.bias", (config.hidden_size,))]}

    def forward(self, patches_PX: Tensor) -> Tensor:
        weight_CX = self.weight.sum(2, dtype=torch.float32).permute(0, 2, 3, 1).flatten(1).to(self.weight.dtype)
        return F.linear(patches_PX.to(self.weight.dtype), weight_CX, self.bias)


class VisionAttention(nn.Module):
    def __init__(self, config: VisionConfig, context: LayerContext):
        super().__init__()
        size = config.hidden_size
        self.backend = context.attention
        self.head_dim = size // config.num_heads
        self.scale = self.head_dim**-0.5
        start, length = context.tp.share(size, "vision hidden_size")
        parts = [OutputPart("qkv", 3 * size, which * size + start, length) for which in range(3)]
        self.qkv = ColumnParallelLinear(size, parts, bias=True, context=context)
        self.proj = RowParallelLinear("proj", size, size, bias=True, context=context)

    def forward(self, x_PC: Tensor, cos_PH: Tensor, sin_PH: Tensor, lengths: Sequence[int]) -> Tensor:
        qkv_P3NH = self.qkv(x_PC).unflatten(-1, (3, -1, self.head_dim))
        # In float32, as the reference does whatever the model's dtype.
        turned_P2NH = rotate_half(qkv_P3NH[:, :2].float(), cos_PH[:, None, None], sin_PH[:, None, None])
        q_PNH, k_PNH = turned_P2NH.to(qkv_P3NH.dtype).unbind(1)
        return self.proj(self.backend.vision(q_PNH, k_PNH, qkv_P3NH[:, 2], lengths, self.scale).flatten(-2))


class VisionBlock(nn.Module):
    def __init__(self, config: VisionConfig, context: LayerContext):
        super().__init__()
        self.norm1 = _layer_norm(config.hidden_size, context)
        self.norm2 = _layer_norm(config.hidden_size, context)
        self.attn = VisionAttention(config, context)
        self.mlp = VisionMLP(config.hidden_size, config.intermediate_size, config.hidden_size, config.hidden_act,
                             context)

    def forward(self, x_PC: Tensor, cos_PH: Tensor, sin_PH: Tensor, lengths: Sequence[int]) -> Tensor:
        x_PC = x_PC + self.attn(self.norm1(x_PC), cos_PH, sin_PH, lengths)
        return x_PC + self.mlp(self.norm2(x_PC))


class VisionMLP(nn.Module):
    def __init__(self, in_features: int, width: int, out_features: int, activation: str, context: LayerContext):
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ModelError(f"vision hidden_act {activation!r} is not supported; known are {', '.join(_ACTIVATIONS)}")
        self.activation = _ACTIVATIONS[activation]
        start, length = context.tp.share(width, "vision MLP width")
        self.linear_fc1 = ColumnParallelLinear(
            in_features, [OutputPart("linear_fc1", width, start, length)], bias=True, context=context
        )
        self.linear_fc2 = RowParallelLinear("linear_fc2", width, out_features, bias=True, context=context)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(x)))


class PatchMerger(VisionMLP):
    """merge x merge patches to one token of the decoder's size; deepstack mergers norm after merging."""

    def __init__(self, config: VisionConfig, context: LayerContext, *, norm_after_merge: bool):
        merged = config.hidden_size * config.spatial_merge_size**2
        super().__init__(merged, merged, config.out_hidden_size, "gelu", context)
        self.merged = merged
        self.norm_after_merge = norm_after_merge
        self.norm = _layer_norm(merged if norm_after_merge else config.hidden_size, context)

    def forward(self, x_PC: Tensor) -> Tensor:
        if self.norm_after_merge:
            return super().forward(self.norm(x_PC.reshape(-1, self.merged)))
        return super().forward(self.norm(x_PC).reshape(-1, self.merged))


class VisionTower(nn.Module):
    """Heads and MLPs are cut over the ranks where they divide; otherwise every rank holds the whole tower."""

    def __init__(self, config: VisionConfig, context: LayerContext):
        super().__init__()
        if config.num_heads % context.tp.size or config.intermediate_size % context.tp.size:
            context = LayerContext(context.ops, context.attention, TensorParallel(), context.dtype, context.device)
        self.config = config
        self.patch_embed = PatchEmbed(config, context)
        self.pos_embed = nn.Embedding(
            config.num_position_embeddings, config.hidden_size, dtype=context.dtype, device=context.device
        )
        self.blocks = nn.ModuleList(VisionBlock(config, context) for _ in range(config.depth))
        self.merger = PatchMerger(config, context, norm_after_merge=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, context, norm_after_merge=True) for _ in config.deepstack_layers
        )

    def forward(self, patches_PX: Tensor, grids: Sequence[tuple[int, int]]) -> tuple[Tensor, list[Tensor]]:
        """Main embeddings (M, D) and one (M, D) per deepstack level.

        `patches_PX` holds the pictures one after the other, each in merge-block order; `grids` their (height, width)
        in patches.
        """
        x_PC = self.patch_embed(patches_PX)
        x_PC = x_PC + self._position_embedding(grids, x_PC)
        cos_PH, sin_PH = self._rotary(grids, x_PC)
        lengths = [height * width for height, width in grids]
        levels: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            x_PC = block(x_PC, cos_PH, sin_PH, lengths)
            if index in self.config.deepstack_layers:
                level = self.config.deepstack_layers.index(index)
                levels[level] = self.deepstack_merger_list[level](x_PC)
        return self.merger(x_PC), [levels[level] for level in range(len(levels))]

    def _position_embedding(self, grids: Sequence[tuple[int, int]], like: Tensor) -> Tensor:
        """(P, C): the learned square grid, resampled bilinearly (corners aligned) to each picture's grid."""
        side = int(self.config.num_position_embeddings**0.5)
        merge = self.config.spatial_merge_size
        taps = [_interpolation_taps(height, width, side, merge) for height, width in grids]
        indices_P4 = torch.cat([indices for indices, _ in taps]).to(like.device)
        weights_P4 = torch.cat([weights for _, weights in taps]).to(like.device)
        return (self.pos_embed(indices_P4) * weights_P4[..., None]).sum(1).to(like.dtype)

    def _rotary(self, grids: Sequence[tuple[int, int]], like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (P, H) in float32: half of the frequencies turn with the row, half with the column."""
        head_dim = self.config.hidden_size // self.config.num_heads
        axis_dim = head_dim // 2
        inverse = 1.0 / (self.config.rope_theta ** (torch.arange(0, axis_dim, 2, dtype=torch.float32) / axis_dim))
        merge = self.config.spatial_merge_size
        places_P2 = torch.cat([_block_order(height, width, merge) for height, width in grids]).float()
        angles = (places_P2[:, :, None] * inverse).flatten(1)
        angles_PH = torch.cat((angles, angles), dim=-1)
        return angles_PH.cos().to(like.device), angles_PH.sin().to(like.device)


def _layer_norm(size: int, context: LayerContext) -> nn.LayerNorm:
    return nn.LayerNorm(size, eps=_LAYER_NORM_EPS, dtype=context.dtype, device=context.device)


@_cached_by_size
def _block_order(height: int, width: int, merge: int) -> Tensor:
    """(P, 2) row and column of each patch, in the order in which merge x merge blocks follow each other."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    blocks = (height // merge, merge, width // merge, merge)
    return torch.stack([axis.reshape(blocks).transpose(1, 2).flatten() for axis in (rows, columns)], dim=-1)


@_cached_by_size
def _interpolation_taps(height: int, width: int, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """(P, 4) int64 rows of the side x side grid around each patch, and their (P, 4) float32 weights."""
    places_P2 = _block_order(height, width, merge)
    low, high, share = [], [], []
    for axis, size in enumerate((height, width)):
        place = torch.linspace(0, side - 1, size, dtype=torch.float32)[places_P2[:, axis]]
        low.append(place.floor().long())
        high.append((low[-1] + 1).clamp(max=side - 1))
        share.append(place - low[-1])
    (row, column), (next_row, next_column), (down, right) = low, high, share
    indices = [row * side + column, row * side + next_column, next_row * side + column, next_row * side + next_column]
    weights = [(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right]
    return torch.stack(indices, dim=-1), torch.stack(weights, dim=-1)
