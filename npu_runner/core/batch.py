"""The work of one step, as plain arrays that cross to every rank unchanged. Knows nothing of devices or policies."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from npu_runner.core.sequence import Sequence
from npu_runner.core.state_slots import StateSlots
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import ImageInput, Thinking
from npu_runner.request.sampling_params import SamplingParams

# B sequences in the step, T tokens in the step, N entries that are new in block tables

NO_TOKEN_IDS = np.zeros(0, dtype=np.int32)
NO_NEW_BLOCKS = np.zeros((0, 3), dtype=np.int32)


class SamplingEntry(NamedTuple):
    """A sequence entering its slot: its data for the sampler."""

    slot: int
    params: SamplingParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    thinking: Thinking | None = None
    """Where the prompt ends, in a chat with a model that thinks."""
    pooling: PoolingParams | None = None
    """Set for a row that returns a vector and no token."""


@dataclass(frozen=True)
class ImageSlice:
    """Rows [first_row, first_row + num_rows) of an image's embeddings go to tokens from `token_row` on."""

    content_hash: bytes
    first_row: int
    num_rows: int
    token_row: int
    is_last: bool
    """No later chunk of this sequence needs the image."""


@dataclass(frozen=True)
class PromptScore:
    """Tokens whose log probabilities are wanted, and the tokens of a row's chunk before them.

    `tokens` int32 (L,): the latter in the step. `targets` int32 (L,): the ids of the former; `place` is the first one's
    in the sequence; `num_top`: most probable ones beside each, -1: all. `is_label`: log probabilities, whatever the
    setting `logprobs_mode`.
    """

    row: int
    tokens: np.ndarray
    place: int
    targets: np.ndarray
    num_top: int
    is_label: bool = False


@dataclass(frozen=True)
class PromptStates:
    """Tokens of a row's chunk, or of its decode step, whose hidden states are wanted.

    [first_token, first_token + num_tokens) in the step; `place` is the first one's in the sequence.
    """

    row: int
    first_token: int
    num_tokens: int
    place: int


@dataclass
class ScheduledBatch:
    """One prefill or decode step.

    `context_lens_B` counts each sequence's tokens including this step's. `positions` is int32 (T,), or (3, T) for a
    prefill of an M-RoPE model. Rows with `samples_B` want a next token; the others are chunks of longer prompts.
    `token_ids_T` is empty in a decode step: its tokens are on the device, where the step before may still be choosing
    them. If it has drafts it has tokens too: each row's last token and its drafts. Their successors are wanted as well.
    `state_slots`: slot of the state pool of each row (B,); where there are drafts of each token (T,), behind which that
    one's state is left. None: of each row that of its number.
    `previous_positions`: of the tokens before a prefill's rows, (B,) or (3, B), any value where there is none; None in
    other steps.
    `wants_drafts_B`: of the rows of a decode step, (B,) bool: the next step may take what a head proposes; None: of
    all.
    `new_blocks_N3` has the block table entries that no earlier step has sent: (slot, column, block), each place once,
    block 0 where a block was freed. Tables are kept by slot wherever steps run; a sequence's first step in its slot
    sends its whole table.
    """

    is_prefill: bool
    request_ids: list[str]
    slots_B: np.ndarray
    token_ids_T: np.ndarray
    positions: np.ndarray
    query_lens_B: np.ndarray
    context_lens_B: np.ndarray
    new_blocks_N3: np.ndarray
    samples_B: np.ndarray
    state_slots: np.ndarray | None = None
    previous_positions: np.ndarray | None = None
    wants_drafts_B: np.ndarray | None = None
    new_sampling: list[SamplingEntry] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)
    images: list[ImageInput] = field(default_factory=list)
    """Distinct images that this step's tokens touch."""
    image_slices: list[ImageSlice] = field(default_factory=list)
    prompt_scores: list[PromptScore] = field(default_factory=list)
    prompt_states: list[PromptStates] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) blocks of the KV cache: copied before the step's forward."""
    rows_on_shared_blocks: list[int] = field(default_factory=list)
    """Rows of one token that read it from another row's block in this step, and write their own to the null block."""
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    """(snapshot slot, slot) of the state pool: copied before the step's forward."""
    state_saves: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, tokens, snapshot slot): the state after that many tokens of the row is to be kept in that slot as well."""
    new_rules: list[tuple[int, str]] = field(default_factory=list)
    """(number, grammar) of what is to be built from now on, for sequences that are in no step before it is."""

    @property
    def has_drafts(self) -> bool:
        """A decode step of several tokens a row."""
        return not self.is_prefill and len(self.token_ids_T) > 0

    @property
    def batch_size(self) -> int:
        return len(self.slots_B)

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens_B.sum())

    def rows_with_full_blocks(self, block_size: int) -> list[int]:
        """Rows whose tokens, this step's included, end with a block."""
        return np.flatnonzero(self.context_lens_B % block_size == 0).tolist()

    def describe(self) -> str:
        """The kind and size of the step, for messages."""
        kind = "prefill" if self.is_prefill else "decode"
        return f"{kind} of {self.batch_size} sequences, {self.num_tokens} tokens"


