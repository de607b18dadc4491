"""One step's host arrays, from what the scheduler planned, and their way to the device in a single copy.

All arrays lie one after the other in one pinned buffer of int32; floats and int64 travel as their bits. Every step
has a buffer of its own: a step that samples nothing is not synchronised, and the next must not overwrite its inputs.
Knows the names of StepInputs; nothing of models.

B sequences in the step, T tokens in the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from npu_runner.core.batch import ScheduledBatch
from npu_runner.platforms.devices import Memory

SAMPLER_ARRAYS = ("slots", "uniforms", "receipts")
"""The sampler's inputs for each row that samples, beside its logits."""
# Each array starts on a 64-byte boundary.
_ALIGNMENT = 16
# Of the buffer's elements, 4 bytes each.
_DTYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.int64): torch.int64}

Layout = dict[str, tuple[int, tuple[int, ...], torch.dtype]]
"""name -> (first element, shape, dtype)."""


def step_arrays(batch: ScheduledBatch, of_rows: Mapping[str, np.ndarray], number: int, block_size: int,
                tables_SW: np.ndarray) -> dict[str, np.ndarray]:
    """All arrays of a step: those of StepInputs by its names, then what samples and shows images.

    Block tables are on the device but for what is new (block_tables.py); `tables_SW` are they on the host, by slot. A
    decode step's `tokens` are there, too. `of_rows`: one value for each row that samples: the sampler's uniform numbers
    (`uniforms`), or how many numbers are pooled (`dimensions`). `number` is the step's, which must come back with its
    tokens.
    """
    # int64, as an index must be on the device.
    slots_B = batch.slots_B[batch.samples_B].astype(np.int64)
    arrays = {
        "positions": np.ascontiguousarray(batch.positions),
        "slot_mapping": slot_mapping(batch, block_size, tables_SW),
        "context_lens": batch.context_lens_B,
        "token_slots": batch.slots_B,
        "state_slots": batch.slots_B if batch.state_slots is None else batch.state_slots,
        "runs": runs_of_tokens(batch.query_lens_B) if batch.has_drafts else np.ones(batch.batch_size, dtype=np.int32),
        "slots": slots_B,
        **of_rows,
        "receipts": np.full(len(slots_B), number, dtype=np.int32),
    }
    if batch.is_prefill:
        arrays["tokens"] = batch.token_ids_T
        arrays["end_rows"] = (np.cumsum(batch.query_lens_B) - 1).astype(np.int32)
        arrays["sampled_rows"] = np.flatnonzero(batch.samples_B).astype(np.int32)
        arrays["image_rows"] = _image_rows(batch)
        if batch.prompt_scores:
            arrays["scored_tokens"] = np.concatenate([score.tokens for score in batch.prompt_scores])
            arrays["prompt_targets"] = np.concatenate([score.targets for score in batch.prompt_scores])
    return arrays


def padding(name: str, rows: np.ndarray, block_size: int, max_num_seqs: int, num_states: int | None = None,
            ) -> np.ndarray | int:
    """The values of array `name` for the decode rows `rows`, which hold no sequence: one token in the null block.

    Their states, and the tokens that they look up, lie behind those of the `max_num_seqs` sequences that may run. More
    rows than `num_states` share these.
    """
    if name in ("token_slots", "state_slots"):
        numbers = np.arange(len(rows), dtype=np.int32)
        return max_num_seqs + (numbers if name == "token_slots" or num_states is None else numbers % num_states)
    if name == "slot_mapping":
        return rows % block_size  # not all the same: kernels promise nothing for a slot that is written twice
    return 1 if name in ("context_lens", "runs") else 0


def runs_of_tokens(query_lens_B: np.ndarray) -> np.ndarray:
    """StepInputs.runs of a step with drafts."""
    firsts_B = np.cumsum(query_lens_B) - query_lens_B
    runs_T = np.repeat(firsts_B, query_lens_B) - np.arange(query_lens_B.sum())
    runs_T[firsts_B] = query_lens_B
    return runs_T.astype(np.int32)


def _image_rows(batch: ScheduledBatch) -> np.ndarray:
    """(T,) int32: which of the images' rows each token shows, counted over all slices; behind the last where none."""
    if not batch.image_slices:
        return np.zeros(0, dtype=np.int32)
    num_rows = [image_slice.num_rows for image_slice in batch.image_slices]
    rows_T = np.full(batch.num_tokens, sum(num_rows), dtype=np.int32)
    first = 0
    for image_slice, count in zip(batch.image_slices, num_rows, strict=True):
        rows_T[image_slice.token_row : image_slice.token_row + count] = np.arange(first, first + count)
        first += count
    return rows_T


def slot_mapping(batch: ScheduledBatch, block_size: int, tables_SW: np.ndarray) -> np.ndarray:
    """(T,) int32: block * block_size + offset of each of the step's tokens."""
    if batch.num_tokens > batch.batch_size:
        rows_T = np.repeat(np.arange(batch.batch_size), batch.query_lens_B)
        firsts_B = np.cumsum(batch.query_lens_B) - batch.query_lens_B
        starts_B = batch.context_lens_B - batch.query_lens_B
        slots_T, places_T = batch.slots_B[rows_T], np.arange(batch.num_tokens) - firsts_B[rows_T] + starts_B[rows_T]
    else:
        slots_T, places_T = batch.slots_B, batch.context_lens_B - 1
    blocks_T = tables_SW[slots_T, places_T // block_size]
    mapping_T = blocks_T * block_size + places_T % block_size
    if batch.rows_on_shared_blocks:
        rows = np.array(batch.rows_on_shared_blocks)
        mapping_T[np.cumsum(batch.query_lens_B)[rows] - 1] = rows % block_size
    return mapping_T.astype(np.int32)


def plan_layout(arrays: Mapping[str, np.ndarray]) -> tuple[Layout, int]:
    """Where each of `arrays` lies, one behind the other, and where they end."""
    layout: Layout = {}
    start = 0
    for name, array in arrays.items():
        dtype = _DTYPES.get(array.dtype, torch.int32)
        layout[name] = (start, array.shape, dtype)
        start += -(-_num_elements(array.shape, dtype) // _ALIGNMENT) * _ALIGNMENT
    return layout, start


def _num_elements(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize // 4


def views(buffer: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The arrays inside a buffer, int32 (num_elements,)."""
    found = {}
    for name, (start, shape, dtype) in layout.items():
        found[name] = buffer[start : start + _num_elements(shape, dtype)].view(dtype).view(shape)
    return found


def to_device(memory: Memory, arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """All of `arrays` (int32, int64 or float32) on the device, through one copy."""
    layout, num_elements = plan_layout(arrays)
    host = memory.host_buffer(num_elements)
    for name, view in views(host, layout).items():
        view.numpy()[:] = arrays[name]
    buffer = torch.empty(num_elements, dtype=torch.int32, device=device)
    buffer.copy_(host, non_blocking=True)
    return views(buffer, layout)
