"""Padded decode: one compiled callable and one set of preallocated input buffers per batch size.

Knows nothing of the model; it is given the decode forward and a compiler.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.base import DecodeForward, GraphCompiler, GraphResourceError, Platform
from npu_runner.runner.inputs import Layout, device_views, pack, plan_layout

# B bucket's batch size, W blocks of the longest sequence allowed

logger = logging.getLogger(__name__)

FLOAT_INPUTS = frozenset({"uniforms"})
PADDED_CONTEXT_LEN = 1


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then multiples of 16, up to `max_num_seqs`, which is always the last."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    sizes += range(16, max_num_seqs, 16)
    return (*sizes, max_num_seqs)


@dataclass
class Bucket:
    """Static device buffers of one batch size, and what runs on them."""

    batch_size: int
    layout: Layout
    num_elements: int
    buffer: Tensor
    inputs: dict[str, Tensor]
    forward: DecodeForward


class DecodeBuckets:
    """All buckets that could be compiled. `find` gives None for a batch that must run eagerly."""

    def __init__(self, sizes: tuple[int, ...], max_blocks: int, device: torch.device):
        self.sizes = sizes
        self.max_blocks = max_blocks
        self.device = device
        self._buckets: dict[int, Bucket] = {}
        self._refused: tuple[int, str] | None = None
        self._told: set[int] = set()
        self._kept: list[int] = []

    def compile_all(self, compiler: GraphCompiler, forward: DecodeForward,
                    warm_up: Callable[[int], None], agrees: Callable[[Bucket], bool] = lambda bucket: True) -> None:
        """Compile every bucket, largest first; `warm_up(batch_size)` runs it until nothing is compiled any more.

        A graph kept from an earlier run must agree with `forward` (`agrees(bucket)`), or it is compiled anew.

        When the device has no resources for one more graph, what fits is kept and the rest runs eagerly.
        """
        for size in sorted(self.sizes, reverse=True):
            bucket = self._make(size, compiler.compile(forward, size))
            self._buckets[size] = bucket
            try:
                warm_up(size)
                if compiler.was_loaded(size) and agrees(bucket):
                    self._kept.append(size)
                elif compiler.was_loaded(size):
                    logger.warning("the kept graph of batch size %d gives other answers; it is compiled anew", size)
                    compiler.discard(size)
                    bucket.forward = compiler.compile(forward, size)
                    warm_up(size)
            except GraphResourceError as full:
                del self._buckets[size]
                self._refused = (size, str(full))
                logger.warning("no resources for a graph of batch size %d (%s); it and smaller ones run eagerly",
                               size, full)
                return

    def find(self, batch_size: int) -> Bucket | None:
        """The smallest bucket that holds `batch_size` sequences."""
        compiled = sorted(self._buckets)
        index = bisect.bisect_left(compiled, batch_size)
        if index < len(compiled):
            return self._buckets[compiled[index]]
        if batch_size not in self._told:
            self._told.add(batch_size)
            largest = compiled[-1] if compiled else 0
            logger.warning("a decode batch of %d is above the largest graph (%d) and runs eagerly", batch_size, largest)
        return None

    def describe(self) -> str:
        if not self._buckets:
            return "none"
        text = ", ".join(str(size) for size in sorted(self._buckets))
        if self._kept:
            text += f" (kept from an earlier run: {', '.join(map(str, sorted(self._kept)))})"
        return f"{text} (stopped at {self._refused[0]}: {self._refused[1]})" if self._refused else text

    def _make(self, size: int, forward: DecodeForward) -> Bucket:
        shapes: dict[str, tuple[int, ...]] = {
            "input_ids": (size,), "positions": (size,), "slot_mapping": (size,), "context_lens": (size,),
            "slots": (size,), "uniforms": (size,), "receipts": (size,), "block_tables": (size, self.max_blocks),
        }
        layout, num_elements = plan_layout(shapes, FLOAT_INPUTS)
        buffer = torch.zeros(num_elements, dtype=torch.int32, device=self.device)
        return Bucket(size, layout, num_elements, buffer, device_views(buffer, layout), forward)


def pad_into(bucket: Bucket, arrays: dict[str, np.ndarray], platform: Platform,
             block_size: int) -> dict[str, np.ndarray]:
    """Fill the bucket's buffers with a smaller batch, and return what they hold now.

    Padded rows have context length 1 in the null block.
    """
    padded = {}
    for name, (_, shape, is_float) in bucket.layout.items():
        target = np.full(shape, PADDED_CONTEXT_LEN if name == "context_lens" else 0,
                         dtype=np.float32 if is_float else np.int32)
        if name == "slot_mapping":
            # Not all the same: kernels promise nothing for a slot that is written twice.
            target[:] = np.arange(bucket.batch_size) % block_size
        source = arrays[name]
        target[tuple(slice(0, extent) for extent in source.shape)] = source
        padded[name] = target
    bucket.buffer.copy_(pack(platform, padded, bucket.layout, bucket.num_elements), non_blocking=True)
    return padded
