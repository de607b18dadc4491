"""The description of a model, layer by layer, independent of field names. Knows no files, tensors or devices.

Strategies fill these in from config.json (config_reading.py has what families share); layers and runner read them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from npu_runner.request.pooling_params import CLASSIFY, Classes


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: kind, base and the kind's own parameters (`factor`, `beta_fast`, ...)."""

    kind: str = "default"
    theta: float = 10000.0
    parameters: dict[str, Any] = field(default_factory=dict)
    rotary_dim: int | None = None
    """Leading dims of a head that turn; None: all."""
    mrope_section: tuple[int, int, int] | None = None
    """Frequencies that time, height and width turn, where positions have three axes."""
    mrope_is_interleaved: bool = True
    """T H W T H W ... as Qwen3-VL has them, or one axis after the other as Qwen2-VL."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision tower: patches of one size, blocks of one width, a merger."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    hidden_act: str
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    rope_theta: float
    norm_eps: float = 1e-6
    """The epsilon of the blocks' norms, if the family reads it."""
    num_position_embeddings: int = 0
    """Places of the learned grid that is resampled to an image's; 0: there is none."""
    deepstack_layers: tuple[int, ...] = ()
    window_size: int | None = None
    """Pixels of a side of the windows that attention stays within, but for `full_attention_layers`."""
    full_attention_layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GatedVisionConfig(VisionConfig):
    """A tower of RMS norms and gated MLPs, as in GLM-4.1V and GLM-OCR."""

    merger_intermediate_size: int
    qkv_bias: bool
    bias: bool
    """Whether the other linears of a block have a bias."""
    has_head_norms: bool
    """Queries and keys of each head are normed before they turn."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """A sequence mixer over the paged cache, as far as a cache is planned for it; heads and head dim are the model's.

    What it computes is said by the class that the family builds (models/mixers/attention.py).
    """

    sliding_window: int | None = None
    """A token sees this many, itself included; None: all."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """A sequence mixer with one state a sequence (arXiv 2412.06464), beside a causal convolution."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """A channel mixer: down(silu(gate) * up)."""

    intermediate_size: int
    bias: bool = False
    is_fused: bool = False
    """The checkpoint has gate and up as one tensor, gate_up_proj, the gate's rows first."""


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A channel mixer of experts, of which each token sees `top_k`, weighted by its router."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    """Whether the top-k probabilities are divided by their sum."""
    shared_intermediate_size: int | None = None
    """Width of the expert that every token sees, behind a gate of its own; None: there is none."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer: what mixes tokens, and what mixes channels."""

    mixer: AttentionConfig | GatedDeltaNetConfig
    channel: MLPConfig | MoEConfig


@dataclass(frozen=True, kw_only=True)
class PoolingConfig(ABC):
    """The pooling of a prompt: a few float32 numbers from the final hidden state of its last token, instead of text.

    A subclass is a kind of head. checkpoint/pooling_files.py reads its files. A head with weights is a module of
    layers/heads.py, which `models.decoder.output_head` builds in place of the LM head: the network's `compute_logits`
    then takes hidden states (B, D) and returns the numbers (B, `num_values`), float32, on every rank.
    runner/pooling_step.py copies them to the host, and `CompletionOutput.pooled` holds those of one prompt.
    """

    task: ClassVar[str]
    """The task of an endpoint's rows (`RowBody.task`), and a value of the setting `task`."""
    has_head: ClassVar[bool] = True
    """False: the numbers are the hidden state itself."""

    @abstractmethod
    def num_values(self, hidden_size: int) -> int:
        """The number of values per prompt, if the request does not ask for fewer."""

    @abstractmethod
    def describe(self) -> str:
        """For the manifest of an output: another description is another output."""


