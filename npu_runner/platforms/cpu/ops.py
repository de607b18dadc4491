"""The operators in plain torch, but where host memory has something faster. Knows nothing of models."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.platforms.ops import HeldExperts, TorchOps, experts_one_by_one
from npu_runner.platforms.torch_gated_delta import TorchGatedDelta

_HAS_ONEDNN = torch.backends.mkldnn.is_available()
# With fewer rows torch's own matmul is as fast, and below some ten rows faster: oneDNN lays the weights out anew.
_LEAST_ROWS = 128


class CpuOps(TorchOps):
    """float32 as it is served; what a graph compiler looks at, and other dtypes, are torch's own forms."""

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        if not _uses_onednn(x_TD, weight_OD):
            return super().linear(x_TD, weight_OD, bias_O)
        return torch.ops.mkldnn._linear_pointwise(x_TD, weight_OD, bias_O, "none", [], "")

    def linear_gelu(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, approximate: str) -> Tensor:
        if not _uses_onednn(x_TD, weight_OD):
            return self.gelu(super().linear(x_TD, weight_OD, bias_O), approximate)
        return torch.ops.mkldnn._linear_pointwise(x_TD, weight_OD, bias_O, "gelu", [], approximate)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _is_eager_float32(x):
            return super().rms_norm(x, weight, eps)
        # torch's own takes a pass for each of square, mean and two multiplications, and new memory for each of them.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        return (x * scale).mul_(weight)

    def rotary(self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
        if not (_is_eager_float32(q_TNH) and cos_TR.shape[-1] == q_TNH.shape[-1]):
            return super().rotary(q_TNH, k_TKH, cos_TR, sin_TR)
        cos, sin = cos_TR[:, None], sin_TR[:, None]
        return _turned(q_TNH, cos, sin), _turned(k_TKH, cos, sin)

    def rotary_in_float32(self, qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        if not _is_eager_float32(qk_T2NH):
            return super().rotary_in_float32(qk_T2NH, cos_TH, sin_TH)
        q_TNH, k_TNH = _turned(qk_T2NH, cos_TH[:, None, None], sin_TH[:, None, None]).unbind(1)
        return q_TNH, k_TNH

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        if not _is_eager_float32(gate_up_T2I):
            return super().silu_and_mul(gate_up_T2I)
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        return F.silu(gate_TI).mul_(up_TI)

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor,
                held: HeldExperts | None = None) -> Tensor:
        run = in_graph_experts if torch.compiler.is_compiling() else experts_one_by_one
        return run(x_TD, weights_TK, experts_TK, gate_up, down, 0 if held is None else held.first)

    def sort_ascending(self, x: Tensor) -> Tensor:
        # numpy sorts a vocabulary a hundred times as fast as torch does.
        return torch.from_numpy(np.sort(x.numpy(), axis=-1))


class CpuGatedDelta(TorchGatedDelta):
    """Plain torch, except that an eager decode step works on the states in place."""

    def _decode(self, qkv_BC: Tensor, beta_BV: Tensor, g_BV: Tensor, state: Tensor, slots_B: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super()._decode(qkv_BC, beta_BV, g_BV, state, slots_B)
        # One row after the other, in place: a copy of all states leaves the processor's caches, and is three times as
        # slow at 64 rows.
        rows = zip(qkv_BC.split(1), beta_BV.split(1), g_BV.split(1), slots_B.tolist(), strict=True)
        return torch.cat([self._step(qkv, beta, g, state[slot : slot + 1])[0] for qkv, beta, g, slot in rows])


def _is_eager_float32(x: Tensor) -> bool:
    return x.dtype == torch.float32 and not torch.compiler.is_compiling()


def _uses_onednn(x_TD: Tensor, weight_OD: Tensor) -> bool:
    """Whether to use oneDNN's matmul: with enough rows it is a fifth faster, and bias and GELU need no pass."""
    return (x_TD.dtype == weight_OD.dtype == torch.float32 and not torch.compiler.is_compiling() and x_TD.dim() == 2
            and len(x_TD) >= _LEAST_ROWS and _HAS_ONEDNN)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`ops.rotate_half` in three passes instead of five."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


@torch.library.custom_op("npu_runner::cpu_experts", mutates_args=())
def in_graph_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor,
                     first: int) -> Tensor:
    """`CpuOps.experts` inside a graph, whose shapes are fixed: the routing is read while it runs."""
    return experts_one_by_one(x_TD, weights_TK, experts_TK, gate_up, down, first)


@in_graph_experts.register_fake
def _experts_shape(x_TD: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format)
