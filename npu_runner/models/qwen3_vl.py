"""Qwen3-VL: the shared decoder under its checkpoint's names, beside the vision tower. Knows nothing of caches."""

from __future__ import annotations

from torch import nn

from npu_runner.layers.embedding import OutputHead
from npu_runner.layers.parallel import LayerContext
from npu_runner.model_config import ModelConfig
from npu_runner.models.decoder import CausalLM, Decoder
from npu_runner.models.qwen3_vl_vision import VisionTower


class _Qwen3VLBody(nn.Module):
    def __init__(self, config: ModelConfig, num_positions: int, context: LayerContext):
        super().__init__()
        assert config.vision is not None, "a qwen3_vl checkpoint has a vision_config"
        self.visual = VisionTower(config.vision, context)
        self.language_model = Decoder(config, num_positions, context)


class Qwen3VL(CausalLM):
    def __init__(self, config: ModelConfig, num_positions: int, context: LayerContext):
        nn.Module.__init__(self)
        self.model = _Qwen3VLBody(config, num_positions, context)
        self.lm_head = OutputHead(
            "lm_head", config.vocab_size, config.hidden_size, context,
            tied_to=self.decoder.embed_tokens if config.tie_word_embeddings else None,
        )

    @property
    def decoder(self) -> Decoder:
        return self.model.language_model

    @property
    def visual(self) -> VisionTower:
        return self.model.visual
