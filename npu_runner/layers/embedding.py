"""Token embeddings and the output head, the vocabulary cut over the ranks. Know nothing of the model between them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.layers.parallel import LayerContext, WeightPart

# T tokens, D hidden size, V vocabulary, B rows that want logits


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
