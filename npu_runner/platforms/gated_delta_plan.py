"""Where a prefill step's tokens go in the convolution and in chunks of the gated delta rule, in plain torch.

Knows lengths, positions and slots; no heads and no values.

Rows that need chunks of about one size form a group. A group is computed wave by wave; a wave is the next chunk of each
of its rows. Rows are sorted by length, longest first, so a wave's rows are the first ones. A group is cut into pieces
of a few waves. What does not depend on the states is computed a piece at a time, which bounds the memory of long
prompts.

T tokens, B rows of the step, W convolution kernel, R rows of a group, N chunks of a piece, S places of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.gated_delta import CHUNK_SIZE, StateSave

CHUNK_SIZES = (8, 16, 32, CHUNK_SIZE)
"""Lengths of padded chunks. Rows of a few tokens would otherwise cost as much as 64."""
PIECE_CHUNKS = 32


@dataclass(frozen=True, kw_only=True)
class Wave:
    """The next chunk of each of the first `num_rows` rows of the group.

    Then the states of `saved_rows` are copied to `saved_slots`; both None where nothing is saved.
    """

    num_rows: int
    saved_rows: Tensor | None
    saved_slots: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Consecutive waves: their chunks, one wave after the other.

    tokens_NS: the token of the step in each place; behind its end a chunk repeats its last token. mask_NS: where there
    is a token, real: the flat places that have one; both None where all have. out_tokens: the tokens of these places.
    """

    waves: list[Wave]
    tokens_NS: Tensor
    mask_NS: Tensor | None
    real: Tensor | None
    out_tokens: Tensor


@dataclass(frozen=True, kw_only=True)
class ChunkGroup:
    """rows_R: rows of the step, those of most chunks first. is_old_R: the row does not begin its sequence."""

    rows_R: Tensor
    is_old_R: Tensor
    pieces: list[Piece]


@dataclass(frozen=True, kw_only=True)
class ConvolutionPlan:
    """Each row is convolved behind the W - 1 inputs before it, L = T + B (W - 1) in all.

    sources_L: of [the step's inputs; what the slots hold], is_old_B as in ChunkGroup; places_T: where each token's
    output lies. tails_XW: the last W - 1 inputs of each row, then of each save; saved_slots of these, or None.
    """

    sources_L: Tensor
    is_old_B: Tensor
    places_T: Tensor
    tails_XW: Tensor
    saved_slots: Tensor | None


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """The plan of one step, for all layers. Indices are int64 on the device."""

    convolution: ConvolutionPlan
    groups: list[ChunkGroup]


@dataclass(kw_only=True)
class DraftSources:
    """The inputs of the convolutions of a decode step with drafts, as indices on the device.

    firsts_N: tokens whose slots hold what N sequences, or tokens, go on from. sources_TW: the inputs that each token
    sees, itself at last, of [the step's inputs; W - 1 before each of these].
    """

    firsts_N: Tensor
    sources_TW: Tensor


@dataclass(frozen=True)
class _Chunk:
    first_token: int
    length: int
    saved_slots: list[int]


def plan_chunks(query_lens_B: Sequence[int], context_lens_B: Sequence[int],
                saves: Sequence[StateSave], device: torch.device) -> list[ChunkGroup]:
    """The groups of a step."""
    slots: dict[int, dict[int, list[int]]] = {}
    for save in saves:
        slots.setdefault(save.row, {}).setdefault(save.offset, []).append(save.slot)
    first_token = 0
    rows = []
    for row, (query_len, context_len) in enumerate(zip(query_lens_B, context_lens_B, strict=True)):
        rows.append(_cut_row(first_token, query_len, context_len, slots.get(row, {})))
        first_token += query_len
    sizes = [_padded_size(max(chunk.length for chunk in chunks)) for chunks in rows]
    order = sorted(range(len(rows)), key=lambda row: (sizes[row], -len(rows[row])))
    is_old_B = np.asarray(query_lens_B) != np.asarray(context_lens_B)
    groups = []
    for size, members in groupby(order, key=sizes.__getitem__):
        rows_R = np.array(list(members), dtype=np.int64)
        pieces = [_make_piece(size, waves, device) for waves in _cut_waves([rows[row] for row in rows_R.tolist()])]
        groups.append(ChunkGroup(rows_R=_to(rows_R, device), is_old_R=_to(is_old_B[rows_R], device), pieces=pieces))
    return groups


