"""Builds and loads every family on the shared decoder. A family's own file reads its config and names its attention and
layer classes. Knows no family and nothing of images.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Set
from functools import cached_property, partial
from typing import Any, ClassVar

from torch import nn

from npu_runner.checkpoint.config_reading import RawConfig, reading_config
from npu_runner.checkpoint.model_config import LayerConfig, ModelConfig
from npu_runner.checkpoint.weights_reader import WeightsReader
from npu_runner.layers.parallel import LayerContext
from npu_runner.layers.weights_loader import load_weights
from npu_runner.models.decoder import CausalLM, DecoderLayer, make_layer
from npu_runner.models.mixers.attention import DecoderAttention
from npu_runner.models.mixers.gated_delta_net import GatedDeltaNet
from npu_runner.strategies.base import LoadStrategy


class CausalLMStrategy(LoadStrategy):
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    """The layer class sets the order of norms and residual additions around the two mixers."""
    attention_class: ClassVar[type[DecoderAttention]] = DecoderAttention
    gated_delta_class: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet
    returns_hidden_states = True
    left_out_prefixes: ClassVar[tuple[str, ...]] = ()
    """Tensors whose names begin so belong to known parts that are not used."""

    @abstractmethod
    def model_config(self, config: RawConfig) -> ModelConfig:
        """Read config.json. A KeyError, TypeError or ValueError in here becomes a ModelError that names the file."""

    def attention_settings(self) -> dict[str, Any]:
        """Arguments of `attention_class` beside the model's sizes. `attention_bias` of the file applies to all linears
        of attention, as in most families."""
        return dict.fromkeys(("qkv_bias", "o_bias"), bool(self.text.get("attention_bias", False)))

    def read_config(self) -> ModelConfig:
        with reading_config(self.path) as config:
            return self.model_config(config)

    @cached_property
    def text(self) -> dict[str, Any]:
        """The language model's part of config.json."""
        with reading_config(self.path) as config:
            return config.text

    def build(self, model_config: ModelConfig, num_positions: int, context: LayerContext) -> nn.Module:
        return CausalLM(model_config, num_positions, context, self.layer)

    def layer(self, config: ModelConfig, layer: LayerConfig, cache_layer: int, context: LayerContext) -> DecoderLayer:
        """One layer of the decoder. `cache_layer` counts the layers of its kind before it."""
        attention = partial(self.attention_class, **self.attention_settings())
        return make_layer(config, layer, cache_layer, context, attention=attention, gated_delta=self.gated_delta_class,
                          layer_class=self.layer_class)

    def load_weights(self, model: nn.Module, reader: WeightsReader, model_config: ModelConfig) -> int:
        # A tied checkpoint may store the head once more; an embedding model may have an unused one.
        ignored = ("lm_head.weight",) if model_config.tie_word_embeddings or model_config.pooling else ()
        return load_weights(model, reader, ignored=ignored, ignored_prefixes=self.left_out(model_config),
                            renamed=self.renamed(reader.names))

    def left_out(self, model_config: ModelConfig) -> tuple[str, ...]:
        """`left_out_prefixes`, of a checkpoint of this config."""
        return self.left_out_prefixes

    def renamed(self, names: Set[str]) -> Mapping[str, str]:
        """Prefixes of the checkpoint's `names` by ours. A base model that was saved alone, such as an embedding model,
        has no prefix "model."."""
        return {} if any(name.startswith("model.") for name in names) else {"model.": ""}
