"""The attention kernel in CUDA C++ for Hopper (hopper_attention.cu), for images and prompts. Knows no models.

T tokens, B sequences, N query heads, K kv heads, G = N / K, H head dim, W blocks a sequence, NB blocks of S tokens.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.cuda import FP8_PROMPT_ROOM
from npu_runner.platforms.cuda.attention.vision import VisionPlan
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.cuda.compiled_source import (
    CompiledSource,
    KernelAhead,
    LoadedKernel,
    fits_tensor_map,
    tensor_map,
)
from npu_runner.platforms.cuda.gpu import is_hopper, num_sms
from npu_runner.platforms.cuda.split_k import make_counters
from npu_runner.platforms.transfers import upload_together

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


_PROMPT_SHAPE = Shape(dims=128)
# Tokens of one TMA copy, all of one block.
_CHUNK = 64
# New tokens of a step, and of a sequence on average, from which on it is faster than Triton's kernel (H100).
_LEAST_TOKENS, _LEAST_A_SEQUENCE = 1024, 64
# Programs that convert one e4m3 block to 16 bits.
_WIDENERS = 16


def why_no_prompts(head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> str | None:
    """None where the kernel supports these heads on this GPU, else the reason. `group`: query heads of a kv head."""
    if head_dim != _PROMPT_SHAPE.dims or group > _PROMPT_SHAPE.rows:
        return (f"the kernel for Hopper has head dim {_PROMPT_SHAPE.dims} and up to {_PROMPT_SHAPE.rows} query heads "
                "of a kv head")
    if block_size % _CHUNK:
        return f"the kernel for Hopper takes block sizes that are multiples of {_CHUNK}"
    return why_not_hopper(dtype)


class StepBlocks:
    """The blocks of a step's contexts, one behind the other."""

    def __init__(self, context_lens_B: Sequence[int], block_tables_BW: np.ndarray, block_size: int,
                 device: torch.device):
        self._counts_B = -(-np.asarray(context_lens_B) // block_size)
        self._block_tables_BW, self._device = block_tables_BW, device
        self.count = int(self._counts_B.sum())

    @functools.cached_property
    def on_device(self) -> list[Tensor]:
        """int32: their numbers in the cache (`count`,), and block tables (B, W) of a cache with only these blocks."""
        is_there_BW = np.arange(self._block_tables_BW.shape[1]) < self._counts_B[:, None]
        tables_BW = np.zeros(is_there_BW.shape, dtype=np.int32)
        tables_BW[is_there_BW] = np.arange(self.count, dtype=np.int32)
        return upload_together([self._block_tables_BW[is_there_BW].astype(np.int32), tables_BW], self._device)


class PromptAttention:
    """The kernel for one shape of heads. Blocks of an e4m3 cache are converted to 16 bits first, in a buffer.

    All layers share the buffer. It has the size of the largest step so far, by which memory is measured.
    """

    def __init__(self, *, num_kv_heads: int, group: int, block_size: int, dtype: torch.dtype):
        self._num_kv_heads, self._group = num_kv_heads, group
        self.tokens_a_tile = _PROMPT_SHAPE.rows // group
        self._block_size, self._dtype = block_size, dtype
        self.kernel = HopperAttention("prompt", _PROMPT_SHAPE, {"QUERY_HEADS": group, "BLOCK_SIZE": block_size,
                                                                "WIDENERS": _WIDENERS}, dtype)
        self._wide: Tensor | None = None

    def accepts(self, query_lens_B: Sequence[int]) -> bool:
        """Whether the kernel is the fastest for a step. The first call waits until it is compiled."""
        least = max(_LEAST_TOKENS, _LEAST_A_SEQUENCE * len(query_lens_B))
        return self.kernel.is_available and sum(query_lens_B) >= least

    def is_for_graph(self, num_tokens: int) -> bool:
        """Whether it is the fastest for some steps of a graph of `num_tokens` tokens."""
        return num_tokens > _LEAST_TOKENS and self.kernel.is_available

    def make_room(self, num_tokens: int, device: torch.device) -> None:
        """Allocate the buffer for a step of `num_tokens` new tokens over an e4m3 cache."""
        num_blocks = -(-FP8_PROMPT_ROOM * num_tokens // self._block_size)
        if self.kernel.is_available and (self._wide is None or self._wide.shape[1] < num_blocks):
            self._wide = None
            self._wide = torch.empty((2, num_blocks, self._block_size, self._num_kv_heads, _PROMPT_SHAPE.dims),
                                     dtype=self._dtype, device=device)

    def has_room(self, blocks: StepBlocks) -> bool:
        return self._wide is not None and blocks.count <= self._wide.shape[1]

    def attend_fp8(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, blocks: StepBlocks,
                   scale: float, scales_2: Tensor | None) -> Tensor:
        """`attend` over caches in e4m3, where there is room for `blocks`."""
        assert self._wide is not None, "callers ask `has_room`"
        keys, values = self._wide
        numbers, tables_BW = blocks.on_device
        self._widen.launch(blocks.count * _WIDENERS, 256, [k_cache, v_cache, keys, values, numbers,
                                                           ctypes.c_int(k_cache[0].numel() // 16)])
        return self.attend(q_TNH, keys, values, tiles, tables_BW, scale, scales_2)

    @functools.cached_property
    def _widen(self) -> LoadedKernel:
        return self.kernel.load("widen_blocks")

    def attend(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, tables_BW: Tensor,
               scale: float, scales_2: Tensor | None = None, *, out_TNH: Tensor | None = None,
               count: Tensor | None = None) -> Tensor:
        """Causal attention of a step, (T, N, H). `tiles` as in PrefillPlan, of `tokens_a_tile` tokens; `scale` above 0;
        `scales_2` as in `AttentionBackend.with_kv_scales`. `count`, int32 on the device: how many of the tiles there
        are; None: all of them.

        Queries and caches: 16-byte addresses and strides, heads of consecutive elements.
        """
        if out_TNH is None:
            out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        box_dims = _PROMPT_SHAPE.span // 2
        maps = [tensor_map(q_TNH, (self.tokens_a_tile, self._group, box_dims)),
                *(tensor_map(cache, (1, _CHUNK, 1, box_dims)) for cache in (k_cache, v_cache))]
        self.kernel.launch(maps, tiles, self._num_kv_heads, out_TNH, scale, tables_BW,
                           ctypes.c_int(tables_BW.stride(0)),
                           *(ctypes.c_void_p(0) if given is None else given for given in (scales_2, count)))
        return out_TNH
