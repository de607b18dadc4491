"""Gated DeltaNet as a sequence mixer (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it. Knows nothing around it.

T tokens in the step, D hidden size, Nk and Nv key and value heads, G = Nv / Nk, K and V their dims, C = 2 Nk K + Nv V
channels (queries, keys, values), W convolution kernel; all of this rank, which has whole groups of heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import GatedDeltaNetConfig, ModelConfig
from npu_runner.layers.gated_delta import GatedDelta
from npu_runner.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from npu_runner.layers.norm import GatedRMSNorm
from npu_runner.layers.parallel import LayerContext, WeightPart
from npu_runner.platforms.step_inputs import AttentionMetadata


class GatedDeltaNet(nn.Module):
    """`name` is what the checkpoint calls this module; `state_layer` counts the layers that have a state."""

    def __init__(self, name: str, config: ModelConfig, mixer: GatedDeltaNetConfig, state_layer: int,
                 context: LayerContext):
        super().__init__()
        heads = _Heads(mixer, context)
        self.sizes = [heads.num_channels, heads.value_size, heads.num_v_heads, heads.num_v_heads]
        self.head_v_dim = mixer.head_v_dim
        self.in_proj = ColumnParallelLinear(config.hidden_size, [*self.parts(heads)], bias=False, context=context)
        self.conv1d = _Convolution(heads, mixer.conv_kernel_size, context)
        self.A_log = context.parameter(heads.num_v_heads, dtype=torch.float32)
        self.dt_bias = context.parameter(heads.num_v_heads, dtype=torch.float32)
        self.weight_parts = {
            name_: [WeightPart(f"{name}.{name_}", (mixer.num_v_heads,), dim=0, start=heads.first_v_head,
                               length=heads.num_v_heads)] for name_ in ("A_log", "dt_bias")
        }
        # What the decay is computed with; `weights_are_loaded` fills it in.
        self.register_buffer("neg_exp_A", torch.full_like(self.A_log, torch.nan), persistent=False)
        self.norm = GatedRMSNorm(mixer.head_v_dim, config.rms_norm_eps, context)
        self.out_proj = RowParallelLinear("out_proj", mixer.num_v_heads * mixer.head_v_dim, config.hidden_size,
                                          bias=False, context=context)
        self.gated_delta = GatedDelta(state_layer, context)

    @staticmethod
    def parts(heads: _Heads) -> Iterator[OutputPart]:
        """This rank's parts of the checkpoint's input projections."""
        return heads.separate()

    def weights_are_loaded(self) -> None:
        self.neg_exp_A.copy_(-self.A_log.exp())

    def forward(self, x_TD: Tensor, metadata: AttentionMetadata) -> Tensor:
        qkv_TC, z, b_TV, a_TV = self.in_proj(x_TD).split(self.sizes, dim=-1)
        out_TVD = self.gated_delta(qkv_TC, self.conv1d.weight[:, 0], a_TV, b_TV, self.neg_exp_A, self.dt_bias, metadata)
        out_TVD = self.norm(out_TVD, z.unflatten(-1, (-1, self.head_v_dim)))
        return self.out_proj(out_TVD.flatten(-2))


class InterleavedGatedDeltaNet(GatedDeltaNet):
    """Has the matmuls in_proj_qkvz and in_proj_ba, interleaved by key head, as Qwen3-Next stores them."""

    @staticmethod
    def parts(heads: _Heads) -> Iterator[OutputPart]:
        return heads.interleaved()


class _Heads:
    """Where this rank's heads lie in the checkpoint's tensors."""

    def __init__(self, mixer: GatedDeltaNetConfig, context: LayerContext):
        self.mixer = mixer
        self.first_k_head, self.num_k_heads = context.tp.share(mixer.num_k_heads, "linear_num_key_heads")
        self.group = mixer.num_v_heads // mixer.num_k_heads
        self.first_v_head, self.num_v_heads = self.group * self.first_k_head, self.group * self.num_k_heads
        self.value_size = self.num_v_heads * mixer.head_v_dim
        self.num_channels = 2 * self.num_k_heads * mixer.head_k_dim + self.value_size

    def channels(self) -> list[tuple[int, int]]:
        """(first, length) of queries, keys and values among all channels."""
        mixer = self.mixer
        keys, first, length = (n * mixer.head_k_dim for n in (mixer.num_k_heads, self.first_k_head, self.num_k_heads))
        return [(first, length), (keys + first, length),
                (2 * keys + self.first_v_head * mixer.head_v_dim, self.value_size)]

    @property
    def all_channels(self) -> int:
        return 2 * self.mixer.num_k_heads * self.mixer.head_k_dim + self.mixer.num_v_heads * self.mixer.head_v_dim

    def separate(self) -> Iterator[OutputPart]:
        """Queries, keys, values, z, b, a as Qwen3.5 stores them."""
        for first, length in self.channels():
            yield OutputPart("in_proj_qkv", self.all_channels, first, length)
        mixer, width = self.mixer, self.mixer.head_v_dim
        yield OutputPart("in_proj_z", mixer.num_v_heads * width, self.first_v_head * width, self.value_size)
        for name in ("in_proj_b", "in_proj_a"):
            yield OutputPart(name, mixer.num_v_heads, self.first_v_head, self.num_v_heads, is_gate=True)

    def interleaved(self) -> Iterator[OutputPart]:
        """The same as Qwen3-Next stores them: of each key head q, k, G times v, G times z; and G times b, G times a."""
        mixer = self.mixer
        values = self.group * mixer.head_v_dim
        yield from self._of_each_head("in_proj_qkvz", [mixer.head_k_dim, mixer.head_k_dim, values, values])
        yield from self._of_each_head("in_proj_ba", [self.group, self.group], is_gate=True)

    def _of_each_head(self, name: str, widths: list[int], *, is_gate: bool = False) -> Iterator[OutputPart]:
        stride = sum(widths)
        for kind, width in enumerate(widths):
            for head in range(self.first_k_head, self.first_k_head + self.num_k_heads):
                yield OutputPart(name, self.mixer.num_k_heads * stride, head * stride + sum(widths[:kind]), width,
                                 is_gate=is_gate)


class _Convolution(nn.Module):
    """The taps of each channel, (C, 1, W) as the checkpoint has them."""

    def __init__(self, heads: _Heads, kernel_size: int, context: LayerContext):
        super().__init__()
        self.weight = context.parameter(heads.num_channels, 1, kernel_size)
        self.weight_parts: dict[str, list[WeightPart]] = {"weight": []}
        target = 0
        for first, length in heads.channels():
            self.weight_parts["weight"].append(WeightPart(
                "conv1d.weight", (heads.all_channels, 1, kernel_size), dim=0, start=first, length=length,
                target_start=target))
            target += length
