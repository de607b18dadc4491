"""Random traffic for a scheduler: requests that come, go, fail and are preempted, over a cache that is a table."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from npu_runner.core.batch import ScheduledBatch
from npu_runner.core.block_manager import BlockManager, first_needed_block
from npu_runner.core.drafts import Drafter
from npu_runner.core.scheduler import Scheduler, SchedulerLimits
from npu_runner.core.sequence import Sequence
from npu_runner.core.state_snapshots import StateSnapshots
from npu_runner.request.prompt_inputs import ImageInput, ImageSpan, PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.request.speculative import SpeculativeConfig

MAX_LEN = 40


def next_token(tokens: list[int]) -> int:
    """What a model would do: a function of everything before, and of nothing else."""
    return hashlib.blake2b(repr(tokens).encode(), digest_size=1).digest()[0] % 5


@dataclass
class Step:
    """One step under way, and what it brings: the tokens of each row; nothing from one that fails."""

    batch: ScheduledBatch
    sequences: list[Sequence]
    tokens: list[list[int]]
    fails: bool


class Guesses(Drafter):
    """Drafts of a model that knows what follows and errs now and then."""

    def __init__(self, rng: random.Random, most: int):
        super().__init__(SpeculativeConfig(method="forced", num_speculative_tokens=most))
        self._rng = rng

    def _can_draft_for(self, seq: Sequence) -> bool:
        return seq.num_tokens // 4 % 2 == 0

    def _drafts(self, seq: Sequence, num: int) -> list[int]:
        if not self._can_draft_for(seq):
            return []
        tokens, drafts = seq.tokens(0, seq.num_tokens), [0] * self._rng.randint(0, max(0, num))
        for place in range(len(drafts)):
            drafts[place] = next_token([*tokens, *drafts[:place]]) if self._rng.random() < 0.8 else 4
        return drafts


class World:
    """Drives a scheduler as an engine does, with `depth` steps under way at most. The device is tables: of what was
    written to each slot of the cache, of the blocks and of the last token of each running sequence. It runs a step as
    soon as it is handed over; what that brings is told when the step is collected.
    """

    def __init__(self, rng: random.Random, block_size: int, num_blocks: int, limits: SchedulerLimits, caching: bool,
                 snapshots: StateSnapshots | None = None, window: int | None = None, depth: int = 1,
                 drafts: int = 0):
        """drafts: a step may draft so many tokens of a row, right ones and wrong ones."""
        self.rng = rng
        self.depth = depth
        self.block_size = block_size
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_caching=caching, snapshots=snapshots,
                                   sliding_window=window)
        self.window = window
        self.drafter = Guesses(rng, drafts) if drafts else None
        self.scheduler = Scheduler(limits, self.blocks, self.drafter)
        self.limits = limits
        self.cache: dict[int, Any] = {}
        self.live: dict[int, Sequence] = {}
        self.wanted_lens: dict[int, int] = {}
        self.num_added = 0
        self.sampler: dict[int, int] = {}
        """Who is registered in each slot."""
        self.last_tokens: dict[int, int] = {}
        """By slot."""
        self.block_tables: dict[tuple[int, int], int] = {}
        """By slot and column, as steps have told them."""
        self.generated: dict[tuple[int, int], list[int]] = {}
        """What the device has chosen for each sequence, by the epoch that it began in."""
        self.steps: deque[Step] = deque()
        self.planned: list[tuple[list[str], list[int]]] = []
        """Requests and query lengths of every step."""
        self.num_copies = 0
        self.failing = 0.0
        self.unusable = 0.0
        """How often a row brings what is no number, and is computed apart if it had anything of others."""

    def add(self) -> None:
        length = self.rng.randint(1, MAX_LEN - 2)
        # Few different prompts, so that prefixes meet.
        tokens = [self.rng.randint(0, 1) for _ in range(length)] if self.rng.random() < 0.3 else [0] * length
        prompt = PromptInputs(tokens)
        if length > 6 and self.rng.random() < 0.4:
            prompt = self._with_image(tokens)
        self.add_prompt(prompt)

    def add_prompt(self, prompt: PromptInputs, length: int | None = None) -> Sequence:
        """`length`: of prompt and output; None: any."""
        length = length or self.rng.randint(len(prompt.token_ids) + 1, MAX_LEN)
        # Some end where the scheduler knows it, others, as by a stop string, where it does not.
        most = length if self.rng.random() < 0.5 else MAX_LEN
        sequence = Sequence(self.num_added, self.num_added, str(self.num_added), 0, prompt, SamplingParams(), 0,
                            max_num_tokens=most)
        self.num_added += 1
        self.live[sequence.seq_id] = sequence
        self.wanted_lens[sequence.seq_id] = length
        self.scheduler.add(sequence)
        return sequence

    def _with_image(self, tokens: list[int]) -> PromptInputs:
        num_tokens = 3
        start = self.rng.choice((0, 2))
        name = bytes([self.rng.randint(0, 1)]) * 16
        image = ImageInput(name, np.zeros((1, 1, 3), dtype=np.uint8), (1, 2, 2 * num_tokens), num_tokens)
        tokens[start : start + num_tokens] = [9] * num_tokens
        return PromptInputs(tokens, [image], [ImageSpan(start, num_tokens, 0)])

    def restart(self) -> None:
        """After an exception: everything is forgotten, and every sequence begins anew with the tokens that it has."""
        self.scheduler.reset()
        self.steps.clear()
        for sequence in self.live.values():
            sequence.reset()
            self.scheduler.add(sequence)

    def run(self, *, restarts: bool = False) -> None:
        """Sixty things that happen, then no more failures until all have ended; no block is left behind."""
        for _ in range(60):
            action = self.rng.random()
            if action < 0.25 and self.num_added < 20:
                self.add()
            elif action < 0.28:
                self.abort_one()
            elif restarts and action < 0.29:
                self.restart()
            else:
                self.step()
        self.run_to_the_end()

    def run_to_the_end(self) -> None:
        self.failing = self.unusable = 0.0
        for _ in range(20_000):
            if not (self.live or self.steps):
                break
            self.step()
        assert not self.live, "every sequence ends"
        assert self.blocks.num_used == 0

    def abort_one(self) -> None:
        if self.live:
            self._end(self.rng.choice(list(self.live.values())))

    def step(self) -> None:
        if self.scheduler._held and not (self.scheduler.running or self.scheduler.waiting or self.steps):
            self.scheduler.run_alone(None)
        while len(self.steps) < self.depth and (batch := self.scheduler.schedule()) is not None:
            self._submit(batch)
        assert len(self.scheduler.under_way) == len(self.steps)
        if not self.steps:
            assert not self.live
            return
        step = self.steps.popleft()
        if step.fails:
            self._rollback(step)
        else:
            self._collect(step)
        self._check_blocks()

    def _submit(self, batch: ScheduledBatch) -> None:
        self._check_batch(batch)
        self.planned.append((batch.request_ids, batch.query_lens_B.tolist()))
        sequences = [self.live[int(name)] for name in batch.request_ids]
        step = Step(batch, sequences, [], self.rng.random() < self.failing)
        if not any(before.fails for before in self.steps):
            self._run(step)
        self.steps.append(step)

    def _run(self, step: Step) -> None:
        """A step that fails gets nowhere, or some of the way."""
        batch, sequences = step.batch, step.sequences
        drafts = self._drafts_of(batch)
        if not step.fails or self.rng.random() < 0.5:
            self._tell_sampler(batch, sequences)
        if step.fails and self.rng.random() < 0.5:
            return
        self._tell_blocks(batch, sequences)
        self._load_states(batch)
        self._copy_blocks(batch)
        if step.fails:
            sequences = sequences[: self.rng.randint(0, len(sequences))]
        for row, sequence in enumerate(sequences):
            if not batch.is_prefill:
                last = self.tokens_of(sequence, int(batch.context_lens_B[row]) - len(drafts[row]))[-1]
                assert self.last_tokens[batch.slots_B[row]] == last, "the token of somebody else, or of another step"
            self._write_and_read(batch, row, sequence, drafts[row])
        if not step.fails:
            step.tokens = [self._sample(batch, row, sequence, drafts[row]) for row, sequence in enumerate(sequences)]

    def _drafts_of(self, batch: ScheduledBatch) -> list[list[int]]:
        """Of each row; before them stands its last token, which the step brings along."""
        if not batch.has_drafts:
            return [[]] * batch.batch_size
        assert self.drafter is not None, "nobody has drafted anything"
        rows = np.split(batch.token_ids_T, np.cumsum(batch.query_lens_B)[:-1])
        lasts = [self.last_tokens[slot] for slot in batch.slots_B.tolist()]
        assert [int(row[0]) for row in rows] == lasts, "not what the step before has chosen"
        assert batch.positions.tolist() == [place for end, num in zip(batch.context_lens_B, batch.query_lens_B,
                                                                      strict=True) for place in range(end - num, end)]
        return [row[1:].tolist() for row in rows]

    def _sample(self, batch: ScheduledBatch, row: int, sequence: Sequence, drafts: list[int]) -> list[int]:
        if not batch.samples_B[row]:
            return []
        slot, end = batch.slots_B[row], int(batch.context_lens_B[row]) - len(drafts)
        assert self.sampler[slot] == sequence.seq_id, "its slot samples for another one"
        tokens = self.tokens_of(sequence, end)
        for draft in [*drafts, None]:
            tokens.append(next_token(tokens))
            if tokens[-1] != draft:
                break
        self.last_tokens[slot] = tokens[-1]
        self.generated[sequence.seq_id, sequence.epoch] += tokens[end:]
        return tokens[end:]

    def tokens_of(self, sequence: Sequence, end: int) -> list[int]:
        """The first `end` tokens, as the device has them: those that the host waits for, too."""
        generated = self.generated.setdefault((sequence.seq_id, sequence.epoch), list(sequence.output_token_ids))
        tokens = [*sequence.prompt.token_ids, *generated]
        assert len(tokens) >= end, "a token that nobody has chosen yet"
        return tokens[:end]

    def _collect(self, step: Step) -> None:
        for row, sequence in enumerate(self.scheduler.complete()):
            if sequence is None:
                continue
            assert sequence is step.sequences[row]
            if step.tokens[row] and self.rng.random() < self.unusable and self.scheduler.compute_apart(sequence):
                assert (sequence.slot, sequence.block_table) == (None, [])
                continue
            for token in step.tokens[row]:
                assert token == next_token(sequence.tokens(0, sequence.num_known_tokens))
                sequence.append(token)
                if sequence.num_known_tokens >= self.wanted_lens[sequence.seq_id]:
                    self._end(sequence)
                    break
        self.scheduler.resolve_drafts()

    def _rollback(self, step: Step) -> None:
        self.steps.clear()
        assert self.scheduler.rollback() == [seq for seq in step.sequences if not seq.is_finished]
        assert self.blocks.num_used == 0
        assert not self.scheduler.running
        everybody = [None, [seq for seq in self.live.values() if self.rng.random() < 0.5]]
        group = self.rng.choice(everybody)
        self.scheduler.run_alone(group or None)

    def _tell_sampler(self, batch: ScheduledBatch, sequences: list[Sequence]) -> None:
        for slot in batch.freed_slots:
            self.sampler.pop(slot, None)
        rows = {slot: row for row, slot in enumerate(batch.slots_B.tolist())}
        for entry in batch.new_sampling:
            assert entry.slot not in self.sampler, "somebody is registered there"
            sequence = sequences[rows[entry.slot]]
            assert entry.output_token_ids == sequence.output_token_ids
            self.sampler[entry.slot] = sequence.seq_id

    def _tell_blocks(self, batch: ScheduledBatch, sequences: list[Sequence]) -> None:
        """What is new must make every row what the scheduler has, but for blocks that the step itself gave up."""
        news = {(slot, column): block for slot, column, block in batch.new_blocks_N3.tolist()}
        assert len(news) == len(batch.new_blocks_N3), "a place is told twice"
        assert {slot for slot, _ in news} <= set(batch.slots_B.tolist())
        self.block_tables.update(news)
        for row, sequence in enumerate(sequences):
            start = int(batch.context_lens_B[row] - batch.query_lens_B[row])
            needed = first_needed_block(start, self.window, self.block_size)
            for column, block in enumerate(sequence.block_table):
                told = self.block_tables[int(batch.slots_B[row]), column]
                if row in batch.rows_on_shared_blocks and column == len(sequence.block_table) - 1:
                    assert told not in (0, block), "its own block has nothing yet"
                    continue
                assert told == (0 if column < needed else block or told), "not what the scheduler has"

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence, "stop")
        del self.live[sequence.seq_id]

    def _check_batch(self, batch: ScheduledBatch) -> None:
        assert batch.num_tokens <= max(self.limits.max_num_batched_tokens, self.limits.max_num_seqs)
        assert batch.batch_size <= self.limits.max_num_seqs
        assert len(set(batch.slots_B.tolist())) == batch.batch_size
        assert int(batch.query_lens_B.sum()) == batch.num_tokens

    def _write_and_read(self, batch: ScheduledBatch, row: int, sequence: Sequence, drafts: list[int]) -> None:
        """Each token's content is written to its slot; the whole context must then read back as this sequence's."""
        end = int(batch.context_lens_B[row])
        tokens = [*self.tokens_of(sequence, end - len(drafts)), *drafts]
        places = range(end - int(batch.query_lens_B[row]), end)
        assert row not in batch.rows_on_shared_blocks or len(places) == 1, "another row writes its last token"
        for slot, place in zip(self._slots(batch, row, places), places, strict=True):
            if row in batch.rows_on_shared_blocks:
                continue
            assert slot >= self.block_size, "the null block is nobody's"
            self.cache[slot] = self._content(sequence, tokens[: place + 1])
        places = self._seen_places(end, int(batch.query_lens_B[row]))
        for slot, place in zip(self._slots(batch, row, places), places, strict=True):
            assert self.cache.get(slot) == self._content(sequence, tokens[: place + 1]), "somebody else's keys"

    def _slots(self, batch: ScheduledBatch, row: int, places: range) -> list[int]:
        table, size = int(batch.slots_B[row]), self.block_size
        return [self.block_tables[table, place // size] * size + place % size for place in places]

    def _load_states(self, batch: ScheduledBatch) -> None:
        assert not batch.state_loads
        assert not batch.state_saves

    def _copy_blocks(self, batch: ScheduledBatch) -> None:
        sources, targets = ({copy[side] for copy in batch.copies} for side in (0, 1))
        assert len(targets) == len(batch.copies), "a block is written twice"
        assert 0 not in sources | targets, "the null block is nobody's"
        assert not sources & targets, "copies have no order"
        self.num_copies += len(batch.copies)
        for source, target in batch.copies:
            for offset in range(self.block_size):
                self.cache[target * self.block_size + offset] = self.cache.get(source * self.block_size + offset)

    def _seen_places(self, end: int, query_len: int) -> range:
        """What the step's tokens read; before it the table names the null block alone, once blocks were given back."""
        return range(0 if self.window is None else max(0, end - query_len - self.window + 1), end)

    def _content(self, sequence: Sequence, tokens: list[int]) -> Any:
        """Keys of the last of these tokens depend on all of them and on images up to it."""
        images = [(span.start, sequence.prompt.images[span.image_index].content_hash) for span in
                  sequence.prompt.spans if span.start < len(tokens)]
        return tuple(tokens), tuple(images)

    def _check_blocks(self) -> None:
        counts: dict[int, int] = {}
        for sequence in self.live.values():
            held = sequence.block_table[sequence.num_null_blocks:]
            assert not any(sequence.block_table[: sequence.num_null_blocks])
            assert len(set(held)) == len(held)
            for block in held:
                counts[block] = counts.get(block, 0) + 1
        for source, target in (*self.blocks.copies, *self.blocks._later_copies):
            assert counts[target] == 1, "a copy for nobody"
            counts[source] = counts.get(source, 0) + 1
        assert counts == {block: n for block, n in enumerate(self.blocks._ref_counts) if n}
        assert set(counts).isdisjoint(self.blocks._free)
        assert len(counts) + len(self.blocks._free) == self.blocks.num_usable
