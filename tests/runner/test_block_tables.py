"""Block tables on the device are the scheduler's, before every step and whatever comes and goes: random traffic, eager
steps, graphs' padded rows, steps that fail, and made-up steps in between."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_runner.core.batch import ScheduledBatch
from npu_runner.core.block_manager import first_needed_block, most_blocks
from npu_runner.core.scheduler import SchedulerLimits
from npu_runner.platforms.cpu.devices import CpuMemory
from npu_runner.runner.block_tables import BlockTables
from npu_runner.runner.buckets import DecodeBuckets, Forwards, pad_into, send
from npu_runner.runner.step_arrays import step_arrays, to_device
from tests.core.traffic import MAX_LEN, Step, World
from tests.full_set import examples
from tests.oracle.running import UncompiledGraphs

CPU = torch.device("cpu")


class Device(World):
    """A World whose steps go through BlockTables as a runner's do: decode steps through a graph's buffers, if `padded`
    says how many rows the graph has; what they would read is compared with the scheduler's tables."""

    def __init__(self, *arguments: Any, padded: int | None, repeats_a_row: bool, **settings: Any):
        super().__init__(*arguments, **settings)
        num_seqs = self.limits.max_num_seqs
        self.tables = BlockTables(num_seqs, -(-MAX_LEN // self.block_size), CPU)
        self.bucket = None
        self.repeats_a_row = repeats_a_row
        if padded is not None:
            buckets = DecodeBuckets((), UncompiledGraphs(), block_size=self.block_size,
                                    last_tokens=torch.zeros(2 * num_seqs, dtype=torch.int32), tables=self.tables)
            self.bucket = buckets._make(min(padded, num_seqs), Forwards(None))  # type: ignore[arg-type]
        self.num_compared = 0

    def _run(self, step: Step) -> None:
        if self.rng.random() < 0.05:
            self._make_up_a_step()
        for _ in range(self.rng.choice((1, 1, 2))):  # memory may run out, and the step is made again
            rows_BW = self._send(step.batch)
        for row, sequence in enumerate(step.sequences):
            start = int(step.batch.context_lens_B[row] - step.batch.query_lens_B[row])
            needed = first_needed_block(start, self.window, self.block_size)
            found = rows_BW[row].tolist()
            # Blocks that the step itself gives up are still its own.
            expected = [0 if column < needed else block or found[column] for column, block in
                        enumerate(sequence.block_table)]
            if row in step.batch.rows_on_shared_blocks:
                assert found[len(expected) - 1] not in (0, expected.pop()), "another row's"
            assert found[: len(expected)] == expected
            self.num_compared += 1
        super()._run(step)

    def _send(self, batch: ScheduledBatch) -> torch.Tensor:
        self.tables.learn(batch.new_blocks_N3)
        draws = {"uniforms": np.zeros(int(batch.samples_B.sum()), dtype=np.float32)}
        arrays = step_arrays(batch, draws, 1, self.block_size, self.tables.on_host_SW)
        if batch.is_prefill:
            rows_T = np.repeat(np.arange(batch.batch_size), batch.query_lens_B)
            written = set(rows_T[arrays["slot_mapping"] >= self.block_size].tolist())
            assert written == set(range(batch.batch_size)) - set(batch.rows_on_shared_blocks), "others write"
        bucket, slots_B = self.bucket, batch.slots_B
        if bucket is None or batch.is_prefill or batch.batch_size > bucket.batch_size:
            news = self.tables.news(batch.new_blocks_N3, slots_B)
            tensors = to_device(CpuMemory(), {**arrays, "news": news.flat}, CPU)
            return self.tables.write(tensors["news"], news.num_entries, slots_B)
        padded = pad_into(bucket, arrays, slots_B, self.block_size, max_num_seqs=self.limits.max_num_seqs,
                          repeats_a_row=self.repeats_a_row)
        slots_B = padded["table_slots"]
        news = self.tables.news(batch.new_blocks_N3, slots_B)
        rows_BW = self.tables.write(send(bucket, news.flat, CpuMemory()), news.num_entries, slots_B)
        assert rows_BW.data_ptr() == bucket.tensors["block_tables"].data_ptr()
        assert torch.equal(rows_BW, torch.from_numpy(self.tables.on_host_SW[slots_B]))
        assert bucket.tensors["slots"].tolist()[: batch.batch_size] == batch.slots_B.tolist()
        if not self.repeats_a_row:
            assert not rows_BW[batch.batch_size:].any(), "padded rows read the null block"
        return rows_BW

    def _make_up_a_step(self) -> None:
        with self.tables.preserve():
            assert not self.tables.on_host_SW.any()
            made_up = np.array([(0, 0, 7)], dtype=np.int32)
            self.tables.learn(made_up)
            slots_B = np.zeros(1, dtype=np.int32)
            news = self.tables.news(made_up, slots_B)
            assert self.tables.write(torch.from_numpy(news.flat), news.num_entries, slots_B)[0, 0] == 7


TRAFFIC = {
    "seed": st.integers(0, 2**32), "block_size": st.integers(1, 5), "max_num_seqs": st.integers(1, 6),
    "num_tokens": st.integers(1, 30), "failing": st.sampled_from((0.0, 0.1)), "window": st.sampled_from((None, 3, 9)),
    "depth": st.integers(1, 2), "padded": st.sampled_from((None, 2, 6)), "repeats_a_row": st.booleans(),
}


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**TRAFFIC)
def test_what_a_step_reads_is_what_the_scheduler_has(**traffic: Any) -> None:
    assert_steps_read_what_the_scheduler_has(**traffic)


@pytest.mark.full("five times as much random traffic")
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**TRAFFIC)
def test_what_more_steps_read_is_what_the_scheduler_has(**traffic: Any) -> None:
    assert_steps_read_what_the_scheduler_has(**traffic)