@dataclass(frozen=True, kw_only=True)
class MessageSettings:
    """The form of a user message for the chat template, by the checkpoint's files."""

    is_flat: bool
    """The content is the text itself; else a list of one part."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = False


@dataclass(frozen=True, kw_only=True)
class VectorPooling(PoolingConfig):
    """A vector: the hidden state itself, cut and normalised."""

    task: ClassVar[str] = "embed"
    has_head: ClassVar[bool] = False

    is_normalised: bool
    """To length 1 (L2)."""
    dimensions: tuple[int, ...] | None = None
    """The lengths that a vector may be cut to; None: any."""
    default_prompt: str | None = None
    """Name of the text that sentence-transformers puts before every text by default; it is not added here."""
    messages: MessageSettings | None = None
    """Texts go through the chat template so; None: they are taken as they are."""

    def num_values(self, hidden_size: int) -> int:
        return hidden_size

    def describe(self) -> str:
        shown = "" if self.messages is None else f", texts through the chat template as {self.messages}"
        return f"last token, {'normalised' if self.is_normalised else 'not normalised'}{shown}"


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """Settings of query-document prompts, from the checkpoint's files."""

    is_saved: bool = False
    """They were saved with the checkpoint: then its template is made for pairs, though it may not name them."""
    template_name: str | None = None
    """The name of one of several chat templates; None is the default one."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the template."""
    add_generation_prompt: bool = True
    instruction: str | None = None
    """The default instruction for the template; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class ScorePooling(PoolingConfig):
    """The logit of a token (yes) less the logit of another (no): how well a document answers a query."""

    task: ClassVar[str] = "score"

    true_token_id: int
    false_token_id: int | None = None
    """None: nothing is taken off."""
    pairs: PairSettings = PairSettings()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens whose rows of the LM head are loaded."""
        return (self.true_token_id,) if self.false_token_id is None else (self.true_token_id, self.false_token_id)

    def num_values(self, hidden_size: int) -> int:
        return 1

    def describe(self) -> str:
        less = "" if self.false_token_id is None else f" less token {self.false_token_id}"
        return f"score: logit of token {self.true_token_id}{less}, last token"


@dataclass(frozen=True, kw_only=True)
class ClassPooling(PoolingConfig):
    """A logit for each class: the head, a matrix of the checkpoint, times the hidden state of the last token that is no
    padding."""

    task: ClassVar[str] = CLASSIFY

    classes: Classes
    pad_token_id: int | None = None
    """The padding token; trailing ones are skipped. None means that every token is read."""

    def num_values(self, hidden_size: int) -> int:
        return len(self.classes.labels)

    def describe(self) -> str:
        padding = "" if self.pad_token_id is None else f" that is not {self.pad_token_id}"
        return f"{len(self.classes.labels)} classes, {self.classes.activation}, last token{padding}"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The description of a decoder-only checkpoint, with its vision tower if it has one.

    `num_heads`, `num_kv_heads` and `head_dim` are those of the attention layers. A network of one's own may leave
    `layers` as plain as it likes; the runner reads which of them attend, and over what windows.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """SamplingParams fields that generation_config.json sets."""
    generation_not_served: dict[str, Any] = field(default_factory=dict)
    """Other fields of the file that are not supported."""
    vision: VisionConfig | None = None
    image_token_id: int | None = None
    source: str = ""
    """A hash of what config.json says of the language model: a family's layers may read more of it than stands here.
    Kept graphs are told apart by it."""
    pooling: PoolingConfig | None = None
    """None: it generates text. Else it gives a few numbers, and has no output head but a pooling head, or none."""

    mtp: LayerConfig | None = None
    """The layer of the head that drafts (multi-token prediction), where that is to be loaded; it attends."""
    hidden_state_layers: tuple[int, ...] = ()
    """The layers whose hidden states are returned: 0 the embeddings, `num_layers` behind the final norm, and between
    them the output of the layer before. The network appends them, in this order, to its final hidden states."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def all_layers(self) -> list[LayerConfig]:
        """The decoder's, and the layer of the head that drafts behind them."""
        return [*self.layers, *([] if self.mtp is None else [self.mtp])]

    @property
    def attention_layers(self) -> list[AttentionConfig]:
        """In their order, which is that of the KV cache."""
        return [layer.mixer for layer in self.all_layers if isinstance(layer.mixer, AttentionConfig)]

    @property
    def state_layers(self) -> list[GatedDeltaNetConfig]:
        """In their order, which is that of the state pool."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaNetConfig)]
