"""Reads the quantisation format and its settings from a folder's small files. Refuses unsupported formats by name.

Knows no tensor; a format's settings get a meaning where its tensors are read (formats/).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_runner.checkpoint.field_types import (
    AWQFields,
    CompressedTensorsFields,
    Fields,
    FP8Fields,
    GPTQFields,
    ModelSlimFields,
    checked,
)
from npu_runner.checkpoint.files import MODELSLIM_FILES, is_modelslim, require_json
from npu_runner.errors import ModelError
from npu_runner.request.limits import shown

MODELSLIM, COMPRESSED_TENSORS, FP8, AWQ, GPTQ = "modelslim", "compressed-tensors", "fp8", "awq", "gptq"
_NAMED_BY_CONFIG = (COMPRESSED_TENSORS, FP8, AWQ, GPTQ)
_FIELDS: Mapping[str, type[Fields]] = {MODELSLIM: ModelSlimFields, COMPRESSED_TENSORS: CompressedTensorsFields,
                                       FP8: FP8Fields, AWQ: AWQFields, GPTQ: GPTQFields}
_READ = "fp8, compressed-tensors, AWQ, GPTQ and ModelSlim are read"
_AS_THEY_ARE = "dequantised at load, inputs not quantised"
_HOLD_INT8 = (MODELSLIM, COMPRESSED_TENSORS)
"""Formats that may have weights for matmuls with int8 inputs."""
_MADE = {"int8": "int8", "fp8": "FP8"}
"""Names of the weights that the setting `quantization` makes, by row."""
_HOLD_FP8 = (FP8, COMPRESSED_TENSORS)
_AS_FP8 = "multiplied as fp8, inputs rounded by row or by groups of 128"
_HOLD_GROUPED = (MODELSLIM, COMPRESSED_TENSORS, AWQ, GPTQ)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The quantisation of a checkpoint's weights, from its files."""

    method: str
    """modelslim, or transformers' name: compressed-tensors, fp8, awq, gptq."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The format's own, as they stand in the file; of the types of field_types.py."""


def arithmetic(quantization: Quantization | None, asked: str, weight_forms: Collection[str]) -> str | None:
    """A description of the arithmetic on quantised weights, for a manifest; None without such weights.

    `quantization`: the checkpoint's. `asked`: the setting of that name. `weight_forms`: forms for which the platform
    has GEMMs and, if the weights are known, in which they are stored.
    """
    method = None if quantization is None else quantization.method
    if asked in _MADE:
        source = "" if method is None else f"{method}, "
        rounded = "by row" if asked == "int8" else "by row, of experts in groups of 128"
        then = f"multiplied as {asked}, inputs rounded {rounded}" if asked in weight_forms else _AS_THEY_ARE
        how = "by row" if asked == "int8" else "by row, of experts by block"
        return f"{source}made {_MADE[asked]} {how} at load, {then}"
    held = []
    kinds = [name for form, name in (("int8", "dynamic"), ("int8_static", "static")) if form in weight_forms]
    if method in _HOLD_INT8 and kinds:
        held.append(f"int8 with {' and '.join(kinds)} inputs multiplied as int8")
    if method in _HOLD_FP8 and not {"fp8", "fp8_blocks"}.isdisjoint(weight_forms):
        held.append(f"fp8 with 8-bit inputs {_AS_FP8}")
    if method in _HOLD_GROUPED and "grouped" in weight_forms:
        held.append("int4 and int8 with 16-bit inputs multiplied as they are stored")
    if held:
        return f"{method}, {'; '.join(held)}; other weights {_AS_THEY_ARE}"
    return None if method is None else f"{method}, {_AS_THEY_ARE}"


def kv_cache_scheme(quantization: Quantization | None) -> str | None:
    """The KV cache scheme of the checkpoint: fp8 (e4m3 with one scale for a layer's keys and one for its values), a
    description of another scheme, or None."""
    settings = {} if quantization is None else quantization.settings
    if quantization is not None and quantization.method == MODELSLIM:
        kind = settings.get("kv_cache_type") or settings.get("kv_quant_type")
        return None if kind is None else f"modelslim, {shown(kind)}"
    scheme = settings.get("kv_cache_scheme")
    if not scheme or scheme == "static":  # the word of AutoFP8
        return "fp8" if scheme else None
    if not isinstance(scheme, dict):
        return f"kv_cache_scheme {shown(scheme)}"
    strategy = scheme.get("strategy") or ("tensor" if scheme.get("group_size") is None else "group")
    kind, bits = scheme.get("type", "int"), scheme.get("num_bits", 8)
    more = ["dynamic"] * bool(scheme.get("dynamic")) + ["asymmetric"] * (not scheme.get("symmetric", True))
    is_fp8 = (kind, bits, strategy, more) == ("float", 8, "tensor", [])
    return "fp8" if is_fp8 else ", ".join([f"kv_cache_scheme: {kind} of {bits} bits, strategy {strategy}", *more])


def resolve_format(quantization: Quantization | None, asked: str) -> str:
    """The setting `quantization` as it is for such a checkpoint: FP8 of what is FP8 already is its own form, auto."""
    is_fp8 = quantization is not None and (
        quantization.method == FP8 or (quantization.method, quantization.settings.get("format")) == (
            COMPRESSED_TENSORS, "float-quantized"))
    return "auto" if asked == "fp8" and is_fp8 else asked


def read_quantization(folder: Path) -> Quantization | None:
    """None: the weights are not quantised. Raises ModelError for a kind that is not read."""
    raw = require_json(folder, "config.json")
    if is_modelslim(folder):
        return _typed(MODELSLIM, _description(folder), str(folder))
    text = raw.get("text_config")
    for name in ("quantization_config", "compression_config", "quantize"):
        found = raw.get(name) or (text.get(name) if isinstance(text, dict) else None)
        if found:
            return _named(name, found, folder)
    if (folder / "quantize_config.json").is_file():  # of AutoGPTQ, before transformers had a place for it
        settings = require_json(folder, "quantize_config.json")
        return _named("quantize_config.json", {"quant_method": GPTQ, **settings}, folder)
    return None


def _named(name: str, found: Any, folder: Path) -> Quantization:
    method = found.get("quant_method") if isinstance(found, dict) else None
    if name == "compression_config" and isinstance(found, dict):  # the name that older releases wrote
        method = COMPRESSED_TENSORS
    if isinstance(method, str) and method in _NAMED_BY_CONFIG:
        return _typed(method, found, f"{folder}: {name}")
    raise refusal(str(method) if method else f"{name} {shown(found)}")


def _typed(method: str, settings: dict[str, Any], where: str) -> Quantization:
    checked(_FIELDS[method], settings, where)
    return Quantization(method=method, settings=settings)


def refusal(kind: str) -> ModelError:
    """For weights of a kind that is not read."""
    return ModelError(f"the weights are quantised ({kind}), which is not supported; {_READ}, or take the checkpoint in "
                      "bfloat16 or float16")


def _description(folder: Path) -> dict[str, Any]:
    """ModelSlim's; the newest of its names is the shortest."""
    names = sorted((file.name for file in folder.glob(MODELSLIM_FILES)), key=lambda name: (len(name), name))
    if len(names) > 1 and names[0] != "quant_model_description.json":
        raise ModelError(f"{folder} holds {' and '.join(names)}; keep the one that describes its weights")
    return require_json(folder, names[0])
