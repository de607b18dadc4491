"""The forward of one decode step as a module: what graphs are made of. Knows nothing of how it is compiled.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from npu_runner.models.contract import LanguageModel
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs


class DecodeStep(nn.Module):
    """Slots to logits of the tokens in them. A module, so that graph caches find the parameters by name."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.model = model

    def forward(self, inputs: StepInputs, plan: Any = None) -> Tensor:
        """Logits (B, vocabulary). `plan` is what the attention backend prepared for an eager step."""
        metadata = AttentionMetadata.of(inputs, plan, is_prefill=False)
        input_ids_B = inputs.tokens.index_select(0, inputs.state_slots)
        hidden_BD = self.model(self.model.embed(input_ids_B), inputs.positions, metadata)
        return self.model.compute_logits(hidden_BD)
