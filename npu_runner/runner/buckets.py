"""Padded decode: one compiled callable and one set of preallocated input buffers per batch size.

Knows nothing of the model; it is given the decode forward and a compiler.
"""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.attention import sequences_of_tokens
from npu_runner.platforms.devices import Memory
from npu_runner.platforms.graphs import DecodeForward, GraphCompiler, GraphResourceError
from npu_runner.platforms.step_inputs import StepInputs
from npu_runner.runner.block_tables import BlockTables
from npu_runner.runner.decode_forward import TogetherStep
from npu_runner.runner.dummy import dummy_decode
from npu_runner.runner.step_arrays import padding, plan_layout, step_arrays, to_device, views
from npu_runner.runner.votes import Votes

logger = logging.getLogger(__name__)

# Elements of a bucket's buffer for what is new in block tables, a row. An entry is three; a row may get a block and
# give one up, for two places each.
_NEWS_A_ROW = 16
_MOST_DRAFTED_ROWS = 1024


def most_padding(sizes: Sequence[int]) -> int:
    """The rows that a batch is padded with at most, where all buckets are there."""
    return max((size - below - 1 for below, size in pairwise((0, *sorted(sizes)))), default=0)


def bucket_sizes(max_num_seqs: int, given: Sequence[int] | None = None, most_tokens: int = 0) -> tuple[int, ...]:
    """The sizes of `given` up to `max_num_seqs`; None: 1, 2, 4, 8, multiples of 16, and `max_num_seqs` at the end.

    `most_tokens`: of a step with drafts, where a token is a row. It raises the end of `given`; of None there follow
    multiples of 16 up to 128, of 64 up to 512, of 128 up to 1,024. Larger steps run eagerly.
    """
    if given is not None:
        return tuple(size for size in given if size <= max(max_num_seqs, most_tokens))
    sizes = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
    sizes += [*range(16, max_num_seqs, 16), max_num_seqs]
    last = min(most_tokens, _MOST_DRAFTED_ROWS)
    more = [2, 4, 8, *range(16, 128, 16), *range(128, 512, 64), *range(512, last, 128)]
    more = [*(size for size in more if size < last), last]
    return (*sizes, *(size for size in more if size > max_num_seqs))


class Forwards(NamedTuple):
    """The forwards of one bucket, by name."""

    forward: DecodeForward
    behind: DecodeForward | None = None
    drafted: DecodeForward | None = None


@dataclass
class Bucket:
    """Static buffers of one batch size, `host` and `tensors` the views of theirs, and what runs on the device's.

    The device's buffer is longer than the `num_elements` that graphs read: behind them lies what is new in block
    tables.
    """

    batch_size: int
    num_elements: int
    staging: np.ndarray
    host: dict[str, np.ndarray]
    buffer: Tensor
    tensors: dict[str, Tensor]
    inputs: StepInputs
    """The entries of `tensors` that `forward` reads."""
    forward: DecodeForward
    behind: DecodeForward | None = None
    """The graph that runs over `inputs` after the step's tokens are sampled."""
    drafted: DecodeForward | None = None
    """The graph of steps with drafts, where plain steps have another. None where no step with drafts is this large."""


