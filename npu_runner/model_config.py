"""The one reader of checkpoint-config differences. Knows file formats and defaults; nothing of tensors or devices.

Everything else sees a `ModelConfig`, whatever the checkpoint called its fields or where it nested them.
Field meanings and defaults follow the configuration classes of Hugging Face transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_runner.checkpoint_files import require_json
from npu_runner.errors import ModelError
from npu_runner.generation_config import GenerationConfig, read_generation_config, token_ids

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_vl")
_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "half": "float16"}
# What the transformers configuration classes assume when a field is absent.
_HEAD_DIM_DEFAULT = {"qwen3": 128, "qwen3_vl": 128}
_THETA_DEFAULT = {"qwen3_vl": 500000.0}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: kind, base and the kind's own parameters (`factor`, `beta_fast`, ...)."""

    kind: str = "default"
    theta: float = 10000.0
    parameters: dict[str, Any] = field(default_factory=dict)
    mrope_section: tuple[int, int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The Qwen3-VL vision tower."""

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
    num_position_embeddings: int
    deepstack_layers: tuple[int, ...]
    rope_theta: float


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a decoder-only checkpoint is, plus its vision tower if it has one."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype: str
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """SamplingParams fields that generation_config.json sets."""
    generation_not_served: dict[str, Any] = field(default_factory=dict)
    """What else it asks for, and is not done."""
    vision: VisionConfig | None = None
    image_token_id: int | None = None


def read_model_config(path: Path, *, like: str | None = None) -> ModelConfig:
    """Read config.json and generation_config.json of the checkpoint folder `path`.

    `like`: read its fields as those of this model_type, whatever it calls itself; for strategies of other packages.

    Raises ModelError for a missing or broken file, an unsupported model_type, or a feature we would get wrong.
    """
    raw = require_json(path, "config.json")
    model_type = like or raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"{path}: model_type {model_type!r} is not supported; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    try:
        return _build({**raw, "model_type": model_type}, read_generation_config(path), path / "config.json")
    except KeyError as missing:
        raise ModelError(f"{path / 'config.json'}: field {missing} is missing for model_type {model_type!r}") from None
    except (TypeError, ValueError) as broken:
        raise ModelError(f"{path / 'config.json'}: {broken}") from broken


def _build(raw: dict[str, Any], generation: GenerationConfig, path: Path) -> ModelConfig:
    model_type = raw["model_type"]
    text = raw.get("text_config", raw)
    quantised = raw.get("quantization_config") or text.get("quantization_config")
    if quantised:
        raise ModelError(f"the weights are quantised ({quantised['quant_method']}), which is not supported; take the "
                         "checkpoint in bfloat16 or float16")
    hidden_act = text.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise ModelError(f"hidden_act {hidden_act!r} is not supported in the language model; supported is silu")
    num_heads = int(text["num_attention_heads"])
    head_dim = text.get("head_dim") or _HEAD_DIM_DEFAULT.get(model_type) or int(text["hidden_size"]) // num_heads
    attention_bias = bool(text.get("attention_bias", False))
    is_qwen2 = model_type == "qwen2"
    return ModelConfig(
        model_type=model_type,
        vocab_size=int(text["vocab_size"]),
        hidden_size=int(text["hidden_size"]),
        intermediate_size=int(text["intermediate_size"]),
        num_layers=int(text["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=int(head_dim),
        max_position_embeddings=int(text["max_position_embeddings"]),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        hidden_act=hidden_act,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        qkv_bias=is_qwen2 or attention_bias,
        o_bias=attention_bias and not is_qwen2,
        mlp_bias=bool(text.get("mlp_bias", False)) and model_type == "llama",
        qk_norm=model_type in ("qwen3", "qwen3_vl"),
        rope=_rope(model_type, text),
        dtype=_dtype(raw, text),
        sliding_window=_sliding_window(text),
        eos_token_ids=_eos(raw, text, generation, path),
        generation_defaults=generation.defaults,
        generation_not_served=generation.not_served,
        vision=_vision(raw["vision_config"]) if model_type == "qwen3_vl" else None,
        image_token_id=raw.get("image_token_id"),
    )


def _rope(model_type: str, text: dict[str, Any]) -> RopeConfig:
    parameters = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if kind == "mrope":  # the name Qwen's first vision models used for plain frequencies with sections
        kind = "default"
    theta = parameters.pop("rope_theta", None) or text.get("rope_theta") or _THETA_DEFAULT.get(model_type, 10000.0)
    section = parameters.pop("mrope_section", None)
    parameters.pop("mrope_interleaved", None)
    if model_type == "qwen3_vl":
        section = section or (24, 20, 20)
    if float(parameters.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0)) or 1.0) != 1.0:
        raise ModelError("partial_rotary_factor other than 1 is not supported")
    parameters.pop("partial_rotary_factor", None)
    return RopeConfig(
        kind=kind, theta=float(theta), parameters=parameters,
        mrope_section=tuple(int(s) for s in section) if section else None,  # type: ignore[arg-type]
    )


def _dtype(raw: dict[str, Any], text: dict[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32"
    name = str(name).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; supported are float32, bfloat16, float16")
    return _DTYPES[name]


def _sliding_window(text: dict[str, Any]) -> int | None:
    """The window, if any layer really uses one."""
    window = text.get("sliding_window")
    if window is None:
        return None
    layer_types = text.get("layer_types")
    if layer_types is not None:
        return int(window) if "sliding_attention" in layer_types else None
    return int(window) if text.get("use_sliding_window", False) else None


def _eos(raw: dict[str, Any], text: dict[str, Any], generation: GenerationConfig, path: Path) -> tuple[int, ...]:
    """The first place that names any: a list in generation_config.json is longer than the one id of config.json."""
    for ids in (generation.eos_token_ids, token_ids(raw, "eos_token_id", path), token_ids(text, "eos_token_id", path)):
        if ids is not None:
            return ids
    return ()


def _vision(raw: dict[str, Any]) -> VisionConfig:
    def single(name: str, default: int) -> int:
        value = raw.get(name, default)
        if isinstance(value, (list, tuple)):
            if len(set(value)) != 1:
                raise ModelError(f"vision_config.{name} {value} is not supported; one number is")
            value = value[0]
        return int(value)

    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ModelError(f"vision rope_type {rope['rope_type']!r} is not supported")
    return VisionConfig(
        depth=int(raw["depth"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_heads=int(raw["num_heads"]),
        hidden_act=raw.get("hidden_act", "gelu_pytorch_tanh"),
        in_channels=int(raw.get("in_channels", 3)),
        patch_size=single("patch_size", 16),
        temporal_patch_size=single("temporal_patch_size", 2),
        spatial_merge_size=int(raw.get("spatial_merge_size", 2)),
        out_hidden_size=int(raw["out_hidden_size"]),
        num_position_embeddings=int(raw.get("num_position_embeddings", 2304)),
        deepstack_layers=tuple(int(i) for i in raw.get("deepstack_visual_indexes", (8, 16, 24))),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
    )
