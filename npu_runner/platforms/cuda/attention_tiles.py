"""How large the tiles of the attention kernels are, by head dim: a fixed table. Knows no kernel and no model.

`python scripts/bench_cuda_attention.py --sweep` tries others. The tables know no lengths: a tile is part of what is
compiled, and nothing is compiled while serving.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

# What an H100 has; Triton's interpreter, where no GPU is, takes it for that.
_NUM_SMS, _SHARED_BYTES = 132, 232_448
NUMBERS_OF_PARTS = (2, 4, 8, 16, 32)
"""What contexts may be split into, where they are split."""
# Decode programs that each multiprocessor should have in a step, where contexts can be split into as many parts.
_PROGRAMS_PER_SM = 2


class Tile(NamedTuple):
    """Query rows and context columns of a program's step, its warps, and in how many stages keys and values come."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, head: int, itemsize: int) -> int:
        """Bytes of shared memory that queries, keys and values take at most; `head`: head dim with its padding."""
        return (self.rows + 2 * self.num_stages * self.columns) * head * itemsize

    def smaller(self) -> Tile:
        """The next smaller one; the smallest is what products take."""
        if self.num_stages > 1:
            return self._replace(num_stages=self.num_stages - 1)
        if self.columns > 16:
            return self._replace(columns=self.columns // 2)
        return self._replace(rows=max(16, self.rows // 2))


class Gpu(NamedTuple):
    """A GPU's multiprocessors, and the shared memory that a program of it may have, in bytes."""

    num_sms: int
    shared_bytes: int

    @classmethod
    def current(cls) -> Gpu:
        if not torch.cuda.is_available():
            return cls(_NUM_SMS, _SHARED_BYTES)
        properties = torch.cuda.get_device_properties()
        return cls(properties.multi_processor_count, properties.shared_memory_per_block_optin)


# By the power of 2 that holds the head dim; smaller ones take the first. Rows of decode: the least that products take.
_DECODE = {64: Tile(16, 64, 4, 4), 128: Tile(16, 64, 4, 3), 256: Tile(16, 32, 4, 3)}
_PREFILL = {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 2), 256: Tile(128, 32, 8, 2)}
_TOWER = {64: Tile(64, 64, 4, 3), 80: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 2)}
# float32 takes no tensor cores: its products are unrolled, and larger tiles do not fit into registers.
_DECODE_FLOAT32 = {128: Tile(16, 32, 8, 1), 256: Tile(16, 16, 8, 1)}
_PREFILL_FLOAT32 = {128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1)}


def head_width(head_dim: int) -> int:
    """The power of 2 that holds the head dim, at least what products take."""
    return max(16, triton.next_power_of_2(head_dim))


def split_head(head_dim: int) -> tuple[int, int]:
    """(HEAD, REST): powers of 2 that together hold the head dim with the fewest dims to spare; 0: one is enough."""
    width = head_width(head_dim)
    rest = head_width(head_dim - width // 2)
    return (width // 2, rest) if width > 16 and rest < width // 2 else (width, 0)


def decode_tile(head_dim: int, group: int, dtype: torch.dtype, gpu: Gpu) -> Tile:
    """`group`: query heads of a kv head."""
    tile = _choose(_DECODE_FLOAT32 if dtype == torch.float32 else _DECODE, head_width(head_dim), dtype, gpu)
    return tile._replace(rows=max(tile.rows, triton.next_power_of_2(group)))


def prefill_tile(head_dim: int, group: int, dtype: torch.dtype, gpu: Gpu) -> Tile:
    """`group`: query heads of a kv head, at least one token's of which are in a tile."""
    tile = _choose(_PREFILL_FLOAT32 if dtype == torch.float32 else _PREFILL, head_width(head_dim), dtype, gpu)
    return tile._replace(rows=max(tile.rows, triton.next_power_of_2(group)))


def tower_tile(head_dim: int, dtype: torch.dtype, gpu: Gpu) -> Tile:
    return _choose(_PREFILL_FLOAT32 if dtype == torch.float32 else _TOWER, sum(split_head(head_dim)), dtype, gpu)


def num_decode_parts(batch_size: int, num_kv_heads: int, num_sms: int) -> int:
    """Into how many parts contexts are split: by what is known when a graph is captured, never by their lengths."""
    wanted = triton.cdiv(_PROGRAMS_PER_SM * num_sms, batch_size * num_kv_heads)
    return int(min(NUMBERS_OF_PARTS[-1], triton.next_power_of_2(wanted)))


def _choose(table: dict[int, Tile], head: int, dtype: torch.dtype, gpu: Gpu) -> Tile:
    """The table's tile, made smaller where a GPU has less shared memory than the one that it was taken on."""
    tile = table[min((width for width in table if width >= head), default=max(table))]
    while tile.shared_bytes(head, dtype.itemsize) > gpu.shared_bytes and tile.smaller() != tile:
        tile = tile.smaller()
    return tile
