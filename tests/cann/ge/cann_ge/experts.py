"""GE's operators of mixtures of experts, run by the emulated aclnn operators."""

from __future__ import annotations

import torch
from torch import Tensor

from .graph import GE_TYPES
from .memory import ACL_TYPES, GraphEngineError, call_aclnn, device_empty, is_fractal
from .operators import Call, on_device, register

_OUTPUT_OF_INT8 = {0: torch.float16, 1: torch.bfloat16, 2: torch.int32}
"""By GroupedMatmul's attribute `dtype`."""


def given(call: Call, name: str) -> Tensor | None:
    value = call.get(name)
    return None if value is None else on_device(value)


def lists(call: Call, prefix: str) -> list[Tensor]:
    """The tensors of a dynamic input, without the empty ones that stand for none."""
    values = [on_device(value) for name, value in call.arguments
              if value is not None and name.rstrip("0123456789") == prefix]
    return [value for value in values if value.numel()]


@register("MoeGatingTopKSoftmaxV2")
def gating(call: Call) -> list[Tensor]:
    x, k, renorm = on_device(call["x"]), int(call.attribute("k")), int(call.attribute("renorm", 0))
    gives_softmax = bool(call.attribute("output_softmax", False)) and renorm == 0
    weights, experts = device_empty([*x.shape[:-1], k], x.dtype), device_empty([*x.shape[:-1], k], torch.int32)
    softmax = device_empty(x.shape if gives_softmax else [0], torch.float32)
    call_aclnn("MoeGatingTopKSoftmaxV2", x, given(call, "finished"), k, renorm, gives_softmax, weights, experts,
               softmax)
    return [weights, experts, softmax]


@register("MoeInitRoutingV3")
def init_routing(call: Call) -> list[Tensor]:
    x, experts = on_device(call["x"]), on_device(call["expert_idx"])
    first, last = call.attribute("active_expert_range")
    pairs = experts.numel()
    quant_mode = int(call.attribute("quant_mode", 0))
    rows = device_empty([pairs, x.shape[1]], torch.int8 if quant_mode == 1 else x.dtype)
    outputs = [rows, device_empty([pairs], torch.int32), device_empty([last - first], torch.int64),
               device_empty([pairs], torch.float32)]
    call_aclnn(
        "MoeInitRoutingV3", x, experts, given(call, "scale"), given(call, "offset"),
        *(int(call.attribute(name, 0)) for name in (
            "active_num", "expert_capacity", "expert_num", "drop_pad_mode", "expert_tokens_num_type")),
        bool(call.attribute("expert_tokens_num_flag", False)), quant_mode, [first, last],
        int(call.attribute("row_idx_type", 0)), *outputs,
    )
    return outputs


@register("GroupedMatmul")
def grouped_matmul(call: Call) -> Tensor:
    (x,), (weight,) = lists(call, "x"), lists(call, "weight")
    for name in ("bias", "offset", "antiquant_scale", "antiquant_offset"):
        if lists(call, name):
            raise GraphEngineError(f"{name} of a grouped product is not emulated")
    scales, row_scale = lists(call, "scale"), given(call, "per_token_scale")
    dtype = _OUTPUT_OF_INT8[int(call.attribute("dtype", -1))] if x.dtype == torch.int8 else x.dtype
    out = device_empty([x.shape[0], weight.shape[-1]], dtype)
    numbers = [int(call.attribute(name, 0)) for name in ("split_item", "group_type", "group_list_type", "act_type")]
    name, group_size = ("GroupedMatmulWeightNz", [0]) if is_fractal(weight) else ("GroupedMatmulV5", [])
    call_aclnn(name, [x], [weight], None, scales or None, *[None] * 3,
               None if row_scale is None else [row_scale], given(call, "group_list"), *[None] * 3, *numbers,
               call.attribute("tuning_config", [0]), *group_size, [out], None, None)
    return out


@register("GroupedMatmulSwigluQuantV2")
def grouped_matmul_swiglu_quant(call: Call) -> list[Tensor]:
    x, (weight,), (scales,) = on_device(call["x"]), lists(call, "weight"), lists(call, "weight_scale")
    if not is_fractal(weight):
        raise GraphEngineError("int8 weights lie in FRACTAL_NZ here")
    outputs = [device_empty([x.shape[0], scales.shape[-1] // 2], torch.int8), device_empty([x.shape[0]], torch.float32)]
    call_aclnn(
        "GroupedMatmulSwigluQuantWeightNzV2", x, [weight], [scales], lists(call, "weight_assist_matrix") or None,
        given(call, "bias"), on_device(call["x_scale"]), given(call, "smooth_scale"), given(call, "group_list"),
        *(int(call.attribute(name, 0)) for name in (
            "dequant_mode", "dequant_dtype", "quant_mode", "group_list_type")),
        call.attribute("tuning_config", [0]), *outputs)
    return outputs


@register("DequantSwigluQuant")
def dequant_swiglu_quant(call: Call) -> list[Tensor]:
    x = on_device(call["x"])
    outputs = [device_empty([x.shape[0], x.shape[1] // 2], torch.int8), device_empty([x.shape[0]], torch.float32)]
    call_aclnn(
        "DequantSwigluQuantV2", x, *(given(call, name) for name in (
            "weight_scale", "activation_scale", "bias", "quant_scale", "quant_offset", "group_index")),
        bool(call.attribute("activate_left", False)), str(call.attribute("quant_mode", "static")),
        ACL_TYPES[GE_TYPES[int(call.attribute("dst_type", 2))]], str(call.attribute("round_mode", "rint")),
        int(call.attribute("activate_dim", -1)), int(call.attribute("swiglu_mode", 0)),
        *(float(call.attribute(name, default)) for name, default in (
            ("clamp_limit", 7.0), ("glu_alpha", 1.702), ("glu_bias", 1.0))), *outputs)
    return outputs


@register("MoeFinalizeRoutingV2")
def finalize_routing(call: Call) -> Tensor:
    rows, places, scales = on_device(call["expanded_x"]), on_device(call["expanded_row_idx"]), given(call, "scales")
    out = device_empty([places.shape[0] if scales is None else scales.shape[0], rows.shape[1]], rows.dtype)
    call_aclnn("MoeFinalizeRoutingV2", rows, places, *(given(call, name) for name in ("x1", "x2", "bias")), scales,
               given(call, "expert_idx"), int(call.attribute("drop_pad_mode", 0)), out)
    return out