class RunningTable:
    """Rows of everything that runs, kept across steps so that a decode step costs what is new in it.

    A row is a slot. `loses_blocks`: those behind a window become null entries while a sequence runs. `state_spares`:
    sequences have states, which drafts move.
    """

    def __init__(self, num_slots: int, block_size: int, *, loses_blocks: bool = False,
                 state_spares: range | None = None):
        self.position_deltas = np.zeros(num_slots, dtype=np.int32)
        self.block_size = block_size
        self._num_blocks = np.zeros(num_slots, dtype=np.int32)
        """The number of blocks of each slot's table that earlier steps have sent."""
        self._num_null_blocks = np.zeros(num_slots, dtype=np.int32)
        self._loses_blocks = loses_blocks
        self.states = None if state_spares is None else StateSlots(num_slots, state_spares)
        self.reset()

    def reset(self) -> None:
        """Free all rows. The next step sends all of them to the sampler as freed, because its last update may be
        lost."""
        num_slots = len(self._num_blocks)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._freed = list(range(num_slots))
        self._decoding: _Decoding | None = None
        if self.states is not None:
            self.states.reset()

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def enter(self, seq: Sequence) -> None:
        """Give `seq` a row."""
        seq.slot = self._free_slots.pop()
        self._num_blocks[seq.slot] = self._num_null_blocks[seq.slot] = 0
        self.position_deltas[seq.slot] = seq.prompt.position_delta
        self._decoding = None

    def leave(self, seq: Sequence) -> None:
        assert seq.slot is not None, f"sequence {seq.seq_id} holds no slot"
        self._free_slots.append(seq.slot)
        self._freed.append(seq.slot)
        seq.slot = None
        self._decoding = None

    def decoding(self, running: list[Sequence]) -> _Decoding:
        """The arrays of a decode step of `running`, kept from the step before if the sequences are the same.

        They are rebuilt only when a sequence joins or leaves; otherwise each has one token more.
        """
        if self._decoding is None or self._decoding.running != running:
            self._decoding = _Decoding(
                running[:], [seq.request_id for seq in running], _per_sequence(seq.slot for seq in running),
                _per_sequence(seq.num_tokens for seq in running),
                [row for row, seq in enumerate(running) if seq.returns_states])
        return self._decoding

    def forget_decoding(self) -> None:
        """Sequences may get more than one token each."""
        self._decoding = None

    def record_shorter(self, seq: Sequence) -> None:
        """`seq` has given back blocks at its end: others may be told in their places."""
        assert seq.slot is not None, f"sequence {seq.seq_id} holds no slot"
        self._num_blocks[seq.slot] = min(int(self._num_blocks[seq.slot]), len(seq.block_table))

    def without_room(self, running: list[Sequence]) -> list[Sequence]:
        """The sequences of `running` whose blocks have no room for their next token."""
        return [seq for _, seq in self._unknown(running) if seq.num_tokens > len(seq.block_table) * self.block_size]

    def unsent_entries(self, sequences: Iterable[Sequence]) -> np.ndarray:
        """(N, 3) int32, see ScheduledBatch: entries of the tables of `sequences` that were not sent before. Counts them
        as sent."""
        news: list[tuple[int, int, int]] = []
        for seq in sequences:
            slot, shared = seq.slot, seq.shared_block
            blocks = [*seq.block_table[:-1], shared] if shared else seq.block_table
            assert slot is not None, f"sequence {seq.seq_id} is in a step and holds no slot"
            first, first_null = int(self._num_blocks[slot]), int(self._num_null_blocks[slot])
            # Freed blocks may have another owner: they must not be found here.
            news += [(slot, column, 0) for column in range(first_null, min(first, seq.num_null_blocks))]
            news += zip(repeat(slot), range(first, len(blocks)), blocks[first:], strict=False)
            # The sequence's own block in the place of a shared one is sent with its next step.
            self._num_blocks[slot], self._num_null_blocks[slot] = len(blocks) - (shared > 0), seq.num_null_blocks
        return np.array(news, dtype=np.int32) if news else NO_NEW_BLOCKS

    def unsent_decoding_entries(self, running: list[Sequence]) -> np.ndarray:
        """The same of sequences that decode, of which few have news."""
        news = {slot: seq for slot, seq in self._unknown(running)}
        if self._loses_blocks:
            slots_B = self.decoding(running).slots_B
            num_null_B = _per_sequence(seq.num_null_blocks for seq in running)
            rows = np.flatnonzero(num_null_B != self._num_null_blocks[slots_B]).tolist()
            news.update((int(slots_B[row]), running[row]) for row in rows)
        return self.unsent_entries(news.values())

    def _unknown(self, running: list[Sequence]) -> list[tuple[int, Sequence]]:
        """Those, with their slots, whose next token lies in a block that no step has sent."""
        rows = self.decoding(running)
        short_B = rows.context_lens_B > self._num_blocks[rows.slots_B] * self.block_size
        return [(int(rows.slots_B[row]), running[row]) for row in np.flatnonzero(short_B).tolist()]

    def state_slots(self, slots_B: np.ndarray) -> np.ndarray | None:
        """Where the states of these rows lie, as ScheduledBatch has it."""
        return None if self.states is None else self.states.of(slots_B)

    def pop_freed_slots(self) -> list[int]:
        freed, self._freed = self._freed, []
        return freed


