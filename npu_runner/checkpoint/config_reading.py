"""Reads config.json for all families: where fields stand, their defaults, and unsupported values. Also reads
generation_config.json, the sampling defaults of requests.

Field meanings and defaults follow the configuration classes of Hugging Face transformers. Knows no family by name,
nothing of tensors or devices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_runner.checkpoint.files import read_json, require_json
from npu_runner.checkpoint.model_config import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.errors import ModelError, RequestError
from npu_runner.request.sampling_params import SamplingParams

_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "float": "float32", "half": "float16"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
# What Qwen2 and Qwen3 configurations have where the file says nothing.
WINDOW, _MAX_WINDOW_LAYERS = 4096, 28


@dataclass(frozen=True)
class RawConfig:
    """A checkpoint's config.json as it stands: all of it, and the language model's part (`text_config`, or all)."""

    path: Path
    raw: dict[str, Any]
    text: dict[str, Any]
    generation: GenerationConfig

    @property
    def model_type(self) -> str:
        return str(self.raw.get("model_type"))

    @property
    def num_layers(self) -> int:
        return int(self.text["num_hidden_layers"])


@contextmanager
def reading_config(folder: Path) -> Iterator[RawConfig]:
    """config.json and generation_config.json of a checkpoint folder; what it turns out to lack becomes a ModelError.

    Raises ModelError for a missing or broken file too, and for weights that are quantised in a way that is not read.
    """
    raw, path = require_json(folder, "config.json"), folder / "config.json"
    try:
        text = raw.get("text_config", raw)
        if not isinstance(text, dict):
            raise TypeError(f"text_config is {text!r}, not an object")
        if raw.get("transformers_weights") is not None:
            raise ModelError(f"{path}: transformers_weights {raw['transformers_weights']!r} names the weights' file, "
                             "which is not supported; call it model.safetensors, or write an index")
        read_quantization(folder)
        yield RawConfig(path, raw, text, read_generation_config(folder))
    except KeyError as missing:
        raise ModelError(f"{path}: field {missing} is missing for model_type {raw.get('model_type')!r}") from None
    except (TypeError, ValueError) as broken:
        raise ModelError(f"{path}: {broken}") from broken


def decoder_config(config: RawConfig, *, layers: Sequence[LayerConfig], rope: RopeConfig, head_dim: int | None = None,
                   tie_word_embeddings: bool = False, rms_norm_eps: float = 1e-6, **family: Any) -> ModelConfig:
    """A ModelConfig of the fields that every decoder has, and of what the family says.

    `head_dim`: where the file says nothing; None: hidden_size over heads. `tie_word_embeddings`, `rms_norm_eps`:
    likewise.
    """
    raw, text = config.raw, config.text
    num_heads = int(text["num_attention_heads"])
    hidden_act = text.get("hidden_act", "silu")
    if hidden_act != "silu":
        raise ModelError(f"hidden_act {hidden_act!r} is not supported in the language model; supported is silu")
    return ModelConfig(
        model_type=config.model_type,
        vocab_size=int(text["vocab_size"]),
        hidden_size=int(text["hidden_size"]),
        num_heads=num_heads,
        num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=int(text.get("head_dim") or head_dim or int(text["hidden_size"]) // num_heads),
        layers=tuple(layers),
        max_position_embeddings=int(text["max_position_embeddings"]),
        rms_norm_eps=float(text.get("rms_norm_eps", rms_norm_eps)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", tie_word_embeddings))),
        rope=rope,
        dtype=read_dtype(config),
        eos_token_ids=read_eos(config),
        generation_defaults=config.generation.defaults,
        generation_not_served=config.generation.not_served,
        source=hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest(),
        **family)


def read_rope(config: RawConfig, *, theta: float = 10000.0, section: tuple[int, int, int] | None = None,
              section_is_interleaved: bool = True, rotary_share: float = 1.0,
              head_dim: int | None = None) -> RopeConfig:
    """The rotary embedding. What follows `config` stands for what the file does not say; `section` makes it M-RoPE.

    `rotary_share`: of the head's dims that turn (`partial_rotary_factor`), of `head_dim` dims.
    """
    text = config.text
    parameters = rope_fields(text)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if kind == "mrope":  # the name Qwen's first vision models used for plain frequencies with sections
        kind = "default"
    own_theta = parameters.pop("rope_theta", None) or text.get("rope_theta")
    own_section = parameters.pop("mrope_section", None)
    parameters.pop("mrope_interleaved", None)
    share = float(parameters.pop("partial_rotary_factor", None) or text.get("partial_rotary_factor") or rotary_share)
    if share != 1.0 and head_dim is None:
        raise ModelError(f"partial_rotary_factor {share} is not supported for model_type {config.model_type!r}; 1 is")
    section = own_section or section
    return RopeConfig(
        kind=kind, theta=float(own_theta or theta), parameters=parameters,
        rotary_dim=None if share == 1.0 or head_dim is None else int(head_dim * share),
        mrope_section=tuple(int(s) for s in section) if section else None,  # type: ignore[arg-type]
        mrope_is_interleaved=section_is_interleaved,
    )


def rope_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the rotary embedding as they stand in the file, in a copy.

    As in transformers, `rope_scaling` replaces `rope_parameters` whole, its base too: people add it by hand for YaRN.
    """
    return dict(text.get("rope_scaling") or text.get("rope_parameters") or {})


