"""GE's operators of int8 products, run by the emulated aclnn operators."""

from __future__ import annotations

import torch
from torch import Tensor

from .experts import given
from .graph import GE_TYPES
from .memory import ACL_TYPES, call_aclnn, device_empty, is_fractal
from .operators import Call, on_device, register


def _rows(x: Tensor) -> list[Tensor]:
    return [device_empty(x.shape, torch.int8), device_empty(x.shape[:-1], torch.float32)]


@register("DynamicQuant")
def dynamic_quant(call: Call) -> list[Tensor]:
    x = on_device(call["x"])
    values, scales = _rows(x)
    call_aclnn("DynamicQuantV2", x, given(call, "smooth_scales"), given(call, "group_index"),
               ACL_TYPES[GE_TYPES[int(call.attribute("dst_type", 2))]], values, scales, None)
    return [values, scales]


@register("AscendQuantV2")
def quantize(call: Call) -> Tensor:
    x = on_device(call["x"])
    values = device_empty(x.shape, torch.int8)
    call_aclnn("AscendQuantV3", x, on_device(call["scale"]), given(call, "offset"),
               bool(call.attribute("sqrt_mode", False)), str(call.attribute("round_mode", "round")),
               ACL_TYPES[GE_TYPES[int(call.attribute("dst_type", 2))]], int(call.attribute("axis", -1)), values)
    return values


@register("AddRmsNormDynamicQuant")
def add_rms_norm_dynamic_quant(call: Call) -> list[Tensor]:
    x1, x2, gamma = (on_device(call[name]) for name in ("x1", "x2", "gamma"))
    total, (values, scales) = device_empty(x1.shape, x1.dtype), _rows(x1)
    none = [device_empty([0], torch.int8), device_empty([0], torch.float32)]
    call_aclnn("AddRmsNormDynamicQuantV2", x1, x2, gamma, *(given(call, name) for name in (
        "smooth_scale1", "smooth_scale2", "beta")), float(call.attribute("epsilon", 1e-6)), None, values, None, total,
               scales, None)
    return [values, none[0], total, scales, none[1]]


@register("AddRmsNormQuant")
def add_rms_norm_quant(call: Call) -> list[Tensor]:
    x1, x2, gamma, scales = (on_device(call[name]) for name in ("x1", "x2", "gamma", "scales1"))
    total, values = device_empty(x1.shape, x1.dtype), device_empty(x1.shape, torch.int8)
    call_aclnn("AddRmsNormQuantV2", x1, x2, gamma, scales, *(given(call, name) for name in (
        "scales2", "zero_points1", "zero_points2", "beta")), int(call.attribute("axis", -1)),
               float(call.attribute("epsilon", 1e-6)), bool(call.attribute("div_mode", True)), values, None, total,
               None)
    return [values, device_empty([0], torch.int8), total]


@register("QuantBatchMatmulV3")
def quant_matmul(call: Call) -> Tensor:
    x1, x2 = on_device(call["x1"]), on_device(call["x2"])
    out = device_empty([*x1.shape[:-1], x2.shape[-1]], GE_TYPES[int(call.attribute("dtype"))])
    name = "QuantMatmulWeightNz" if is_fractal(x2) else "QuantMatmulV5"
    call_aclnn(name, x1, x2, given(call, "pertoken_scale"), on_device(call["scale"]), None, None,
               given(call, "offset"), None, given(call, "bias"), bool(call.attribute("transpose_x1", False)),
               bool(call.attribute("transpose_x2", False)), 0, out)
    return out


@register("WeightQuantBatchMatmulV2")
def weight_quant_matmul(call: Call) -> Tensor:
    x, weight = on_device(call["x"]), on_device(call["weight"])
    flags = [call.attribute(name, False) for name in ("transpose_x", "transpose_weight")]
    assert not any(flags), "transposes by flag are not emulated"
    num_outputs = weight.shape[1] * (8 if weight.dtype == torch.int32 else 1)
    out = device_empty([len(x), num_outputs], x.dtype)
    call_aclnn("WeightQuantBatchMatmulV2", x, weight, on_device(call["antiquant_scale"]), *(
        given(call, name) for name in ("antiquant_offset", "quant_scale", "quant_offset", "bias")),
               int(call.attribute("antiquant_group_size", 0)), out)
    return out
