"""The tiles of the attention kernels, by head dim: fixed tables. Knows no kernel and no model.

They were measured on an H200 (triton 3.6); `bench.kernels --part decode --sweep` of f89c05bf tries others. A tile does
not depend on lengths: it is a constant of a kernel, and nothing is compiled while serving.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from npu_runner.platforms.cuda.gpu import Gpu

NUMBERS_OF_PARTS = (2, 4, 8, 16, 32)
"""The numbers of parts that a context may be split into."""
# Decode programs that each multiprocessor should have in a step where that needs few parts, and where it needs many:
# the accumulators of each part are written and read again.
_PROGRAMS_PER_SM, _LEAST_PROGRAMS_PER_SM, _FEW_PARTS = 16, 4, 8


class AttentionTile(NamedTuple):
    """Query rows and context columns of a program's step, its warps, and the stages of keys and values."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, head: int, itemsize: int) -> int:
        """The most bytes of shared memory that queries, keys and values need; `head`: head dim with its padding."""
        return (self.rows + 2 * self.num_stages * self.columns) * head * itemsize

    def smaller(self) -> AttentionTile:
        """The next smaller one; the smallest is that of an MMA."""
        if self.num_stages > 1:
            return self._replace(num_stages=self.num_stages - 1)
        if self.columns > 16:
            return self._replace(columns=self.columns // 2)
        return self._replace(rows=max(16, self.rows // 2))


# By the power of 2 that holds the head dim; smaller ones take the first. Rows of decode: the least of an MMA.
_DECODE = {128: AttentionTile(16, 64, 4, 2), 256: AttentionTile(16, 32, 4, 3)}
_DECODE_FP8 = {128: AttentionTile(16, 64, 2, 3), 256: AttentionTile(16, 32, 4, 3)}
_PREFILL = {64: AttentionTile(128, 64, 8, 3), 128: AttentionTile(64, 64, 4, 3), 256: AttentionTile(128, 64, 8, 2)}
_TOWER = {128: AttentionTile(64, 64, 4, 3), 256: AttentionTile(128, 64, 8, 2)}
# Heads in two parts, 64 dims and up to 16: with one stage, ptxas 12.8 makes wrong code (vision_kernels.py).
SPLIT_HEAD = (64, 16)
SPLIT_TOWER = AttentionTile(128, 64, 8, 3)
# float32 uses no tensor cores: its loops are unrolled, and larger tiles do not fit into registers.
_DECODE_FLOAT32 = {128: AttentionTile(16, 32, 8, 1), 256: AttentionTile(16, 16, 8, 1)}
_PREFILL_FLOAT32 = {128: AttentionTile(32, 32, 8, 1), 256: AttentionTile(16, 16, 8, 1)}


def head_width(head_dim: int) -> int:
    """The power of 2 that holds the head dim, at least that of an MMA."""
    return max(16, triton.next_power_of_2(head_dim))


def decode_tile(head_dim: int, group: int, dtype: torch.dtype, gpu: Gpu, *, from_fp8: bool = False) -> AttentionTile:
    """`group`: query heads of a kv head. `from_fp8`: the cache is in e4m3."""
    table = _DECODE_FLOAT32 if dtype == torch.float32 else _DECODE_FP8 if from_fp8 else _DECODE
    tile, rows = _choose(table, head_width(head_dim), dtype, gpu), triton.next_power_of_2(group)
    # Two warps have registers for no more rows than these.
    return tile if rows <= tile.rows else tile._replace(rows=rows, num_warps=max(4, tile.num_warps))


def prefill_tile(head_dim: int, group: int, dtype: torch.dtype, gpu: Gpu) -> AttentionTile:
    """`group`: query heads of a kv head, at least one token's of which are in a tile."""
    tile = _choose(_PREFILL_FLOAT32 if dtype == torch.float32 else _PREFILL, head_width(head_dim), dtype, gpu)
    return tile._replace(rows=max(tile.rows, triton.next_power_of_2(group)))


def tower_tile(head_dim: int, dtype: torch.dtype, gpu: Gpu) -> AttentionTile:
    return _choose(_PREFILL_FLOAT32 if dtype == torch.float32 else _TOWER, head_width(head_dim), dtype, gpu)


def num_decode_parts(batch_size: int, num_kv_heads: int, num_sms: int) -> int:
    """The number of parts of contexts. It depends on what is known when a graph is captured, never on lengths."""
    undivided = batch_size * num_kv_heads
    most, least = _PROGRAMS_PER_SM * num_sms // undivided, _LEAST_PROGRAMS_PER_SM * num_sms // undivided
    wanted = max(1, min(most, max(_FEW_PARTS, least)))
    return min(NUMBERS_OF_PARTS[-1], 1 << (wanted.bit_length() - 1))


def _choose(table: dict[int, AttentionTile], head: int, dtype: torch.dtype, gpu: Gpu) -> AttentionTile:
    """The table's tile, made smaller where a GPU has less shared memory than the one that was measured."""
    tile = table[min((width for width in table if width >= head), default=max(table))]
    while tile.shared_bytes(head, dtype.itemsize) > gpu.shared_bytes and tile.smaller() != tile:
        tile = tile.smaller()
    return tile
