"""Qwen3.5 (also 3.6 and 3.8): Gated DeltaNet and gated attention by turns; with Qwen3-VL's tower, or text alone.

Knows nothing of caches, states or prompts.
"""

from __future__ import annotations

from typing import ClassVar

from npu_runner.checkpoint.config_reading import RawConfig, check_layer_types, decoder_config, read_moe, read_rope
from npu_runner.checkpoint.model_config import (
    AttentionConfig,
    GatedDeltaNetConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    RopeConfig,
)
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.config import RunnerConfig
from npu_runner.errors import ModelError
from npu_runner.layers.norm import ZeroCentredRMSNorm
from npu_runner.models.decoder import DecoderLayer
from npu_runner.models.mixers.attention import GatedAttention
from npu_runner.strategies.causal_lm import CausalLMStrategy
from npu_runner.strategies.qwen3_vl import Qwen3VLStrategy, read_vision

HEAD_DIM = 256
_LINEAR, _FULL = "linear_attention", "full_attention"
_SECTION = (11, 11, 10)
_ROTARY_SHARE = 0.25
# The head for multi-token prediction.
_MTP = "mtp."


class Qwen35Layer(DecoderLayer):
    norm_class = ZeroCentredRMSNorm


class HybridStrategy(CausalLMStrategy):
    """The base of the text strategy, the strategy with images, and Qwen3-Next's."""

    layer_class = Qwen35Layer
    attention_class = GatedAttention
    has_states = True
    has_experts: ClassVar[bool] = False

    def left_out(self, model_config: ModelConfig) -> tuple[str, ...]:
        return (_MTP,) if model_config.mtp is None else ()

    def mtp_layer(self, config: RunnerConfig) -> LayerConfig:
        """It attends, and mixes channels as the decoder's last layer does."""
        if config.load_format != "dummy":
            with CheckpointReader(self.path) as reader:
                has_head = any(name.startswith(_MTP) for name in reader.names)
            if not has_head:
                raise ModelError(f"{self.path}: speculative_config.method mtp needs the head for multi-token "
                                 f"prediction, and the checkpoint has no tensors {_MTP}*: it was saved without; take "
                                 "one that has them, another method, or leave speculative_config out")
        count = int(self.text.get("mtp_num_hidden_layers", self.text.get("num_nextn_predict_layers", 1)))
        if count != 1 or self.text.get("mtp_use_dedicated_embeddings"):
            raise ModelError(f"{self.path}: a head for multi-token prediction of {count} layers, or with embeddings of "
                             "its own, is not served; one layer and the decoder's embeddings are")
        model_config = self.read_config()
        if not model_config.state_layers:
            raise ModelError(f"{self.path}: speculative_config.method mtp is served for models with Gated DeltaNet "
                             "layers, and all layers of this one attend; take another method, or leave "
                             "speculative_config out")
        return LayerConfig(mixer=AttentionConfig(), channel=model_config.layers[-1].channel)


class Qwen35TextStrategy(HybridStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text",)

    def model_config(self, config: RawConfig) -> ModelConfig:
        return decoder_config(config, layers=_layers(config, self.has_experts), rope=hybrid_rope(config, _SECTION),
                              head_dim=HEAD_DIM)


class Qwen35MoETextStrategy(Qwen35TextStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe_text",)
    has_experts = True


class Qwen35Strategy(HybridStrategy, Qwen3VLStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5",)

    def model_config(self, config: RawConfig) -> ModelConfig:
        return decoder_config(
            config, layers=_layers(config, self.has_experts), rope=hybrid_rope(config, _SECTION), head_dim=HEAD_DIM,
            vision=read_vision(config.raw["vision_config"], ()), image_token_id=config.raw.get("image_token_id"))


class Qwen35MoEStrategy(Qwen35Strategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_moe",)
    has_experts = True


def hybrid_rope(config: RawConfig, section: tuple[int, int, int] | None = None) -> RopeConfig:
    head_dim = int(config.text.get("head_dim") or HEAD_DIM)
    return read_rope(config, section=section, rotary_share=_ROTARY_SHARE, head_dim=head_dim)


def _layers(config: RawConfig, has_experts: bool) -> list[LayerConfig]:
    channel = (read_moe(config, renormalise=True, has_shared=True) if has_experts
               else MLPConfig(intermediate_size=int(config.text["intermediate_size"])))
    return [LayerConfig(mixer=mixer, channel=channel) for mixer in hybrid_mixers(config)]


def hybrid_mixers(config: RawConfig) -> list[AttentionConfig | GatedDeltaNetConfig]:
    """The sequence mixer of each layer, by `layer_types`; the default is three Gated DeltaNet layers per attention."""
    text, count = config.text, config.num_layers
    interval = int(text.get("full_attention_interval", 4))
    types = text.get("layer_types") or [_LINEAR if (index + 1) % interval else _FULL for index in range(count)]
    check_layer_types(types, count, (_LINEAR, _FULL))
    if _FULL not in types:
        raise ModelError("layer_types names no full_attention layer, which is not supported: the KV cache's blocks are "
                         "what prompts are counted in")
    if not text.get("attn_output_gate", True):
        raise ModelError("attn_output_gate false is not supported: attention without a gate is no model of this family "
                         "that we know")
    if _LINEAR not in types:
        return [AttentionConfig()] * count
    delta = read_gated_delta(config)
    return [delta if kind == _LINEAR else AttentionConfig() for kind in types]


def read_gated_delta(config: RawConfig) -> GatedDeltaNetConfig:
    """Raises KeyError for a size that is missing, ModelError for sizes that cannot be."""
    text = config.text
    delta = GatedDeltaNetConfig(
        num_k_heads=int(text["linear_num_key_heads"]), num_v_heads=int(text["linear_num_value_heads"]),
        head_k_dim=int(text["linear_key_head_dim"]), head_v_dim=int(text["linear_value_head_dim"]),
        conv_kernel_size=int(text["linear_conv_kernel_dim"]))
    sizes = (delta.num_k_heads, delta.num_v_heads, delta.head_k_dim, delta.head_v_dim, delta.conv_kernel_size - 1)
    if min(sizes) < 1 or delta.num_v_heads % delta.num_k_heads:
        raise ModelError(f"Gated DeltaNet with {delta.num_k_heads} key heads of {delta.head_k_dim}, "
                         f"{delta.num_v_heads} value heads of {delta.head_v_dim} and a convolution of "
                         f"{delta.conv_kernel_size} is not possible: value heads are a multiple of key heads, and the "
                         "convolution is over 2 tokens at least")
    return delta
