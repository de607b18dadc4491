"""Norms. Know nothing of where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from npu_runner.layers.linear import HeldLinear, OutputPart
from npu_runner.layers.parallel import LayerContext, WeightPart
from npu_runner.platforms.quantised import FP8, FP8_BLOCKS, INT8, INT8_STATIC, NormRounding

# T tokens in the step, P parts, F features of a part on this rank


class RMSNorm(nn.Module):
    """Weight (size,)."""

    weight_offset = 0.0
    """Added to the checkpoint's values."""
    weight_dtype: torch.dtype | None = None
    """None means the model's dtype."""
    shift: nn.Parameter | None
    """(size,), of the model's dtype: added behind the norm. Folders of ModelSlim have one."""

    def __init__(self, size: int, eps: float, context: LayerContext):
        super().__init__()
        self.ops, self.quantised = context.ops, context.quantised
        self.eps = eps
        self.weight = context.parameter(size, dtype=self.weight_dtype)
        self.shift, self._context = None, context
        self._rounding: str | NormRounding | None = None
        self.all_reduces_input = False
        """`add_forward` gets this rank's partial sum of x, and all-reduces it."""

    def add_shift(self) -> None:
        """Allocate `shift`, which the loader then fills."""
        self.shift = self._context.parameter(len(self.weight))

    def feed(self, linear: HeldLinear | None) -> None:
        """Say what alone reads the result of `add_forward`: where that is quantised, both are one operator. None:
        others read it, too. Comes before the linear's `weights_are_loaded`."""
        self._rounding = None
        if linear is None or linear.rest is not None or self.weight_dtype is not None or self.shift is not None:
            return
        if not self.quantised.fuses_rounding:
            return
        if linear.form == INT8_STATIC:
            self._rounding = linear.fuse_norm_rounding()
        elif linear.form in (INT8, FP8, FP8_BLOCKS):
            self._rounding = linear.form

    def forward(self, x: Tensor) -> Tensor:
        return self._shifted(self.ops.rms_norm(x, self.weight, self.eps))

    def _shifted(self, x: Tensor) -> Tensor:
        return x if self.shift is None else x + self.shift

    def add_forward(self, x: Tensor, residual: Tensor) -> tuple[Any, Tensor]:
        """(norm(x + residual), x + residual); the first as its reader takes it."""
        assert x.shape == residual.shape, f"{tuple(x.shape)} and {tuple(residual.shape)}: kernels see no broadcast"
        if self.all_reduces_input:
            is_plain = self._rounding is None and self.shift is None
            found = self._context.tp.add_rms_norm(x, residual, self.weight, self.eps) if is_plain else None
            if found is not None:
                return found
            x = self._context.tp.all_reduce(x)
        if self._rounding is not None:
            return self.quantised.add_rms_norm(x, residual, self.weight, self.eps, self._rounding)
        normed, total = self.ops.add_rms_norm(x, residual, self.weight, self.eps)
        return self._shifted(normed), total


class Float32RMSNorm(RMSNorm):
    """Its weights are float32: a result in 16 bits is rounded once, after the weight, as in OLMo 2."""

    weight_dtype = torch.float32


class ZeroCentredRMSNorm(Float32RMSNorm):
    """The checkpoint stores its weights less 1. Here they are whole, in float32, because 1 + w would round."""

    weight_offset = 1.0


class PartsRMSNorm(nn.Module):
    """RMS norms of several parts of the features, each over all ranks' shares of its part; one sum over the ranks
    serves all of them. `parts` are named as the norms are in the checkpoint. Rounded as a Float32RMSNorm is.

    All ranks have equal shares of a part. Ranks that hold the same share are counted alike, so the mean stays right.
    """

    def __init__(self, parts: Sequence[OutputPart], eps: float, context: LayerContext):
        super().__init__()
        self.ops, self.tp, self.eps = context.ops, context.tp, eps
        self.sizes = [part.length for part in parts]
        self.weight = context.parameter(sum(self.sizes), dtype=torch.float32)
        self.weight_parts = {"weight": [
            WeightPart(f"{part.name}.weight", (part.total,), dim=0, start=part.start, length=part.length,
                       target_start=sum(self.sizes[:place])) for place, part in enumerate(parts)]}

    def forward(self, *parts_TF: Tensor) -> list[Tensor]:
        weights_F = self.weight.split(self.sizes)
        if self.tp.size == 1:
            return [self.ops.rms_norm(x_TF, weight_F, self.eps)
                    for x_TF, weight_F in zip(parts_TF, weights_F, strict=True)]
        own_TP = torch.stack([x_TF.float().square().mean(-1) for x_TF in parts_TF], dim=-1)
        scales_TP = torch.rsqrt(self.tp.all_reduce(own_TP) / self.tp.size + self.eps)
        return [(x_TF * scale_T[:, None] * weight_F).to(x_TF.dtype)
                for x_TF, scale_T, weight_F in zip(parts_TF, scales_TP.unbind(-1), weights_F, strict=True)]


class LayerNorm(nn.Module):
    """Weight and bias (size,), of the model's dtype."""

    def __init__(self, size: int, eps: float, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        self.eps = eps
        self.weight = context.parameter(size)
        self.bias = context.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class GatedRMSNorm(nn.Module):
    """norm(x) * weight * silu(gate), over the last dim."""

    def __init__(self, size: int, eps: float, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        self.eps = eps
        self.weight = context.parameter(size)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.ops.gated_rms_norm(x, gate, self.weight, self.eps)