@dataclass
class _Decoding:
    """Sequences that decode together, in batch order. `context_lens_B` counts their next tokens."""

    running: list[Sequence]
    request_ids: list[str]
    slots_B: np.ndarray
    context_lens_B: np.ndarray
    rows_with_states: list[int]

    def advance(self) -> None:
        self.context_lens_B = self.context_lens_B + 1


def decode_batch(running: list[Sequence], table: RunningTable) -> ScheduledBatch:
    """One token for each of `running`, blocks already allocated; the table counts it as launched."""
    new_blocks_N3 = table.unsent_decoding_entries(running)
    rows = table.decoding(running)
    slots_B, context_lens_B = rows.slots_B, rows.context_lens_B
    rows.advance()
    return ScheduledBatch(
        is_prefill=False,
        request_ids=rows.request_ids,
        slots_B=slots_B,
        token_ids_T=NO_TOKEN_IDS,
        positions=context_lens_B - 1 + table.position_deltas[slots_B],
        query_lens_B=np.ones(len(running), dtype=np.int32),
        context_lens_B=context_lens_B,
        new_blocks_N3=new_blocks_N3,
        samples_B=np.ones(len(running), dtype=np.bool_),
        prompt_states=[PromptStates(row, row, 1, int(context_lens_B[row]) - 1) for row in rows.rows_with_states],
        state_slots=table.state_slots(slots_B),
        freed_slots=table.pop_freed_slots())


