"""The attention kernel in CUDA C++ for Hopper (hopper_attention.cu), compiled by NVRTC. Knows nothing of models.

T tokens, N query heads, H head dim.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms.cuda.compiled_source import CompiledSource, LoadedKernel, NoKernel
from npu_runner.platforms.cuda.split_k import counters

logger = logging.getLogger(__name__)

_CAPABILITY, _ARCHITECTURE = (9, 0), "sm_90a"
DTYPES = (torch.bfloat16, torch.float16)


def why_not_hopper(dtype: torch.dtype) -> str | None:
    """None where the kernel computes in `dtype` on this GPU, else the reason."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != _CAPABILITY:
        return "the GPU is not Hopper"
    return None if dtype in DTYPES else "it computes in 16 bits"


class Shape(NamedTuple):
    """Of the kernel's tiles, as in the source: consumers have 64 rows each, matrices rows of `span` bytes in parts.

    `dims`: multiples of 8; scores take those up to the next multiple of 16.
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
        """Queries, keys and values; barriers, and what the beginning is moved by."""
        return self.parts * self.span * (self.rows + 2 * self.stages * self.columns) + 256 + 1024


class HopperAttention:
    """The kernel for what one more file says is read; compiled in a thread of its own from now on."""

    def __init__(self, what: str, shape: Shape, constants: dict[str, int], dtype: torch.dtype):
        """`what`: of the file, which is hopper_`what`s.cu."""
        self.what, self.shape = what, shape
        sources = ["hopper.cu", "attention/hopper_attention.cu", f"attention/hopper_{what}s.cu"]
        constants = {**constants, "IS_BFLOAT16": int(dtype == torch.bfloat16), "DIMS": shape.dims,
                     "SPAN": shape.span, "CONSUMERS": shape.consumers, "COLUMNS": shape.columns, "STAGES": shape.stages}
        thread = ThreadPoolExecutor(1, f"compile-{what}")
        self._cubin = thread.submit(CompiledSource(sources, constants, _ARCHITECTURE).cubin)
        thread.shutdown(wait=False)

    @functools.cached_property
    def is_there(self) -> bool:
        """The first look waits until it is compiled."""
        try:
            self._kernel = LoadedKernel(self._cubin.result(), f"attend_{self.what}s", self.shape.shared_bytes)
        except NoKernel as reason:
            logger.info("attention of %ss: triton (%s)", self.what, reason)
            return False
        self._num_sms = torch.cuda.get_device_properties().multi_processor_count
        logger.info("attention of %ss: hopper_attention.cu", self.what)
        return True

    def other(self, name: str) -> LoadedKernel:
        """Another kernel of the same files, without shared memory."""
        assert self.is_there, "callers look first"
        return LoadedKernel(self._cubin.result(), name, 0)

    def launch(self, maps: Sequence[Any], tiles: Tensor, num_heads: int, out_TNH: Tensor, scale: float,
               *more: Any) -> None:
        """`maps` of queries, keys and values; `tiles` (tiles, 4) int32, each for `num_heads`; `scale` above 0."""
        assert self.is_there, "callers look first"
        # Which tile comes next, and how many programs are done.
        counts = counters(out_TNH.device, 2)
        self._kernel.launch(min(self._num_sms, len(tiles) * num_heads), 128 * (1 + self.shape.consumers), [
            *maps, tiles, ctypes.c_int(len(tiles)), ctypes.c_int(num_heads), out_TNH, counts,
            ctypes.c_float(scale * math.log2(math.e)), *more])
