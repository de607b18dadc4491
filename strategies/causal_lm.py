"""What every family on the shared decoder is built and loaded by. A family's own file says how its config is read.

Knows no family, nothing of pictures.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Set
from typing import ClassVar

from torch import nn

from npu_runner.checkpoint.config_reading import RawConfig, reading_config
from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.layers.parallel import LayerContext
from npu_runner.layers.weights_loader import load_weights
from npu_runner.models.decoder import CausalLM
from npu_runner.strategies.base import LoadStrategy


class CausalLMStrategy(LoadStrategy):
    left_out_prefixes: ClassVar[tuple[str, ...]] = ()
    """Tensors whose names begin so are of parts that we know and do without."""

    @abstractmethod
    def model_config(self, config: RawConfig) -> ModelConfig:
        """What config.json says. A KeyError, TypeError or ValueError in here becomes a ModelError with the file."""

    def read_config(self) -> ModelConfig:
        with reading_config(self.path) as config:
            return self.model_config(config)

    def build(self, model_config: ModelConfig, num_positions: int, context: LayerContext) -> nn.Module:
        return CausalLM(model_config, num_positions, context)

    def load_weights(self, model: nn.Module, reader: CheckpointReader, model_config: ModelConfig) -> int:
        # A tied checkpoint may store the head once more; one that vectors are pooled from may have one nobody needs.
        ignored = ("lm_head.weight",) if model_config.tie_word_embeddings or model_config.pooling else ()
        return load_weights(model, reader, ignored=ignored, ignored_prefixes=self.left_out_prefixes,
                            renamed=self.renamed(reader.names))

    def renamed(self, names: Set[str]) -> Mapping[str, str]:
        """How the checkpoint's `names` begin, by how ours do: a base model saved alone, as embedding models are, has
        them without the "model." in front."""
        return {} if any(name.startswith("model.") for name in names) else {"model.": ""}