def drafted_batch(running: list[Sequence], drafts: list[list[int]], table: RunningTable) -> ScheduledBatch:
    """The last token of each of `running` and its drafts, blocks already allocated; nothing else is under way."""
    counts_B = _per_sequence(1 + len(tokens) for tokens in drafts)
    ends_B = _per_sequence(seq.num_tokens for seq in running) + counts_B - 1
    slots_B = _per_sequence(seq.slot for seq in running)
    lasts = (seq.tokens(seq.num_tokens - 1, seq.num_tokens) for seq in running)
    tokens = [[*last, *tokens] for last, tokens in zip(lasts, drafts, strict=True)]
    places_T = np.concatenate([np.arange(end - num, end, dtype=np.int32)
                               for end, num in zip(ends_B.tolist(), counts_B.tolist(), strict=True)])
    table.forget_decoding()
    return ScheduledBatch(
        is_prefill=False,
        request_ids=[seq.request_id for seq in running],
        slots_B=slots_B,
        token_ids_T=np.fromiter(chain(*tokens), dtype=np.int32),
        positions=places_T + np.repeat(table.position_deltas[slots_B], counts_B),
        query_lens_B=counts_B,
        context_lens_B=ends_B,
        new_blocks_N3=table.unsent_entries(running),
        samples_B=np.ones(len(running), dtype=np.bool_),
        state_slots=None if table.states is None else table.states.lend(slots_B, map(len, drafts)),
        freed_slots=table.pop_freed_slots())


def _per_sequence(values: Iterable[int | None]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int32)


def prefill_batch(chunks: SequenceOf[tuple[Sequence, int]], table: RunningTable,
                  state_saves: list[tuple[int, int, int]], *, uses_mrope: bool) -> ScheduledBatch:
    """The next `num_tokens` uncomputed tokens of each (sequence, num_tokens), blocks already allocated."""
    starts_B = _per_sequence(seq.num_computed_tokens for seq, _ in chunks)
    query_lens_B = _per_sequence(num for _, num in chunks)
    context_lens_B = starts_B + query_lens_B
    shifts_T = np.repeat(context_lens_B - np.cumsum(query_lens_B, dtype=np.int32), query_lens_B)
    images, slices, scores, states = _parts_of_prompts(chunks)
    samples = [seq.num_uncomputed_tokens == num for seq, num in chunks]
    slots_B = _per_sequence(seq.slot for seq, _ in chunks)
    state_slots = table.state_slots(slots_B)
    return ScheduledBatch(
        is_prefill=True,
        request_ids=[seq.request_id for seq, _ in chunks],
        slots_B=slots_B,
        token_ids_T=np.concatenate([seq.token_array(seq.num_computed_tokens, seq.num_computed_tokens + num)
                                    for seq, num in chunks]),
        positions=_positions_3T(chunks) if uses_mrope else shifts_T + np.arange(len(shifts_T), dtype=np.int32),
        query_lens_B=query_lens_B,
        context_lens_B=context_lens_B,
        new_blocks_N3=table.unsent_entries(seq for seq, _ in chunks),
        samples_B=np.array(samples, dtype=np.bool_),
        state_slots=state_slots,
        previous_positions=_positions_3T([(seq, 1) for seq, _ in chunks], -1) if uses_mrope else starts_B.clip(1) - 1,
        new_sampling=[_sampling_entry(seq) for (seq, _), wanted in zip(chunks, samples, strict=True) if wanted],
        freed_slots=table.pop_freed_slots(),
        images=list(images.values()),
        image_slices=slices,
        prompt_scores=scores,
        prompt_states=states,
        rows_on_shared_blocks=[row for row, (seq, _) in enumerate(chunks) if seq.shared_block],
        state_loads=_state_loads(chunks, slots_B if state_slots is None else state_slots),
        state_saves=state_saves)


def _parts_of_prompts(chunks: SequenceOf[tuple[Sequence, int]]) -> tuple[
        dict[bytes, ImageInput], list[ImageSlice], list[PromptScore], list[PromptStates]]:
    """Images by their hash, where they lie in the step, and what is asked for of prompts' tokens."""
    images: dict[bytes, ImageInput] = {}
    slices: list[ImageSlice] = []
    scores: list[PromptScore] = []
    states: list[PromptStates] = []
    token_row = 0
    for row, (seq, num) in enumerate(chunks):
        if seq.scores_prompt or seq.scored_ends:
            scores.append(_prompt_score(seq, num, row, token_row))
        if seq.returns_states:
            states.append(PromptStates(row, token_row, num, seq.num_computed_tokens))
        for image, image_slice in _image_slices(seq, num, token_row) if seq.prompt.spans else ():
            images.setdefault(image.content_hash, image)
            slices.append(image_slice)
        token_row += num
    return images, slices, [score for score in scores if len(score.targets)], states


