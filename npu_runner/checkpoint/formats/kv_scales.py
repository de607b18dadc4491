"""Scales of keys and values that are kept in FP8, one number for all keys of a layer and one for all values: under
which names checkpoints have them. Knows no model.

Names: compressed-tensors (`self_attn.k_scale`, older `k_proj.output_scale`), ModelOpt (`k_proj.k_scale`), vLLM's own
of fused projections (`qkv_proj.k_scale`, `attn.k_scale`), and one number for both (`self_attn.kv_scale`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from npu_runner.checkpoint.formats.contents import FLOATS, Contents
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import WeightsError

KV_SCALES = "scales of the KV cache"
"""As the start line calls them."""
_NAMES = (
    ("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale"), ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"), ("attn.k_scale", "attn.v_scale"), ("kv_scale", "kv_scale"))
_LEFT = ("q_scale", "k_zero_point", "v_zero_point", "q_proj.q_scale", "q_proj.output_scale")


class KVScales(NamedTuple):
    """The names of a layer's tensors."""

    keys: str
    values: str


def claim_kv_scales(contents: Contents) -> Mapping[str, KVScales]:
    """By attention module, as the checkpoint calls it. They count as unused, as does what stands beside them: zero
    points, scales of queries."""
    found: dict[str, KVScales] = {}
    for pair in _NAMES:
        for suffix in dict.fromkeys(pair):
            for module in contents.suffixed(f".{suffix}"):
                if suffix.startswith(("k_scale", "v_scale", "kv_scale")) and module.endswith(("_proj", ".attn")):
                    continue  # the longer name is the one that is meant
                found.setdefault(module, KVScales(*(f"{module}.{name}" for name in pair)))
    for module, names in found.items():
        contents.leave(KV_SCALES, *dict.fromkeys(names), *(f"{module}.{name}" for name in _LEFT))
    return found


def read_kv_scales(reader: CheckpointReader, names: KVScales) -> tuple[float, float]:
    """The scale of keys and the scale of values. Raises WeightsError for an invalid scale."""
    keys, values = (_scale(reader, name) for name in names)
    return keys, values


def _scale(reader: CheckpointReader, name: str) -> float:
    if name not in reader.names:
        raise WeightsError(f"{reader.path}: {name} is missing, beside the other scale of the layer's keys and values")
    shape, dtype = reader.shape(name), reader.dtype(name)
    if dtype not in FLOATS or math.prod(shape) != 1:
        raise WeightsError(f"{reader.path}: {name} holds {dtype} {list(shape)}, and a scale of keys or values in FP8 "
                           "is one number for all of them; set kv_cache_dtype to the model's dtype")
    scale = float(reader.read(name).float())
    if not 0 < scale < math.inf:
        raise WeightsError(f"{reader.path}: {name} holds {scale}, which is no scale; copy the checkpoint again from "
                           "its source")
    return scale
