"""The decoder that all families share: embeddings, the family's layers, a norm, a head; optionally beside a vision
tower, and with a head that drafts. Knows no tower, no steps and no cache.

T tokens in the step, D hidden size, R dims of a head that turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import (
    AttentionConfig,
    ClassPooling,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    ScorePooling,
)
from npu_runner.layers.heads import ClassHead, OutputHead, TokenEmbedding, TokenScoreHead
from npu_runner.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from npu_runner.layers.norm import RMSNorm
from npu_runner.layers.parallel import LayerContext
from npu_runner.layers.rotary import RotaryTable
from npu_runner.models.mixers.attention import DecoderAttention
from npu_runner.models.mixers.gated_delta_net import GatedDeltaNet
from npu_runner.models.mixers.mlp import DecoderMLP, SparseMoE
from npu_runner.platforms.quantised import RoundedRows
from npu_runner.platforms.step_inputs import AttentionMetadata

MakeAttention: TypeAlias = Callable[[ModelConfig, AttentionConfig, int, LayerContext], nn.Module]
MakeLayer: TypeAlias = Callable[[ModelConfig, LayerConfig, int, LayerContext], "DecoderLayer"]
"""The number counts the layers of this layer's kind before it: its place in the KV cache or state pool."""


class DecoderLayer(nn.Module):
    """A sequence mixer and a channel mixer, each behind a norm and added to what came in. A family whose norms stand
    elsewhere derives a layer with other `norms` and another `forward`."""

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    """Norms of the hidden states, by the checkpoint's names."""
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    """The class of these norms and of the decoder's final norm."""
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, config: ModelConfig, mixer: nn.Module, channel: nn.Module, context: LayerContext):
        super().__init__()
        self.defers_all_reduce = False
        """The norms behind both mixers all-reduce the outputs of these."""
        is_delta = isinstance(mixer, GatedDeltaNet)
        self.self_attn = None if is_delta else mixer
        self.linear_attn = mixer if is_delta else None
        self.mlp = channel
        for name in self.norms:
            self.add_module(name, self.norm_class(config.hidden_size, config.rms_norm_eps, context))

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None, cos_TR: Tensor, sin_TR: Tensor,
                metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """(output of the channel mixer, residual to add to it); what comes next adds the two.

        With `metadata.ends`, in a prefill's last layer, `mix` has fewer rows than came in: so must have what is added
        to its output (`AttentionMetadata.of_ends`), and both results.
        """
        if residual_TD is None:
            x_TD, residual_TD = self.input_layernorm(x_TD), x_TD
        else:
            x_TD, residual_TD = self.input_layernorm.add_forward(x_TD, residual_TD)
        x_TD = self.behind_mixer(self.mix(x_TD, cos_TR, sin_TR, metadata))
        x_TD, residual_TD = self.post_attention_layernorm.add_forward(x_TD, metadata.of_ends(residual_TD))
        return self.behind_channel(self.mlp(x_TD)), residual_TD

    def behind_mixer(self, x_TD: Tensor) -> Tensor:
        """The output of the sequence mixer, as it is added to the residual."""
        return x_TD

    def behind_channel(self, x_TD: Tensor) -> Tensor:
        """The same of the channel mixer."""
        return x_TD

    def defer_all_reduce(self, next_norm: RMSNorm) -> None:
        """Let the norms behind the mixers do their all-reduce; `next_norm` is that of the next layer."""
        self.defers_all_reduce = self.post_attention_layernorm.all_reduces_input = next_norm.all_reduces_input = True
        for module in (self.self_attn, self.linear_attn, self.mlp):
            for each in module.modules() if module is not None else ():
                if isinstance(each, (RowParallelLinear, SparseMoE)):
                    each.reduces = False

    def weights_are_loaded(self) -> None:
        """Connect the norms in front of mixers with the matmul that reads them, if one does. A layer whose `forward`
        reads them otherwise overrides this."""
        if "input_layernorm" in self.norms:
            self.input_layernorm.feed(self.self_attn.qkv_proj if isinstance(self.self_attn, DecoderAttention) else None)
            self.post_attention_layernorm.feed(self.mlp.gate_up_proj if isinstance(self.mlp, DecoderMLP) else None)

    def mix(self, x_TD: Tensor | RoundedRows, cos_TR: Tensor, sin_TR: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Output of the sequence mixer, of the rows that the layer goes on with."""
        if self.linear_attn is not None:
            return metadata.of_ends(self.linear_attn(x_TD, metadata))
        assert self.self_attn is not None, "a layer has one of the two"
        return self.self_attn(x_TD, cos_TR, sin_TR, metadata)


def make_layer(config: ModelConfig, layer: LayerConfig, cache_layer: int, context: LayerContext, *,
               attention: MakeAttention, gated_delta: type[GatedDeltaNet] = GatedDeltaNet,
               layer_class: type[DecoderLayer] = DecoderLayer) -> DecoderLayer:
    """Build the layer that `layer` describes; `attention` and `gated_delta` make the mixer of its kind."""
    mixer = (attention(config, layer.mixer, cache_layer, context) if isinstance(layer.mixer, AttentionConfig)
             else gated_delta("linear_attn", config, layer.mixer, cache_layer, context))
    return layer_class(config, mixer, _channel_mixer(config, layer.channel, context), context)


def _channel_mixer(config: ModelConfig, channel: MLPConfig | MoEConfig, context: LayerContext) -> nn.Module:
    if isinstance(channel, MoEConfig):
        return SparseMoE(config.hidden_size, channel, context)
    return DecoderMLP(config.hidden_size, channel, context)


class Decoder(nn.Module):
    """Embeddings to final norm. `num_positions` bounds the positions that will be asked for."""

    def __init__(self, config: ModelConfig, num_positions: int, context: LayerContext, layer: MakeLayer):
        super().__init__()
        self.embed_tokens = TokenEmbedding("embed_tokens", config.vocab_size, config.hidden_size, context)
        layers: list[DecoderLayer] = []
        counts: Counter[bool] = Counter()
        for described in config.layers:
            attends = isinstance(described.mixer, AttentionConfig)
            layers.append(layer(config, described, counts[attends], context))
            counts[attends] += 1
        self.layers = nn.ModuleList(layers)
        self.hidden_state_layers = config.hidden_state_layers
        self.norm = layers[-1].norm_class(config.hidden_size, config.rms_norm_eps, context)
        self.rotary = RotaryTable(config, num_positions, dtype=context.dtype, device=context.device)
        # A custom all-reduce does not only sum. States of layers are sums that are read here.
        is_plain = all(type(layer) is DecoderLayer for layer in layers) and not config.hidden_state_layers
        if context.tp.custom_all_reduce is not None and is_plain:
            for layer, norm in zip(layers, [*(each.input_layernorm for each in layers[1:]), self.norm], strict=True):
                layer.defer_all_reduce(norm)

    def forward(self, x_TD: Tensor, positions: Tensor, metadata: AttentionMetadata,
                deepstack: tuple[Tensor, list[Tensor]] | None = None) -> Tensor:
        """Final hidden states (T, D) of embedded tokens `x_TD`; with `metadata.ends` theirs (B, D).

        `deepstack`: rows (T,) int32, and a level (M + 1, D) for each of the first layers. After such a layer every
        token adds its row. The last row is zeros, for tokens of no image; DeepStack, arXiv 2406.04334.

        Without ends the states of `hidden_state_layers` are behind the final ones (T, (1 + N) * D).
        """
        cos_TR, sin_TR = self.rotary(positions)
        residual_TD = None
        rows_T, levels = deepstack if deepstack is not None else (None, [])
        in_whole, last = metadata.without_ends(), len(self.layers) - 1
        wanted = self.hidden_state_layers if metadata.ends is None else ()
        # Copies: a layer may add to its residual in place.
        kept = {0: x_TD.clone()} if 0 in wanted else {}
        for index, layer in enumerate(self.layers):
            of_layer = metadata if index == last else in_whole
            x_TD, residual_TD = layer(x_TD, residual_TD, cos_TR, sin_TR, of_layer)
            if index + 1 in wanted:  # before DeepStack's rows, as in transformers
                kept[index + 1] = x_TD + residual_TD
            if index < len(levels) and rows_T is not None:
                # Gathered and added to all rows: scattering adds sorts its indices on some devices.
                level_TD = F.embedding(of_layer.of_ends(rows_T), levels[index])
                if layer.defers_all_reduce:
                    residual_TD = residual_TD + level_TD
                else:
                    x_TD = x_TD + level_TD
        assert metadata.ends is None or len(x_TD) == len(metadata.ends.rows_B), "the last layer leaves rows out"
        hidden_TD = self.norm.add_forward(x_TD, residual_TD)[0]
        kept[last + 1] = hidden_TD
        return torch.cat([hidden_TD, *(kept[layer] for layer in wanted)], dim=1) if wanted else hidden_TD


def output_head(config: ModelConfig, decoder: Decoder, context: LayerContext, *, place: str) -> nn.Module | None:
    """The module that `compute_logits` calls: the LM head or a pooling head; None if hidden states are pooled directly.
    `place`: the decoder's name in the network."""
    pooling = config.pooling
    if isinstance(pooling, ScorePooling):
        rows = f"{place}.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        return TokenScoreHead(rows, config.vocab_size, config.hidden_size, pooling.token_ids, context)
    if isinstance(pooling, ClassPooling):
        return ClassHead(len(pooling.classes.labels), config.hidden_size, context)
    if pooling is not None:
        assert not pooling.has_head, f"{type(pooling).__name__} has a head, and none is built for it"
        return None
    return OutputHead("lm_head", config.vocab_size, config.hidden_size, context,
                      tied_to=decoder.embed_tokens if config.tie_word_embeddings else None)


class MTPHead(nn.Module):
    """The head for multi-token prediction of Qwen3.5, 3.6, 3.8 and Qwen3-Next, under its checkpoints' names.

    For a token at place i it takes the decoder's final hidden state, behind its last norm as the output head reads it,
    and the embedded token i + 1. Both are normed, put side by side, embedding first, and made one by `fc`; a decoder
    layer and a norm follow. The decoder's output head makes logits of the result: those of token i + 2. With the result
    in the place of the hidden state it goes on to token i + 3.

    `layer` attends over keys and values of its own, at the same places; norms are of the class `norm`.
    """

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


def draft_head(config: ModelConfig, context: LayerContext, layer: MakeLayer) -> MTPHead | None:
    """The MTP head that `draft` calls, if it is loaded. Its KV cache layer follows those of the decoder."""
    if config.mtp is None:
        return None
    made = layer(config, config.mtp, len(config.attention_layers) - 1, context)
    return MTPHead(config, made, made.norm_class, context)


class CausalLM(nn.Module):
    """A text-only checkpoint: decoder and output head, and a head that drafts where that is wanted."""

    accepts_ends = True

    def __init__(self, config: ModelConfig, num_positions: int, context: LayerContext, layer: MakeLayer):
        super().__init__()
        self.model = Decoder(config, num_positions, context, layer)
        self.lm_head = output_head(config, self.model, context, place="model")
        self.mtp = draft_head(config, context, layer)

    @property
    def decoder(self) -> Decoder:
        return self.model

    def embed(self, input_ids_T: Tensor) -> Tensor:
        return self.decoder.embed_tokens(input_ids_T)

    def forward(self, x_TD: Tensor, positions: Tensor, metadata: AttentionMetadata,
                deepstack: tuple[Tensor, list[Tensor]] | None = None) -> Tensor:
        """See Decoder.forward."""
        return self.decoder(x_TD, positions, metadata, deepstack)

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        assert self.lm_head is not None, "vectors are hidden states: nothing is computed of them"
        return self.lm_head(hidden_BD)  # type: ignore[no-any-return]

    def draft(self, next_TD: Tensor, hidden_TD: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """See DraftingModel.draft."""
        assert self.mtp is not None, "the head was not asked for"
        return self.mtp(next_TD, hidden_TD, positions, metadata, self.decoder.rotary)  # type: ignore[no-any-return]


class _Body(nn.Module):
    def __init__(self, config: ModelConfig, tower: nn.Module, num_positions: int, context: LayerContext,
                 layer: MakeLayer):
        super().__init__()
        self.visual = tower
        self.language_model = Decoder(config, num_positions, context, layer)


class VisionLanguageModel(CausalLM):
    """The decoder under its checkpoint's names, beside a tower. The tower takes patches (P, X), the images' grids and
    the result of its `places`. It returns main embeddings (M, D) and a list of deepstack levels."""

    def __init__(self, config: ModelConfig, tower: nn.Module, num_positions: int, context: LayerContext,
                 layer: MakeLayer):
        nn.Module.__init__(self)
        self.model = _Body(config, tower, num_positions, context, layer)
        self.lm_head = output_head(config, self.decoder, context, place="model.language_model")
        self.mtp = draft_head(config, context, layer)

    @property
    def decoder(self) -> Decoder:
        return self.model.language_model

    @property
    def visual(self) -> nn.Module:
        return self.model.visual