def dense_layers(config: RawConfig, windows: Sequence[int | None] | None = None, **mlp: bool) -> list[LayerConfig]:
    """Layers of attention and an MLP. `windows`: of each layer; None: none slides. `mlp`: more of MLPConfig."""
    channel = MLPConfig(intermediate_size=int(config.text["intermediate_size"]), **mlp)
    return [LayerConfig(mixer=AttentionConfig(sliding_window=window), channel=channel)
            for window in windows or [None] * config.num_layers]


def layer_windows(config: RawConfig) -> list[int | None]:
    """The sliding window of each layer, as Qwen2 and Qwen3 tell it.

    `use_sliding_window` must ask for it; `layer_types` then names the layers, else those from `max_window_layers` on
    slide.
    """
    text, count = config.text, config.num_layers
    types = text.get("layer_types")
    window = window_length(config, text.get("sliding_window", WINDOW)) if text.get("use_sliding_window") else None
    if types is None:
        first = int(text.get("max_window_layers", _MAX_WINDOW_LAYERS))
        return [window if index >= first else None for index in range(count)]
    check_layer_types(types, count, (_FULL, _SLIDING))
    if _SLIDING in types and window is None:
        raise ModelError(f"layer_types names {_SLIDING}, but use_sliding_window is {text.get('use_sliding_window')!r} "
                         f"and sliding_window {text.get('sliding_window')!r}; both are needed")
    return [window if kind == _SLIDING else None for kind in types]


def window_length(config: RawConfig, value: Any) -> int | None:
    """A `sliding_window` of the file as a number of tokens; None: there is none."""
    if value is None:
        return None
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{config.path}: sliding_window {value!r} is not a number of tokens, 1 or more")
    return value


def check_layer_types(types: Sequence[str], count: int, known: Sequence[str]) -> None:
    """Raises ModelError unless there is one of the `known` types for each of `count` layers."""
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise ModelError(f"layer_types names {', '.join(map(repr, unknown))}, which is not supported; known are "
                         f"{', '.join(known)}")
    if len(types) != count:
        raise ModelError(f"layer_types has {len(types)} entries for {count} layers")


def read_moe(config: RawConfig, *, renormalise: bool, has_shared: bool = False) -> MoEConfig:
    """The experts of every sparse layer, as the Qwen families describe them."""
    text = config.text
    # transformers 5 writes the second name for some families.
    num_experts = int(text["num_experts"] if "num_experts" in text else text["num_local_experts"])
    top_k = int(text["num_experts_per_tok"])
    if not 1 <= top_k <= num_experts:
        raise ModelError(f"num_experts_per_tok {top_k} of num_experts {num_experts} is not possible")
    return MoEConfig(
        num_experts=num_experts, top_k=top_k, intermediate_size=int(text["moe_intermediate_size"]),
        renormalise=renormalise,
        shared_intermediate_size=int(text["shared_expert_intermediate_size"]) if has_shared else None)


