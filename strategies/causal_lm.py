"""The default strategy: text-only decoders. Knows nothing of pictures."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from npu_runner.layers.parallel import LayerContext
from npu_runner.model_config import ModelConfig
from npu_runner.models.decoder import CausalLM
from npu_runner.weights.loader import load_weights
from npu_runner.weights.reader import CheckpointReader
from strategies.base import LoadStrategy


class CausalLMStrategy(LoadStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("llama", "qwen2", "qwen3")

    def build(self, model_config: ModelConfig, num_positions: int, context: LayerContext) -> nn.Module:
        return CausalLM(model_config, num_positions, context)

    def load_weights(self, model: nn.Module, reader: CheckpointReader, model_config: ModelConfig) -> int:
        # A tied checkpoint may store the head once more.
        ignored = ("lm_head.weight",) if model_config.tie_word_embeddings else ()
        return load_weights(model, reader, ignored=ignored)
