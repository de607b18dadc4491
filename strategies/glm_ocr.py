"""GLM-OCR: GLM-4.1V's decoder without biases, and a tower with norms of heads and without a learned grid."""

from __future__ import annotations

from typing import Any, ClassVar

from npu_runner.checkpoint.model_config import GatedVisionConfig, ModelConfig
from npu_runner.strategies.glm4v import gated_tower_fields
from npu_runner.strategies.glm46v import Glm46vStrategy


class GlmOcrStrategy(Glm46vStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("glm_ocr",)

    def vision(self, raw: dict[str, Any]) -> GatedVisionConfig:
        fields = gated_tower_fields(raw)
        has_bias = bool(raw.get("attention_bias", True))
        return GatedVisionConfig(intermediate_size=int(raw["intermediate_size"]),
                                 merger_intermediate_size=fields["out_hidden_size"] * fields["in_channels"],
                                 qkv_bias=has_bias, bias=has_bias, has_head_norms=True, **fields)

    def left_out(self, model_config: ModelConfig) -> tuple[str, ...]:
        """The head that predicts several tokens at once lies behind the last layer, as one more."""
        return (f"model.language_model.layers.{model_config.num_layers}.",)

    def attention_settings(self) -> dict[str, Any]:
        return {}
