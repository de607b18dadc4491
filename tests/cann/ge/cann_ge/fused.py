"""GE's fused operators, run by the emulated aclnn operators: same constraints, same numbers as outside a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from .memory import GraphEngineError, call_aclnn, device_empty, host_view, to_device
from .operators import Call, on_device, register


def numbers(value: Tensor | None) -> list[int] | None:
    """A list that the operator reads on the host (lengths): GE hands it over as a tensor."""
    return None if value is None else [int(item) for item in host_view(value).flatten().tolist()]


@register("RmsNorm")
def rms_norm(call: Call) -> list[Tensor]:
    x, gamma = on_device(call["x"]), on_device(call["gamma"])
    y, rstd = (
        device_empty(x.shape, x.dtype),
        device_empty([*x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim()], torch.float32),
    )
    call_aclnn("RmsNorm", x, gamma, float(call.attribute("epsilon", 1e-6)), y, rstd)
    return [y, rstd]


@register("AddRmsNorm")
def add_rms_norm(call: Call) -> list[Tensor]:
    x1, x2, gamma = on_device(call["x1"]), on_device(call["x2"]), on_device(call["gamma"])
    y, total = device_empty(x1.shape, x1.dtype), device_empty(x1.shape, x1.dtype)
    rstd = device_empty([*x1.shape[: x1.dim() - gamma.dim()], *[1] * gamma.dim()], torch.float32)
    call_aclnn("AddRmsNorm", x1, x2, gamma, float(call.attribute("epsilon", 1e-6)), y, rstd, total)
    return [y, rstd, total]


@register("SwiGlu")
def swiglu(call: Call) -> Tensor:
    x, dim = on_device(call["x"]), int(call.attribute("dim", -1))
    shape = list(x.shape)
    shape[dim] //= 2
    out = device_empty(shape, x.dtype)
    call_aclnn("SwiGlu", x, dim, out)
    return out


@register("RotaryMul", "RotaryPositionEmbedding")
def rotary_mul(call: Call) -> Tensor:
    """RotaryMul always turns halves: torchair drops the mode on this chip unless a rotation matrix is given."""
    x, cos, sin, *rotate = (on_device(value) for value in call.given())
    out = device_empty(x.shape, x.dtype)
    mode = int(call.attribute("mode", 0))
    call_aclnn("RotaryPositionEmbeddingV2", x, cos, sin, mode, rotate[0] if rotate else None, out)
    return out


@register("ApplyRotaryPosEmb")
def apply_rotary(call: Call) -> list[Tensor]:
    query, key = call["query"], call["key"]
    mode, layout = call.attribute("rotary_mode", "half"), int(call.attribute("layout", 1))
    call_aclnn("ApplyRotaryPosEmbV2", query, key, on_device(call["cos"]), on_device(call["sin"]), layout, mode)
    return [query, key]


@register("ScatterPaKvCache")
def scatter_pa_kv_cache(call: Call) -> list[Tensor]:
    key_cache, value_cache = call["key_cache"], call["value_cache"]
    call_aclnn(
        "ScatterPaKvCache",
        on_device(call["key"]),
        key_cache,
        on_device(call["slot_mapping"]),
        on_device(call["value"]),
        value_cache,
        call.get("compress_lens"),
        call.get("compress_seq_offsets"),
        call.get("seq_lens"),
        call.attribute("cache_mode", "Norm"),
        call.attribute("scatter_mode", "None"),
        call.attribute("strides", [1, 1]),
        call.attribute("offsets", [0, 0]),
    )
    return [key_cache, value_cache]


@register("ScatterNdUpdate")
def scatter_nd_update(call: Call) -> Tensor:
    var = call["var"]
    call_aclnn("ScatterNdUpdate", var, on_device(call["indices"]), on_device(call["updates"]))
    return var


@register("FusedInferAttentionScore")
def attention(call: Call) -> list[Tensor]:
    query = on_device(call["query"])
    out, lse = device_empty(query.shape, query.dtype), device_empty([0], torch.float32)
    if call.attribute("softmax_lse_flag", False):
        raise GraphEngineError("softmax_lse is not emulated in graphs")
    given = {name for name, value in call.arguments if value is not None}
    taken = {"query", "key0", "value0", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv", "block_table"}
    if given - taken:
        raise GraphEngineError(f"arguments that are not emulated in graphs: {sorted(given - taken)}")

    def maybe(name: str) -> Tensor | None:
        value = call.get(name)
        return None if value is None else on_device(value)

    call_aclnn(
        "FusedInferAttentionScoreV3",
        query,
        [on_device(call["key0"])],
        [on_device(call["value0"])],
        None,
        maybe("atten_mask"),
        numbers(call.get("actual_seq_lengths")),
        numbers(call.get("actual_seq_lengths_kv")),
        *[None] * 7,
        maybe("block_table"),
        *[None] * 12,
        int(call.attribute("num_heads", 1)),
        float(call.attribute("scale", 1.0)),
        int(call.attribute("pre_tokens", 2147483647)),
        int(call.attribute("next_tokens", 2147483647)),
        call.attribute("input_layout", "BSH"),
        int(call.attribute("num_key_value_heads", 0)),
        int(call.attribute("sparse_mode", 0)),
        int(call.attribute("inner_precise", 0)),
        int(call.attribute("block_size", 0)),
        int(call.attribute("antiquant_mode", 0)),
        False,
        0,
        0,
        out,
        lse,
    )
    return [out, lse]


__all__ = ["to_device"]
