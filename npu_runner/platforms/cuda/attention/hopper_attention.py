"""The attention kernel in CUDA C++ for Hopper (hopper_attention.cu), compiled by NVRTC. Knows nothing of models.

T tokens, N query heads, H head dim.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms.cuda.compiled_source import CompiledSource, KernelAhead
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
