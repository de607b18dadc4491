"""The attention kernel in CUDA C++ for Hopper (hopper_attention.cu), and its use within images. Knows no models.

T tokens, N query heads, H head dim.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms.cuda.attention.vision import VisionPlan
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.cuda.compiled_source import CompiledSource, KernelAhead, fits_tensor_map, tensor_map
from npu_runner.platforms.cuda.gpu import is_hopper, num_sms
from npu_runner.platforms.cuda.split_k import make_counters

DTYPES = (torch.bfloat16, torch.float16)


def why_not_hopper(dtype: torch.dtype) -> str | None:
    """None where the kernel computes in `dtype` on this GPU, else the reason."""
    if not is_hopper():
        return "the GPU is not Hopper"
    return None if dtype in DTYPES else "it computes in 16 bits"


class Shape(NamedTuple):
    """The kernel's tiles, as in the source: consumers have 64 rows each, matrices rows of `span` bytes in parts.

    `dims` is a multiple of 8; the K of scores is the next multiple of 16.
    """

    dims: int
    span: int = 128
    consumers: int = 2
    columns: int = 128
    stages: int = 2

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def parts(self) -> int:
        return -(-2 * (-(-self.dims // 16) * 16) // self.span)

    @property
    def shared_bytes(self) -> int:
        """The bytes of queries, keys, values, barriers, and of the alignment of the first one."""
        return self.parts * self.span * (self.rows + 2 * self.stages * self.columns) + 256 + 1024


class HopperAttention(KernelAhead):
    """The kernel for `kind`, "image" or "prompt", whose source hopper_`kind`s.cu says what is read."""

    def __init__(self, kind: str, shape: Shape, constants: dict[str, int], dtype: torch.dtype):
        self.shape = shape
        paths = ["hopper.cu", "attention/hopper_attention.cu", f"attention/hopper_{kind}s.cu"]
        constants = {**constants, "IS_BFLOAT16": int(dtype == torch.bfloat16), "DIMS": shape.dims,
                     "SPAN": shape.span, "CONSUMERS": shape.consumers, "COLUMNS": shape.columns, "STAGES": shape.stages}
        super().__init__(CompiledSource(paths, constants), f"attend_{kind}s", shape.shared_bytes,
                         fallback=f"attention of {kind}s: triton", found=f"attention of {kind}s: hopper_attention.cu")

    def launch(self, maps: Sequence[Any], tiles: Tensor, num_heads: int, out_TNH: Tensor, scale: float,
               *more: Any) -> None:
        """`maps` of queries, keys and values; `tiles` (tiles, 4) int32, each for `num_heads`; `scale` above 0."""
        # The next tile, and the number of programs that have ended.
        counters = make_counters(out_TNH.device, 2)
        self.loaded.launch(min(num_sms(), len(tiles) * num_heads), 128 * (1 + self.shape.consumers), [
            *maps, tiles, ctypes.c_int(len(tiles)), ctypes.c_int(num_heads), out_TNH, counters,
            ctypes.c_float(scale * math.log2(math.e)), *more])


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
