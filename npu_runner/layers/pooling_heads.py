"""Heads of models that pool: a few numbers of a final hidden state, in float32, in the place of logits.

A head takes hidden states (B, D) in the model's dtype, and returns (B, W) float32. It is whole on every rank, so there
is no collective. Knows nothing of steps or of what the numbers mean.

B rows whose prompt has ended, D hidden size, V vocabulary, W numbers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from npu_runner.layers.parallel import LayerContext, WeightPart


class TokenScoreHead(nn.Module):
    """The logit of the first token less that of the second, if there is one (W = 1).

    Of the output head only these tokens' rows are loaded, from the checkpoint's tensor `name` (V, D).
    """

    def __init__(self, name: str, vocab_size: int, hidden_size: int, token_ids: Sequence[int], context: LayerContext):
        super().__init__()
        self.weight = context.parameter(len(token_ids), hidden_size)
        self.weight_parts = {
            "weight": [WeightPart(name, (vocab_size, hidden_size), dim=0, start=token_id, length=1, target_start=row)
                       for row, token_id in enumerate(token_ids)]
        }
        self.difference_D = torch.zeros(hidden_size, dtype=torch.float32, device=context.device)

    def weights_are_loaded(self) -> None:
        """One row stands for both: their difference, taken in float32."""
        rows = self.weight.float()
        self.difference_D.copy_(rows[0] if len(rows) == 1 else rows[0] - rows[1])

    def forward(self, hidden_BD: Tensor) -> Tensor:
        # A product and a sum: some devices round the inputs of a matrix product, even of float32.
        return (hidden_BD.float() * self.difference_D).sum(dim=1, keepdim=True)
