"""Padded prefills: one recorded launch and one set of static buffers for each of some numbers of tokens.

A short prefill is bound by the host, which launches its operators one by one. Replayed, it takes as long as the device.
A graph is made for a number of tokens, whatever prompts they belong to and whatever these have in the cache: attention
reads lists of tiles on the device, which the host fills before each replay. Padded tokens are written to the null
block, and are in no tile. What follows the hidden states is launched as ever. Longer prefills are recorded where
launching them takes the host long (long_prefills.py).

Knows nothing of the model; it is given the forward and a compiler. T tokens of a graph, R prompts that it has room for.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from npu_runner.core.batch import ScheduledBatch
from npu_runner.platforms.attention import AttentionBackend
from npu_runner.platforms.graphs import Recorder
from npu_runner.platforms.step_inputs import StepInputs
from npu_runner.runner.block_tables import NOTHING, BlockTables
from npu_runner.runner.buckets import Bucket, make_buffers, pad_arrays
from npu_runner.runner.dummy import dummy_prefill
from npu_runner.runner.settings import SHORT_TOKENS
from npu_runner.runner.step_arrays import step_arrays

_MOST_PROMPTS = 64
"""In a graph of up to SHORT_TOKENS tokens. Longer ones have room for all prompts that a step may have."""

PrefillForward = Callable[[StepInputs, Mapping[str, Tensor], Tensor], Tensor]
"""(inputs, tiles by list (N, 4), last tokens of prompts (R,)) -> final hidden states (T, D), or of the last tokens (R,
D)."""


class RecordedPrefill:
    """Records on the first call, replays on the others; always over the same tensors."""

    def __init__(self, forward: PrefillForward, record: Recorder):
        self._forward = forward
        self._record = record
        self._replay: Callable[[], None] | None = None
        self._hidden_TD: Tensor | None = None

    def __call__(self, inputs: StepInputs, tiles: Mapping[str, Tensor], end_rows_R: Tensor) -> Tensor:
        def run() -> None:
            self._hidden_TD = self._forward(inputs, tiles, end_rows_R)

        if self._replay is None:
            self._replay = self._record(run)
        self._replay()
        assert self._hidden_TD is not None, "what was recorded has a result"
        return self._hidden_TD


@dataclass(kw_only=True)
class PrefillBucket(Bucket):
    """A Bucket of `batch_size` tokens. `forward` is a PrefillForward."""

    most_prompts: int
    tiles: dict[str, Tensor]
    """Views of the lists among `tensors`, (N, 4) each."""

    def run(self, forward: PrefillForward | None = None) -> Tensor:
        """Hidden states of what lies in the buffers, until the next call of any bucket, in the device's order; by
        another `forward` where one is given."""
        return (forward or self.forward)(self.inputs, self.tiles, self.tensors["end_rows"])


class PrefillBuckets:
    """All that could be recorded. `find` gives None for a prefill that must run eagerly."""

    def __init__(self, attention: AttentionBackend, tables: BlockTables, *, block_size: int, uses_mrope: bool,
                 of_rows: Mapping[str, type[np.generic]]):
        """of_rows: the dtypes of the arrays of rows that a step sends beside those of all models, by name."""
        self.attention = attention
        self.tables = tables
        self.block_size = block_size
        self.uses_mrope = uses_mrope
        self.of_rows = of_rows
        self.long_cost = (0, 0.0)
        """Bytes and seconds that recording the graphs of more than SHORT_TOKENS tokens took."""
        self._buckets: dict[int, PrefillBucket] = {}

    def record(self, size: int, forward: PrefillForward, record: Recorder) -> None:
        """Record a graph of `size` tokens. If the device has no room for it, raises GraphResourceError or what runs out
        of memory."""
        bucket = self._make(size, RecordedPrefill(forward, record))
        bucket.run()
        self._buckets[size] = bucket

    def drop(self, size: int) -> None:
        """Leave out a graph that another rank could not record."""
        self._buckets.pop(size, None)

    def find(self, batch: ScheduledBatch) -> PrefillBucket | None:
        """The smallest bucket that holds the step. None if it has too many tokens or prompts, has images, or needs
        results of all its tokens."""
        if batch.image_slices or batch.prompt_scores or batch.prompt_states:
            return None
        sizes = self.sizes
        index = bisect.bisect_left(sizes, batch.num_tokens)
        found = self._buckets[sizes[index]] if index < len(sizes) else None
        return found if found is not None and batch.batch_size <= found.most_prompts else None

    def pad_into(self, bucket: PrefillBucket, batch: ScheduledBatch, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Fill the bucket's host arrays with the step's. Returns the slots whose block tables its rows are to have."""
        tiles = self.attention.graph_tiles(batch.query_lens_B.tolist(), batch.context_lens_B.tolist(),
                                           bucket.batch_size)
        flat = {name: found.reshape(-1) for name, found in tiles.items()}
        pad_arrays(bucket, {**arrays, **flat}, self.block_size, self.tables.null_slot)
        slots_R = np.full(bucket.most_prompts, self.tables.null_slot, dtype=np.int32)
        slots_R[: batch.batch_size] = batch.slots_B
        return slots_R

    @property
    def sizes(self) -> list[int]:
        """The tokens of the recorded graphs, in ascending order."""
        return sorted(self._buckets)

    def describe(self) -> str:
        return ", ".join(map(str, self.sizes)) or "none"

    def _make(self, size: int, forward: RecordedPrefill) -> PrefillBucket:
        """With nothing but padding in its buffers."""
        most_prompts = min(self.tables.null_slot, size, _MOST_PROMPTS if size <= SHORT_TOKENS else size)
        step = dummy_prefill(size, most_prompts, block_size=self.block_size, uses_mrope=self.uses_mrope)
        of_rows = {name: np.zeros(most_prompts, dtype=dtype) for name, dtype in self.of_rows.items()}
        arrays = step_arrays(step, of_rows, 0, self.block_size, self.tables.on_host_SW)
        room = self.attention.most_graph_tiles(size, most_prompts)
        arrays |= {name: np.zeros(4 * most, dtype=np.int32) for name, most in room.items()}
        beside = {"block_tables": self.tables.rows_RW[:most_prompts]}
        buffers = make_buffers(arrays, beside, size)
        tiles = {name: buffers[4][name].view(-1, 4) for name in room}
        bucket = PrefillBucket(size, *buffers, forward, most_prompts=most_prompts, tiles=tiles)
        pad_arrays(bucket, dict.fromkeys(arrays, NOTHING), self.block_size, self.tables.null_slot)
        bucket.buffer[: bucket.num_elements].copy_(torch.from_numpy(bucket.staging))
        return bucket
