"""A decoder that sees: the shared one under its checkpoint's names, beside a vision tower. Knows no tower, no cache."""

from __future__ import annotations

from torch import nn

from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.decoder import CausalLM, Decoder, output_head


class _Body(nn.Module):
    def __init__(self, config: ModelConfig, tower: nn.Module, num_positions: int, context: LayerContext):
        super().__init__()
        self.visual = tower
        self.language_model = Decoder(config, num_positions, context)


class VisionLanguageModel(CausalLM):
    """`tower`: patches (P, X), the pictures' grids and what its `places` makes of these, to main embeddings (M, D) and
    a list of deepstack levels."""

    def __init__(self, config: ModelConfig, tower: nn.Module, num_positions: int, context: LayerContext):
        nn.Module.__init__(self)
        self.model = _Body(config, tower, num_positions, context)
        self.lm_head = output_head(config, self.decoder, context)

    @property
    def decoder(self) -> Decoder:
        return self.model.language_model

    @property
    def visual(self) -> nn.Module:
        return self.model.visual
