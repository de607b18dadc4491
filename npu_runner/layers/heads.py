"""Token embedding, LM head, and heads of models that pool. Knows nothing of steps.

Rows of a vocabulary are cut over tensor-parallel ranks. A head that pools is whole on every rank, so there is no
collective. It takes hidden states (B, D) in the model's dtype, and returns (B, W) float32 in the place of logits.

T tokens, B rows whose logits or numbers are wanted, D hidden size, V vocabulary, W numbers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.layers.parallel import LayerContext, WeightPart


class _VocabularyRows(nn.Module):
    """A (V, D) matrix of which each rank holds equal rows, the last rank's padded with zeros."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, context: LayerContext):
        super().__init__()
        self.tp = context.tp
        self.vocab_size = vocab_size
        rows = -(-vocab_size // self.tp.size)
        self.first_row = min(vocab_size, self.tp.rank * rows)
        self.num_rows = min(vocab_size - self.first_row, rows)
        self.weight = context.parameter(rows, hidden_size)
        if self.num_rows < rows:
            self.weight.zero_()
        self.weight_parts = {
            "weight": [WeightPart(f"{name}.weight", (vocab_size, hidden_size), dim=0, start=self.first_row,
                                  length=self.num_rows)]
        }


class TokenEmbedding(_VocabularyRows):
    def forward(self, input_ids_T: Tensor) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(input_ids_T, self.weight)
        rows_T = input_ids_T - self.first_row
        is_here_T = (rows_T >= 0) & (rows_T < self.num_rows)
        x_TD = F.embedding(rows_T * is_here_T, self.weight) * is_here_T[:, None].to(self.weight.dtype)
        return self.tp.all_reduce(x_TD)


class OutputHead(_VocabularyRows):
    """Logits over the whole vocabulary, on every rank. With `tied_to`, the embedding's own rows serve."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, context: LayerContext,
                 tied_to: TokenEmbedding | None = None):
        if tied_to is None:
            super().__init__(name, vocab_size, hidden_size, context)
        else:
            nn.Module.__init__(self)
            self.tp = context.tp
            self.vocab_size = vocab_size
            self.weight = tied_to.weight
            self.weight_parts = {}
        self.ops = context.ops

    def forward(self, hidden_BD: Tensor) -> Tensor:
        logits_BV = self.tp.all_gather_last_dim(self.ops.linear(hidden_BD, self.weight, None))
        return logits_BV[:, : self.vocab_size] if self.tp.size > 1 else logits_BV


class ClassHead(nn.Module):
    """A logit for each of W classes, from the checkpoint's tensor score.weight (W, D), which is kept in float32."""

    def __init__(self, num_classes: int, hidden_size: int, context: LayerContext):
        super().__init__()
        self.weight = context.parameter(num_classes, hidden_size, dtype=torch.float32)
        self.weight_parts = {"weight": [WeightPart("score.weight", (num_classes, hidden_size))]}

    def forward(self, hidden_BD: Tensor) -> Tensor:
        return F.linear(hidden_BD.float(), self.weight)


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
        # A multiplication and a sum: some devices round the inputs of a matmul, even in float32.
        return (hidden_BD.float() * self.difference_D).sum(dim=1, keepdim=True)