def _cut_row(first_token: int, query_len: int, context_len: int, slots: dict[int, list[int]]) -> list[_Chunk]:
    start = context_len - query_len
    cuts = [start, *range((start // CHUNK_SIZE + 1) * CHUNK_SIZE, context_len, CHUNK_SIZE), context_len]
    return [_Chunk(first_token + low - start, high - low, slots.get(high - start, [])) for low, high in pairwise(cuts)]


def _padded_size(length: int) -> int:
    return next(size for size in CHUNK_SIZES if size >= length)


def _cut_waves(rows: list[list[_Chunk]]) -> list[list[list[_Chunk]]]:
    """The waves of each piece of a group of `rows`, longest first."""
    waves: list[list[_Chunk]] = [[] for _ in rows[0]]
    for chunks in rows:
        for wave, chunk in zip(waves, chunks, strict=False):
            wave.append(chunk)
    pieces: list[list[list[_Chunk]]] = []
    num_chunks = PIECE_CHUNKS
    for wave in waves:
        if num_chunks + len(wave) > PIECE_CHUNKS:
            pieces.append([])
            num_chunks = 0
        pieces[-1].append(wave)
        num_chunks += len(wave)
    return pieces


def _make_piece(size: int, waves: list[list[_Chunk]], device: torch.device) -> Piece:
    chunks = [chunk for wave in waves for chunk in wave]
    firsts_N1 = np.array([[chunk.first_token] for chunk in chunks], dtype=np.int64)
    lengths_N1 = np.array([[chunk.length] for chunk in chunks], dtype=np.int64)
    places_S = np.arange(size, dtype=np.int64)
    mask_NS = places_S < lengths_N1
    tokens_NS = firsts_N1 + np.minimum(places_S, lengths_N1 - 1)
    is_full = bool(mask_NS.all())
    return Piece(
        waves=[_make_wave(wave, device) for wave in waves],
        tokens_NS=_to(tokens_NS, device),
        mask_NS=None if is_full else _to(mask_NS, device),
        real=None if is_full else _to(np.flatnonzero(mask_NS), device),
        out_tokens=_to(tokens_NS[mask_NS], device))


def _make_wave(wave: list[_Chunk], device: torch.device) -> Wave:
    saved = [(row, slot) for row, chunk in enumerate(wave) for slot in chunk.saved_slots]
    if not saved:
        return Wave(num_rows=len(wave), saved_rows=None, saved_slots=None)
    rows, slots = _to(np.array(saved, dtype=np.int64).T, device)
    return Wave(num_rows=len(wave), saved_rows=rows, saved_slots=slots)


def plan_convolution(query_lens_B: Sequence[int], context_lens_B: Sequence[int], saves: Sequence[StateSave],
                     kernel_size: int, device: torch.device) -> ConvolutionPlan:
    lens_B, before = np.asarray(query_lens_B), kernel_size - 1
    num_tokens, num_rows = int(lens_B.sum()), len(lens_B)
    starts_B = np.cumsum(lens_B) - lens_B + np.arange(num_rows) * before
    places_T = np.arange(num_tokens) + np.repeat(np.arange(num_rows), lens_B) * before
    sources_L = np.empty(num_tokens + num_rows * before, dtype=np.int64)
    sources_L[places_T + before] = np.arange(num_tokens)
    sources_L[starts_B[:, None] + np.arange(before)] = num_tokens + np.arange(num_rows * before).reshape(num_rows, -1)
    tails = np.array([*(starts_B + lens_B), *(starts_B[save.row] + save.offset for save in saves)], dtype=np.int64)
    return ConvolutionPlan(
        sources_L=_to(sources_L, device),
        is_old_B=_to(lens_B != np.asarray(context_lens_B), device),
        places_T=_to(places_T, device),
        tails_XW=_to(tails[:, None] + np.arange(before), device),
        saved_slots=_to(np.array([save.slot for save in saves], dtype=np.int64), device) if saves else None)


def plan_draft_steps(query_lens_B: Sequence[int], kernel_size: int, device: torch.device) -> DraftSources:
    """Plan a decode step whose sequences have these numbers of tokens."""
    lens_B, before = np.asarray(query_lens_B, dtype=np.int32), kernel_size - 1
    firsts_B = (np.cumsum(lens_B) - lens_B).astype(np.int64)
    num_tokens, rows_T = int(lens_B.sum()), np.repeat(np.arange(len(lens_B)), lens_B)
    # Places within the sequence of what each token sees; those below 0 are before this step.
    places_TW = (np.arange(num_tokens) - firsts_B[rows_T])[:, None] + np.arange(-before, 1)
    of_slots_TW = num_tokens + rows_T[:, None] * before + places_TW + before
    sources_TW = np.where(places_TW < 0, of_slots_TW, firsts_B[rows_T][:, None] + places_TW)
    return DraftSources(firsts_N=_to(firsts_B, device), sources_TW=_to(sources_TW, device))


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
