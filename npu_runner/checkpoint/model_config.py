"""What a model is, layer by layer, whatever its checkpoint called its fields. Knows no files, tensors or devices.

Strategies fill these in from config.json (config_reading.py has what families share); layers and runner read them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    """Of the blocks' norms, where the family reads it."""
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
    """Of the other products of a block."""
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
class PoolingConfig:
    """How one vector is made of a prompt: the last token's final hidden state, in float32."""

    is_normalised: bool
    """To length 1 (L2)."""
    dimensions: tuple[int, ...] | None = None
    """The lengths that a vector may be cut to; None: any."""
    default_prompt: str | None = None
    """Name of the text that sentence-transformers puts before every text by default; it is not added here."""

    def describe(self) -> str:
        return "last token, normalised" if self.is_normalised else "last token, not normalised"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a decoder-only checkpoint is, plus its vision tower if it has one.

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
    """What else it asks for, and is not done."""
    vision: VisionConfig | None = None
    image_token_id: int | None = None
    source: str = ""
    """A hash of what config.json says of the language model: a family's layers may read more of it than stands here.
    Kept graphs are told apart by it."""
    pooling: PoolingConfig | None = None
    """None: it generates text. Else it gives vectors, and has no output head."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_layers(self) -> list[AttentionConfig]:
        """In their order, which is that of the KV cache."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionConfig)]

    @property
    def state_layers(self) -> list[GatedDeltaNetConfig]:
        """In their order, which is that of the state pool."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaNetConfig)]