class DecodeBuckets:
    """All buckets that could be compiled. `find` gives None for a batch that must run eagerly."""

    def __init__(self, sizes: tuple[int, ...], compiler: GraphCompiler, *, block_size: int, last_tokens: Tensor,
                 tables: BlockTables, max_padding: int | None = None):
        """last_tokens: int32 on the device, by slot, padding's included. max_padding: batches that would be padded with
        more rows run eagerly; None: any number of rows is padded."""
        self.sizes = sizes
        self.compiler = compiler
        self.block_size = block_size
        self.last_tokens = last_tokens
        self.tables = tables
        self.max_padding = max_padding
        self._buckets: dict[int, Bucket] = {}
        self._refused: tuple[int, str] | None = None
        self._told: set[int] = set()
        self._kept: list[int] = []

    def compile_all(self, forwards: Forwards, warm_up: Callable[[int], None], agrees: Callable[[Bucket], bool],
                    votes: Votes, *, compares_new: bool = False) -> None:
        """Compile every bucket, largest first; `warm_up(batch_size)` runs it until nothing is compiled any more.

        A bucket has a graph of each of `forwards` that there is, or none at all. What `warm_up` does not run is not
        compiled. Those that any rank kept from an earlier run must agree with eager steps on every rank
        (`agrees(bucket)`). Otherwise all ranks compile them anew: compiling and comparing run collectives, so all ranks
        must do the same. With `compares_new` new ones must agree, too: where one does not, none is used.

        If the device has no resources for another graph, the graphs that fit are kept. Smaller batches are then padded
        to the smallest of them, which costs less than launching each operator. Without any graph all steps are eager.
        """
        compiler = self.compiler
        for size in sorted(self.sizes, reverse=True):
            bucket = self._buckets[size] = self._make(size, forwards)
            try:
                warm_up(size)
                is_new = votes.all_agree(f"a new graph of batch size {size}", not compiler.was_loaded(size))
                if is_new and not compares_new:
                    continue
                if is_new:
                    if not votes.all_agree(f"the graph of batch size {size}", agrees(bucket)):
                        self._buckets = {size: bucket}
                        raise GraphResourceError("it answers otherwise than an eager step")
                elif votes.all_agree(f"the kept graph of batch size {size}", agrees(bucket)):
                    self._kept.append(size)
                else:
                    logger.warning("the kept graph of batch size %d gives other answers; it is compiled anew", size)
                    compiler.discard(size)
                    bucket.forward, bucket.behind, bucket.drafted = self._compile(
                        size, forwards, bucket.tensors.get("sequences"))
                    warm_up(size)
            except GraphResourceError as full:
                del self._buckets[size]
                self._refused = (size, str(full))
                instead = f"are padded to {min(self._buckets)}" if self._buckets else "run eagerly, as all do"
                logger.warning("no graph of batch size %d (%s); batches of up to %d %s", size, full,
                               size, instead)
                return

    def find(self, batch_size: int) -> Bucket | None:
        """The smallest bucket that holds `batch_size` sequences."""
        compiled = sorted(self._buckets)
        index = bisect.bisect_left(compiled, batch_size)
        if index < len(compiled):
            if self.max_padding is None or compiled[index] - batch_size <= self.max_padding:
                return self._buckets[compiled[index]]
            reason = f"has no states to be padded to the smallest graph ({compiled[index]}) with"
        else:
            reason = f"is above the largest graph ({compiled[-1] if compiled else 0})"
        if batch_size not in self._told:
            self._told.add(batch_size)
            logger.warning("a decode batch of %d %s and runs eagerly", batch_size, reason)
        return None

    def compiled(self) -> list[Bucket]:
        """The compiled buckets, largest first."""
        return [self._buckets[size] for size in sorted(self._buckets, reverse=True)]

    @property
    def why_none(self) -> str | None:
        """Why there is no graph; None where there are some."""
        return self._refused[1] if self._refused and not self._buckets else None

    def describe(self) -> str:
        if not self._buckets:
            return "none"
        text = ", ".join(str(size) for size in sorted(self._buckets))
        if self._kept:
            text += f" (kept from an earlier run: {', '.join(map(str, sorted(self._kept)))})"
        return f"{text} (stopped at {self._refused[0]}: {self._refused[1]})" if self._refused else text

    def _compile(self, size: int, forwards: Forwards, sequences: Tensor | None) -> Forwards:
        """More rows than there are sequences have drafts: no plain step has these. `sequences`: the buffer that the
        graph of steps with drafts alone reads."""
        behind, drafted = (each and self.compiler.compile(each, size) for each in forwards[1:])
        if drafted is not None and sequences is not None:
            drafted = functools.partial(_run_together, drafted, sequences)
        if drafted is not None and size > self.tables.null_slot:
            return Forwards(drafted, behind, drafted)
        return Forwards(self.compiler.compile(forwards.forward, size), behind, drafted)

    def _make(self, size: int, forwards: Forwards) -> Bucket:
        uniforms, step = {"uniforms": np.zeros(size, dtype=np.float32)}, dummy_decode(size, 1)
        step.slots_B %= self.tables.null_slot  # more rows than that are tokens of fewer sequences
        arrays = step_arrays(step, uniforms, 0, self.block_size, self.tables.on_host_SW)
        arrays["context_lens"] = arrays["context_lens"].astype(self.compiler.context_lens_dtype)
        if isinstance(getattr(forwards.drafted, "__self__", None), TogetherStep):
            num_sequences = min(size, self.tables.null_slot) + 2
            arrays["sequences"] = np.zeros((3, num_sequences), dtype=self.compiler.context_lens_dtype)
        beside = {"tokens": self.last_tokens, "block_tables": self.tables.rows_RW[:size]}
        buffers = make_buffers(arrays, beside, size)
        inputs = buffers[-1]
        bucket = Bucket(size, *buffers, *self._compile(size, forwards, inputs.sequences))
        bucket.inputs = inputs._replace(sequences=None)
        return bucket