def assert_steps_read_what_the_scheduler_has(
    seed: int, block_size: int, max_num_seqs: int, num_tokens: int, failing: float, window: int | None, depth: int,
    padded: int | None, repeats_a_row: bool,
) -> None:
    rng = random.Random(seed)
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens, max_image_tokens=10)
    num_blocks = most_blocks(MAX_LEN, window, num_tokens, block_size) + 1 + rng.randint(0, 8)
    world = Device(rng, block_size, num_blocks, limits, rng.random() < 0.5, window=window, depth=depth, padded=padded,
                   repeats_a_row=repeats_a_row)
    world.failing = failing
    world.run(restarts=True)


def test_a_step_without_news_sends_and_launches_nothing() -> None:
    tables = BlockTables(4, 8, CPU)
    slots_B = np.array([2, 0], dtype=np.int32)
    news = np.array([(2, 0, 5), (0, 0, 6)], dtype=np.int32)
    tables.learn(news)
    first = tables.news(news, slots_B)
    assert (first.num_entries, len(first.flat)) == (2, 2 * 3 + 2)
    tables.write(torch.from_numpy(first.flat), first.num_entries, slots_B)
    assert len(tables.news(news[:0], slots_B).flat) == 0
    grown = tables.news(news[:1], slots_B)
    assert (grown.num_entries, len(grown.flat)) == (2, 2 * 3), "told in the slot and in the row, and nothing gathered"
    assert tables.news(news[:0], slots_B[::-1]).flat.tolist() == [0, 2]


def test_an_interrupt_while_rows_are_gathered_has_them_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is noted of them is noted whole: what is new is then written to the rows that read it."""
    tables = BlockTables(4, 8, CPU)

    def write(slots: list[int], new_blocks: list[tuple[int, int, int]]) -> torch.Tensor:
        new_blocks_N3, slots_B = np.array(new_blocks, dtype=np.int32), np.array(slots, dtype=np.int32)
        tables.learn(new_blocks_N3)
        news = tables.news(new_blocks_N3, slots_B)
        return tables.write(torch.from_numpy(news.flat), news.num_entries, slots_B)

    write([3, 1], [(3, 0, 5), (1, 0, 6)])
    for name in ("arange", "count_nonzero"):
        with monkeypatch.context() as patch:
            patch.setattr(np, name, raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                write([0, 1, 2], [(0, 0, 7)])
        rows_BW = write([0, 1, 2], [(2, 0, 8), (1, 1, 9)])
        assert torch.equal(rows_BW, torch.from_numpy(tables.on_host_SW[[0, 1, 2]])), name
        write([3, 1], [(3, 1, 4)])


def raise_interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("num_news", [3, 400])
def test_more_news_than_a_buffer_holds_come_too(num_news: int) -> None:
    tables = BlockTables(4, 512, CPU)
    buckets = DecodeBuckets((), UncompiledGraphs(), block_size=4, tables=tables,
                            last_tokens=torch.zeros(8, dtype=torch.int32))
    bucket = buckets._make(2, Forwards(None))  # type: ignore[arg-type]
    bucket.host["context_lens"][:] = 3
    news = np.array([(1, column, column + 1) for column in range(num_news)], dtype=np.int32)
    tables.learn(news)
    slots_B = np.array([1, 4], dtype=np.int32)
    told = tables.news(news, slots_B)
    rows_BW = tables.write(send(bucket, told.flat, CpuMemory()), told.num_entries, slots_B)
    assert rows_BW[0, :num_news].tolist() == list(range(1, num_news + 1))
    assert not rows_BW[1].any()
    assert bucket.tensors["context_lens"].tolist() == [3, 3]
