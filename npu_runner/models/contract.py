"""The contract of a network: three methods. Knows no layer; a plug-in's network fulfils it by having them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from npu_runner.platforms.step_inputs import AttentionMetadata

# T tokens in the step, M image tokens, B rows that want logits, D hidden size, V vocabulary, W numbers of a row


@runtime_checkable
class LanguageModel(Protocol):
    """An nn.Module with one `layers.attention.PagedAttention` for each of `ModelConfig.attention_layers`, and one
    `layers.gated_delta.GatedDelta` for each of its `state_layers`. Its forward waits for nothing on the host: steps of
    decode, and prefills, may be captured."""

    def embed(self, input_ids_T: Tensor) -> Tensor:
        """Returns (T, D)."""

    def __call__(self, x_TD: Tensor, positions: Tensor, metadata: AttentionMetadata,
                 deepstack: tuple[Tensor, list[Tensor]] | None = None) -> Tensor:
        """Final hidden states (T, D) of embedded tokens; `deepstack` comes with images only (models/decoder.py).

        With N of `ModelConfig.hidden_state_layers`, and without `metadata.ends`: (T, (1 + N) * D), theirs behind."""

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        """(B, V); of a model with a pooling head its numbers, (B, W) float32 (`PoolingConfig`)."""


@runtime_checkable
class ModelOfEnds(LanguageModel, Protocol):
    """One that takes `AttentionMetadata.ends`, and then returns their hidden states alone, (B, D). Of others a prefill
    computes all rows of all layers."""

    accepts_ends: bool


@runtime_checkable
class DraftingModel(LanguageModel, Protocol):
    """One whose head for multi-token prediction is loaded; that has a `PagedAttention` of its own, the last one."""

    def draft(self, next_TD: Tensor, hidden_TD: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """(T, D), whose logits are those of the token after next. `next_TD`: the embedded next tokens; `hidden_TD`: the
        final hidden states of tokens at `positions`, or what this returned for them."""