def _run_together(graph: DecodeForward, sequences: Tensor, inputs: StepInputs) -> Tensor:
    return graph(inputs._replace(sequences=sequences))


def make_buffers(arrays: dict[str, np.ndarray], beside: dict[str, Tensor], num_rows: int) -> tuple[
        int, np.ndarray, dict[str, np.ndarray], Tensor, dict[str, Tensor], StepInputs]:
    """The fields of a Bucket from `num_elements` to `inputs`. `beside`: tensors that exist already."""
    layout, num_elements = plan_layout(arrays)
    staging = torch.zeros(num_elements, dtype=torch.int32)
    host = {name: view.numpy() for name, view in views(staging, layout).items()}
    buffer = torch.zeros(num_elements + _NEWS_A_ROW * num_rows, dtype=torch.int32, device=beside["block_tables"].device)
    tensors = {**beside, **views(buffer, layout)}
    return num_elements, staging.numpy(), host, buffer, tensors, StepInputs.from_tensors(tensors)


def pad_arrays(bucket: Bucket, arrays: Mapping[str, np.ndarray], block_size: int, max_num_seqs: int,
               num_states: int | None = None) -> None:
    """Fill those of the bucket's host arrays, and what is behind their ends with padding."""
    for name, source in arrays.items():
        target, count = bucket.host[name], source.shape[-1]
        target[..., :count] = source
        padded = np.arange(count, target.shape[-1])
        target[..., count:] = padding(name, padded, block_size, max_num_seqs, num_states)


def pad_into(bucket: Bucket, arrays: dict[str, np.ndarray], slots: np.ndarray, block_size: int, *, max_num_seqs: int,
             num_states: int | None = None, repeats_a_row: bool = False) -> dict[str, np.ndarray]:
    """Fill the bucket's host arrays with a smaller batch, whose rows have the block tables of `slots`, and return them,
    until the next call.

    `table_slots` with them: whose block table each row is to have, the null slot's (`max_num_seqs`) for padded ones.
    With `repeats_a_row` these read what the shortest real one reads (`AttentionBackend.pads_with_real_rows`).
    """
    count, sequences_3S = len(arrays["context_lens"]), bucket.host.get("sequences")
    if sequences_3S is not None and "runs" in arrays:
        queries_B = arrays["runs"][arrays["runs"] > 0]
        sequences_3S[:] = sequences_of_tokens(queries_B, arrays["context_lens"][queries_B.cumsum() - 1],
                                              bucket.batch_size, sequences_3S.shape[1])
    pad_arrays(bucket, arrays, block_size, max_num_seqs, num_states)
    table_slots_B = np.full(bucket.batch_size, max_num_seqs, dtype=np.int32)
    table_slots_B[:count] = slots
    if repeats_a_row:
        shortest = int(arrays["context_lens"].argmin())
        bucket.host["context_lens"][count:] = bucket.host["context_lens"][shortest]
        table_slots_B[count:] = table_slots_B[shortest]
    return {**bucket.host, "table_slots": table_slots_B}


def send(bucket: Bucket, news: np.ndarray, memory: Memory) -> Tensor:
    """Copy the bucket's host arrays to the device, and `news` (int32) with them; returns these there, until the next
    call.

    One copy, unless `news` is too long for it. That happens if all layers slide and a long prompt frees many blocks
    behind its window at once; these are sent by a second copy.
    """
    first, end = bucket.num_elements, bucket.num_elements + len(news)
    fits = end <= len(bucket.buffer)
    host = memory.host_buffer(end if fits else first)
    values = host.numpy()
    values[:first] = bucket.staging
    if fits:
        values[first:] = news
    bucket.buffer[: len(values)].copy_(host, non_blocking=True)
    return bucket.buffer[first:end] if fits else to_device(memory, {"": news}, bucket.buffer.device)[""]
