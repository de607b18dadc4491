"""The forward of one decode step as a module: what graphs are made of. Knows nothing of how it is compiled.

B sequences of the step, W blocks per sequence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from npu_runner.models.decoder import CausalLM
from npu_runner.platforms.base import AttentionMetadata


class DecodeStep(nn.Module):
    """Token ids to logits. A module, so that graph caches find the parameters by name."""

    def __init__(self, model: CausalLM):
        super().__init__()
        self.model = model

    def forward(self, input_ids_B: Tensor, positions_B: Tensor, slot_mapping_B: Tensor, context_lens_B: Tensor,
                block_tables_BW: Tensor, plan: Any = None) -> Tensor:
        """Logits (B, vocabulary). `plan` is what the attention backend prepared for an eager step."""
        metadata = AttentionMetadata(False, slot_mapping_B, context_lens_B, block_tables_BW, plan)
        hidden_BD = self.model(self.model.embed(input_ids_B), positions_B, metadata)
        return self.model.compute_logits(hidden_BD)
