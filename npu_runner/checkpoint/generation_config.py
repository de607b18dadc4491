"""Reads a checkpoint's generation_config.json: the sampling where a request says nothing, and the tokens that end it.

Knows the fields of transformers' GenerationConfig; nothing of models. `max_length` is left out on purpose: what stands
there is usually transformers' own default of 20, prompt and answer together, and not intended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_runner.checkpoint.files import read_json
from npu_runner.errors import ModelError, RequestError
from npu_runner.request.sampling_params import SamplingParams

FILE_NAME = "generation_config.json"
_SERVED = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
# What would change answers and is not done, each with the value that asks for nothing; None, [] and {} never ask.
_NOT_SERVED = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": 0.0, "dola_layers": None,
    "constraints": None, "force_words_ids": None, "num_return_sequences": 1, "min_length": 0, "min_new_tokens": 0,
    "max_time": None, "stop_strings": None, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0, "bad_words_ids": None, "sequence_bias": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "guidance_scale": 1.0, "token_healing": False, "typical_p": 1.0,
    "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "watermarking_config": None,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """What the file says, in our words."""

    defaults: dict[str, Any] = field(default_factory=dict)
    """SamplingParams fields."""
    not_served: dict[str, Any] = field(default_factory=dict)
    """Fields that ask for what we do not do, as they stand in the file."""
    eos_token_ids: tuple[int, ...] | None = None


def read_generation_config(folder: Path) -> GenerationConfig:
    """Raises ModelError for a file that is broken or holds values that no request could be served with."""
    raw = read_json(folder, FILE_NAME) or {}
    path = folder / FILE_NAME
    return GenerationConfig(
        defaults=_defaults(raw, path), not_served=_not_served(raw), eos_token_ids=token_ids(raw, "eos_token_id", path)
    )


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
            _check(name, ours, raw[name], path)
            defaults[ours] = raw[name]
    # What shapes the draws stays: it is for requests that ask for a temperature.
    return defaults if do_sample is not False else {**defaults, "temperature": 0.0}


def _check(name: str, ours: str, value: Any, path: Path) -> None:
    try:
        SamplingParams(**{ours: value})
    except RequestError as error:
        reason = error.message.removeprefix(f"{ours}: ")
        raise ModelError(f"{path}: {name}: {reason}; correct it there, or take the line out") from error


def _not_served(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: raw[name] for name, nothing in _NOT_SERVED.items()
            if raw.get(name) not in (None, [], {}, nothing)}