def is_sparse_layer(config: RawConfig, index: int) -> bool:
    """Whether layer `index` has experts: `mlp_only_layers` and `decoder_sparse_step`, as transformers reads them."""
    text = config.text
    if index in (text.get("mlp_only_layers") or ()):
        return False
    return (index + 1) % int(text.get("decoder_sparse_step") or 1) == 0


def read_dtype(config: RawConfig) -> str:
    """The dtype that the weights are meant to be computed in."""
    raw, text = config.raw, config.text
    name = raw.get("dtype") or raw.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or "float32"
    name = str(name).removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; supported are float32, bfloat16, float16")
    return _DTYPES[name]


def read_eos(config: RawConfig) -> tuple[int, ...]:
    """The first place that names any: a list in generation_config.json is longer than the one id of config.json."""
    generation, raw, text, path = config.generation, config.raw, config.text, config.path
    for ids in (generation.eos_token_ids, token_ids(raw, "eos_token_id", path), token_ids(text, "eos_token_id", path)):
        if ids is not None:
            return ids
    return ()


# -- generation_config.json, as transformers' GenerationConfig has it ---

_GENERATION_FILE = "generation_config.json"
# `max_length` is left out on purpose: what stands there is usually transformers' own default of 20, prompt and answer
# together, and not intended.
_SERVED = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
# What would change answers and is not done, each with the value that asks for nothing; None, [] and {} never ask.
_NOT_SERVED = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": 0.0, "dola_layers": None,
    "constraints": None, "force_words_ids": None, "num_return_sequences": 1, "min_length": 0, "min_new_tokens": 0,
    "max_time": None, "stop_strings": None, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "bad_words_ids": None, "sequence_bias": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "guidance_scale": 1.0, "token_healing": False, "typical_p": 1.0,
    "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "watermarking_config": None}


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """The contents of generation_config.json, as SamplingParams fields."""

    defaults: dict[str, Any] = field(default_factory=dict)
    not_served: dict[str, Any] = field(default_factory=dict)
    """Fields that ask for what we do not do, as they stand in the file."""
    eos_token_ids: tuple[int, ...] | None = None


def read_generation_config(folder: Path) -> GenerationConfig:
    """Raises ModelError for a file that is broken or holds values that no request could be served with."""
    raw = read_json(folder, _GENERATION_FILE) or {}
    path = folder / _GENERATION_FILE
    return GenerationConfig(
        defaults=_defaults(raw, path), not_served=_not_served(raw), eos_token_ids=token_ids(raw, "eos_token_id", path))


def token_ids(raw: Mapping[str, Any], name: str, path: Path) -> tuple[int, ...] | None:
    """One token id or a list of them; None where nothing is said."""
    value = raw.get(name)
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ModelError(f"{path}: {name} {value!r} is no token id and no list of them; correct it there")
    return tuple(ids)


def _defaults(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    do_sample = raw.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ModelError(f"{path}: do_sample {do_sample!r} is neither true nor false; correct it there")
    defaults = {}
    for name, ours in _SERVED.items():
        if raw.get(name) is not None:
            _check_default(name, ours, raw[name], path)
            defaults[ours] = raw[name]
    # Sampling settings stay: they are for requests that ask for a temperature.
    return defaults if do_sample is not False else {**defaults, "temperature": 0.0}


def _check_default(name: str, ours: str, value: Any, path: Path) -> None:
    try:
        SamplingParams(**{ours: value})
    except RequestError as error:
        reason = error.message.removeprefix(f"{ours}: ")
        raise ModelError(f"{path}: {name}: {reason}; correct it there, or take the line out") from error


def _not_served(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: raw[name] for name, nothing in _NOT_SERVED.items()
            if raw.get(name) not in (None, [], {}, nothing)}
