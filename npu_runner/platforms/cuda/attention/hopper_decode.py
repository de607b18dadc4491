"""Attention of decode steps on Hopper through the kernel in CUDA C++ (hopper_decode.cu). Knows nothing of models.

B sequences, N query heads, K kv heads, G = N / K, H head dim, W blocks a sequence.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms.cuda.attention.hopper_attention import why_not_hopper
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.cuda.compiled_source import CompiledSource, KernelAhead, LoadedKernel
from npu_runner.platforms.cuda.dependent_launch import is_dependent
from npu_runner.platforms.cuda.split_k import MOST_TILES, make_counters
from npu_runner.platforms.step_inputs import AttentionMetadata

_DIMS, _MOST_QUERY_HEADS, _TILE = 128, 8, 16
_SOURCES = ("hopper.cu", "attention/hopper_decode_plan.cu", "attention/hopper_decode.cu")
FP8 = torch.float8_e4m3fn


class Shape(NamedTuple):
    """Tiles of 16 context tokens that a warp reads at once: a step. Warps of a program, programs on a multiprocessor,
    steps that a warp has at least. Of blocks that rows share: steps that a program has in shared memory, and what
    reading them once saves at least, in per cent of the context tokens and in steps for each range."""

    tiles: int
    warps: int
    programs: int
    least_steps: int
    stages: int
    saved_percent: int
    saved_steps: int

    def shared_bytes(self, item: int) -> int:
        """The bytes of the stages, each with a step's keys and values of one kv head; `item`: bytes of an element."""
        return self.stages * self.tiles * _TILE * 2 * _DIMS * item


# By whether the cache is in e4m3: with 16 bits a thread holds twice the bytes. Measured on an H200, as are the least
# rows at which the kernel is faster than Triton's, which has more programs for small batches.
SHAPES = {True: Shape(4, 4, 2, 1, 2, 75, 4), False: Shape(2, 4, 2, 2, 3, 40, 4)}
LEAST_ROWS = {True: 12, False: 32}
# The most rows of a step whose shared blocks are read once, and the columns of 8 query heads that a warp then has.
_MOST_GROUPED_ROWS, _PREFIX_COLUMNS = 1024, 2


def why_no_decode(head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> str | None:
    """None where the kernel supports these heads on this GPU, else the reason. `group`: query heads of a kv head."""
    if head_dim != _DIMS or group > _MOST_QUERY_HEADS:
        return f"the kernel for Hopper has head dim {_DIMS} and up to {_MOST_QUERY_HEADS} query heads of a kv head"
    if block_size % _TILE:
        return f"the kernel for Hopper takes block sizes that are multiples of {_TILE}"
    return why_not_hopper(dtype)


class _DecodeKernel(KernelAhead):
    @functools.cached_property
    def plan(self) -> LoadedKernel:
        """Plans where warps read. `accepts` loads it, since no kernel can be loaded while a graph is captured."""
        return self.load("plan_decode")


class DecodeAttention:
    """The kernels for one shape of heads, by whether the cache is in e4m3; threads compile them from now on."""

    def __init__(self, *, num_kv_heads: int, group: int, block_size: int, dtype: torch.dtype):
        self._num_kv_heads, self._group = num_kv_heads, group
        self._kernels = {}
        for is_fp8, shape in SHAPES.items():
            constants = {"QUERY_HEADS": group, "KV_HEADS": num_kv_heads, "BLOCK_SIZE": block_size,
                         "IS_FP8": int(is_fp8), "IS_BFLOAT16": int(dtype == torch.bfloat16),
                         "PREFIX_COLUMNS": _PREFIX_COLUMNS, "MOST_ROWS": _MOST_GROUPED_ROWS,
                         **{name.upper(): value for name, value in shape._asdict().items()}}
            self._kernels[is_fp8] = _DecodeKernel(
                CompiledSource(_SOURCES, constants), "attend_decode", shape.shared_bytes(1 if is_fp8 else 2),
                fallback="attention of decode steps: triton", found="attention of decode steps: hopper_decode.cu")

    def accepts(self, q_BNH: Tensor, k_cache: Tensor) -> bool:
        """Whether the kernel is the fastest for a step. The first call waits until it is compiled."""
        is_fp8 = k_cache.dtype == FP8
        kernel = self._kernels[is_fp8]
        return (len(q_BNH) >= LEAST_ROWS[is_fp8] and len(q_BNH) * self._num_kv_heads <= MOST_TILES
                and (is_fp8 or k_cache.dtype == q_BNH.dtype) and not torch.compiler.is_compiling()
                and kernel.is_available and kernel.plan is not None)

    def attend(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
               scales_2: Tensor | None, window: int | None, num_sms: int) -> Tensor:
        """(B, N, H). Queries: 16-byte addresses and strides, heads one behind the other. `scale` above 0.

        `scales_2` as in `AttentionBackend.with_kv_scales`. A context of no token gives 0. Without a window, blocks that
        the tables of several rows begin with are read once for them.
        """
        out_BNH = torch.empty(q_BNH.shape, dtype=q_BNH.dtype, device=q_BNH.device)
        if is_ahead():
            return out_BNH
        is_fp8 = k_cache.dtype == FP8
        kernel, shape = self._kernels[is_fp8], SHAPES[is_fp8]
        num_rows, num_heads = len(q_BNH), self._num_kv_heads
        num_ranges = max(1, num_sms * shape.programs * shape.warps // num_heads)
        counts = [ctypes.c_int(count) for count in (num_rows, num_ranges, window or 0)]
        lens_B, tables_BW = metadata.context_lens_B, metadata.block_tables_BW
        stride_table = ctypes.c_int(tables_BW.stride(0))
        assert lens_B.dtype == tables_BW.dtype == torch.int32
        # All layers of a step with this window share the plan.
        key = "decode_attention", window, num_rows, num_ranges, shape
        if key not in metadata.derived:
            plan = torch.empty(4 + 40 * num_ranges + 14 * num_rows, dtype=torch.int32, device=q_BNH.device)
            kernel.plan.launch(-(-num_ranges // 32), 1024, [lens_B, tables_BW, plan, stride_table, *counts],
                               is_dependent=is_dependent())
            metadata.derived[key] = plan
        # A range may have accumulators of two rows that it shares with others; those of a kv head start at 16 bytes.
        part, num_parts = -(-self._group * (_DIMS + 2) // 4) * 4, 2 * num_ranges
        if not window and num_rows <= _MOST_GROUPED_ROWS:
            # A row of a group has two at least, and one more for each range that ends within its blocks.
            num_parts += 2 * num_rows + num_ranges * (1 + 8 * _PREFIX_COLUMNS // self._group)
        parts = torch.empty((num_parts, num_heads, part), dtype=torch.float32, device=q_BNH.device)
        kernel.loaded.launch(-(-num_ranges * num_heads // shape.warps), 32 * shape.warps, [
            q_BNH, k_cache, v_cache, out_BNH, parts, tables_BW, metadata.derived[key],
            make_counters(q_BNH.device, num_rows * num_heads), ctypes.c_void_p(0) if scales_2 is None else scales_2,
            ctypes.c_float(scale * math.log2(math.e)), ctypes.c_int(q_BNH.stride(0)), stride_table,
            ctypes.c_int(len(k_cache)), *counts], is_dependent=is_dependent())
        return out_BNH
