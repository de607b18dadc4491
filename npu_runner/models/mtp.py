"""The head for multi-token prediction of Qwen3.5, 3.6, 3.8 and Qwen3-Next, under its checkpoints' names: what comes
after the next token. Knows no steps and no cache.

For a token at place i it takes the decoder's final hidden state, behind its last norm as the output head reads it, and
the embedded token i + 1. Both are normed, put side by side, embedding first, and made one by `fc`; a decoder layer and
a norm follow. The decoder's output head makes logits of the result: those of token i + 2. With the result in the place
of the hidden state it goes on to token i + 3. Its layer attends over keys and values of its own, at the same places.

T tokens in the step, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.layers.linear import ColumnParallelLinear, OutputPart
from npu_runner.layers.norm import RMSNorm
from npu_runner.layers.parallel import LayerContext
from npu_runner.layers.rotary import RotaryTable
from npu_runner.platforms.step_inputs import AttentionMetadata


class MTPHead(nn.Module):
    """`layer` is a decoder layer that attends, with a place of its own in the KV cache; norms are of the class
    `norm`."""

    def __init__(self, config: ModelConfig, layer: nn.Module, norm: type[RMSNorm], context: LayerContext):
        super().__init__()
        size = config.hidden_size
        # Whole on every rank: it is read once a step, and small beside the decoder.
        self.fc = ColumnParallelLinear(2 * size, [OutputPart("fc", size, 0, size)], bias=False, context=context)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(size, config.rms_norm_eps, context) for _ in range(3))
        self.layers = nn.ModuleList([layer])

    def forward(self, next_TD: Tensor, hidden_TD: Tensor, positions: Tensor, metadata: AttentionMetadata,
                rotary: RotaryTable) -> Tensor:
        """See DraftingModel.draft (models/contract.py)."""
        both_T2D = torch.cat([self.pre_fc_norm_embedding(next_TD), self.pre_fc_norm_hidden(hidden_TD)], dim=-1)
        cos_TR, sin_TR = rotary(positions)
        x_TD, residual_TD = self.layers[0](self.fc(both_T2D), None, cos_TR, sin_TR, metadata)
        return self.norm.add_forward(x_TD, residual_TD)[0]