def _prompt_score(seq: Sequence, num: int, row: int, token_row: int) -> PromptScore:
    start = seq.num_computed_tokens
    end = start + num
    place = 1 + (max(start, seq.num_prompt_tokens - 1) if seq.scored_ends else start)
    targets = seq.tokens(place, end + 1)
    tokens_L = np.arange(token_row + place - 1 - start, token_row + num, dtype=np.int32)[: len(targets)]
    if end == seq.num_tokens and seq.scored_ends:
        targets = [*targets, *seq.scored_ends]
        tokens_L = np.append(tokens_L, np.full(len(seq.scored_ends), token_row + num - 1, dtype=np.int32))
    return PromptScore(row, tokens_L, place, np.asarray(targets, dtype=np.int32), seq.params.prompt_logprobs or 0,
                       is_label=bool(seq.scored_ends))


def _state_loads(chunks: SequenceOf[tuple[Sequence, int]], state_slots_B: np.ndarray) -> list[tuple[int, int]]:
    """The state loads of sequences that start after a cached prefix."""
    return [(seq.state_source, slot) for (seq, _), slot in zip(chunks, state_slots_B.tolist(), strict=True)
            if seq.state_source is not None and seq.is_at_its_start]


def probe_batch(*, uses_mrope: bool) -> ScheduledBatch:
    """A step of one token that belongs to no request, in slot 0 and the null block: does the device still answer?

    Nothing may run. The next step has to free the slot.
    """
    ones, zeros = np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    entry = SamplingEntry(slot=0, params=SamplingParams(temperature=0.0), seed=0, prompt_token_ids=[0],
                          output_token_ids=[])
    return ScheduledBatch(
        is_prefill=True, request_ids=["(probe)"], slots_B=zeros, token_ids_T=zeros,
        positions=np.zeros((3, 1), dtype=np.int32) if uses_mrope else zeros, query_lens_B=ones, context_lens_B=ones,
        new_blocks_N3=np.zeros((1, 3), dtype=np.int32), samples_B=np.ones(1, dtype=np.bool_), new_sampling=[entry])


def _positions_3T(chunks: Iterable[tuple[Sequence, int]], offset: int = 0) -> np.ndarray:
    """(3, T) int32: positions of the next tokens of each sequence, or of those `offset` places from them."""
    return np.concatenate([_positions(seq, max(0, seq.num_computed_tokens + offset), num) for seq, num in chunks],
                          axis=-1)


def _positions(seq: Sequence, start: int, num: int) -> np.ndarray:
    end, prompt = start + num, seq.prompt
    if prompt.positions_3T is None:
        return np.broadcast_to(np.arange(start, end, dtype=np.int32), (3, num))
    in_prompt = prompt.positions_3T[:, start:end]
    generated_T = np.arange(max(start, seq.num_prompt_tokens), max(end, seq.num_prompt_tokens), dtype=np.int32)
    after_prompt = np.broadcast_to(generated_T + prompt.position_delta, (3, len(generated_T)))
    return np.concatenate([in_prompt, after_prompt], axis=1).astype(np.int32, copy=False)


def _image_slices(seq: Sequence, num: int, token_row: int) -> list[tuple[ImageInput, ImageSlice]]:
    start, end = seq.num_computed_tokens, seq.num_computed_tokens + num
    found = []
    for span in seq.prompt.spans:
        first, last = max(start, span.start), min(end, span.start + span.num_tokens)
        if first < last:
            image = seq.prompt.images[span.image_index]
            found.append((image, ImageSlice(
                content_hash=image.content_hash, first_row=first - span.start, num_rows=last - first,
                token_row=token_row + first - start, is_last=last == span.start + span.num_tokens)))
    return found


def _sampling_entry(seq: Sequence) -> SamplingEntry:
    assert seq.slot is not None, f"sequence {seq.seq_id} samples without a slot"
    return SamplingEntry(seq.slot, seq.params, seq.seed, seq.prompt.token_ids, list(seq.output_token_ids),
                         thinking=seq.prompt.thinking, pooling=seq.pooling)
