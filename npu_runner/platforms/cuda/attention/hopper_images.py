"""Attention within images on Hopper through the kernel in CUDA C++. Knows nothing of models.

T tokens, N heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu_runner.platforms.cuda.attention.hopper_attention import HopperAttention, Shape, why_not_hopper
from npu_runner.platforms.cuda.attention.vision import VisionPlan
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.cuda.compiled_source import fits_tensor_map, tensor_map

# By head dim: the kernel's shape, and the average number of tokens that a token sees from which the kernel is faster
# than Triton's (H100). Registers of three consumers hold tiles of 112 columns.
_SHAPES = {64: (Shape(dims=64, consumers=3, columns=112), 2048), 72: (Shape(dims=72, consumers=3, columns=112), 1536),
           80: (Shape(dims=80, consumers=3, columns=112), 1536), 128: (Shape(dims=128), 256)}


class ImageAttention:
    """The kernels by head dim and dtype. Each starts to compile at its first call, with the dummy images of the
    start."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[int, torch.dtype], HopperAttention] = {}

    def accepts(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: VisionPlan) -> bool:
        """Whether the kernel is the fastest for these images."""
        head_dim, dtype = q_TNH.shape[-1], q_TNH.dtype
        if head_dim not in _SHAPES or torch.compiler.is_compiling() or why_not_hopper(dtype) is not None:
            return False
        if (head_dim, dtype) not in self._kernels:
            self._kernels[head_dim, dtype] = HopperAttention("image", _SHAPES[head_dim][0], {"WIDTH": head_dim}, dtype)
        # During compile-ahead Triton's kernels must be met: short images use them.
        return (not is_ahead() and self._kernels[head_dim, dtype].is_available and plan.seen >= _SHAPES[head_dim][1]
                and all(map(fits_tensor_map, (q_TNH, k_TNH, v_TNH))))

    def attend(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: VisionPlan, scale: float) -> Tensor:
        """Full attention within each image, (T, N, H), which `accepts` accepted."""
        kernel = self._kernels[q_TNH.shape[-1], q_TNH.dtype]
        shape, out_TNH = kernel.shape, torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        maps = [tensor_map(x, (rows, 1, shape.span // 2))
                for x, rows in ((q_TNH, shape.rows), (k_TNH, shape.columns), (v_TNH, shape.columns))]
        kernel.launch(maps, plan.tiles(shape.rows, q_TNH.device), q_TNH.shape[1], out_TNH, scale)
        return out_TNH
