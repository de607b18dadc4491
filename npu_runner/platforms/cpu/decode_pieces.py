"""Cuts a decode batch into pieces that cost what their contexts add up to. Knows lengths and blocks, no keys or values.

A piece is computed as one padded batch. Padding every row to the longest of the step would let one long context
multiply the cost and the memory of all the others; one call for each row would cost a launch each. With a sliding
window a row is the tokens that it sees: nothing before them is read.

B sequences, W blocks per sequence, R rows of a piece, L tokens of its longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# What the keys and values of one piece may take. What is larger leaves the processor's caches before it is read, and is
# fetched from the system and given back in each layer: 3 times slower at 8 kv heads of 128.
PIECE_BYTES = 16 << 20
# Padding that costs less than the launches of one more piece.
SLACK_BYTES = 384 << 10
# A row is padded by a quarter of its own length, where the slack does not allow more.
MOST_PADDING = 0.25


@dataclass(frozen=True, kw_only=True)
class DecodePiece:
    """Rows `start` to `stop` of the order. A row that is larger than a piece stands alone and is read in spans.

    slots_RL: int32, where each token lies; behind its end a row repeats its last token.
    mask_R11L: float32 to be added to the scores, 0 where a row has a token and -inf elsewhere; None where all have L.
    Not bool: of that torch makes this one, in every layer anew.
    """

    start: int
    stop: int
    slots_RL: Tensor
    mask_R11L: Tensor | None


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Longest first: order_B are the rows of the batch as the pieces have them, places_B where each row went.

    span: the most tokens that are read at once.
    """

    order_B: Tensor
    places_B: Tensor
    pieces: list[DecodePiece]
    span: int


def plan_pieces(context_lens_B: np.ndarray, block_tables_BW: np.ndarray, *, block_size: int,
                bytes_per_token: int, piece_bytes: int = PIECE_BYTES, window: int | None = None) -> DecodePlan:
    """`bytes_per_token`: what one token takes of one layer's keys and values."""
    seen_B = context_lens_B if window is None else np.minimum(context_lens_B, window)
    order_B = np.argsort(-seen_B, kind="stable")
    lens_B, starts_B = seen_B[order_B], (context_lens_B - seen_B)[order_B]
    span = max(1, piece_bytes // bytes_per_token)
    slack = min(piece_bytes, SLACK_BYTES) // bytes_per_token
    pieces = []
    for start, stop in _cut(lens_B.tolist(), span, slack):
        slots_RL, mask_RL = _slots(lens_B[start:stop], starts_B[start:stop], block_tables_BW[order_B[start:stop]],
                                   block_size)
        is_even = lens_B[start] == lens_B[stop - 1]
        mask_R11L = None if is_even else torch.from_numpy(mask_RL)[:, None, None]
        pieces.append(DecodePiece(start=start, stop=stop, slots_RL=torch.from_numpy(slots_RL), mask_R11L=mask_R11L))
    places_B = np.empty_like(order_B)
    places_B[order_B] = np.arange(len(order_B))
    return DecodePlan(order_B=torch.from_numpy(order_B), places_B=torch.from_numpy(places_B), pieces=pieces, span=span)


def _cut(lens: list[int], most_tokens: int, slack: int) -> list[tuple[int, int]]:
    """(start, stop) of each piece of `lens`, which falls."""
    cuts = [0]
    padding = 0
    for row, length in enumerate(lens):
        longest = lens[cuts[-1]]
        padding += longest - length
        is_full = (row - cuts[-1] + 1) * longest > most_tokens
        if row > cuts[-1] and (is_full or (padding > slack and longest - length > MOST_PADDING * length)):
            cuts.append(row)
            padding = 0
    return list(zip(cuts, [*cuts[1:], len(lens)], strict=True))


def _slots(lens_R: np.ndarray, starts_R: np.ndarray, tables_RW: np.ndarray,
           block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """slots (R, L) and mask (R, L) float32 of rows whose first is the longest; a row's tokens begin at its start.

    Behind its end a row repeats its last token: a mask would not hide NaN that the last holder of a block left there.
    """
    places_L = np.arange(lens_R[0], dtype=np.int32)
    written_RL = starts_R[:, None] + np.minimum(places_L, lens_R[:, None] - 1)
    blocks_RL = np.take_along_axis(tables_RW, written_RL // block_size, axis=1)
    mask_RL = np.where(places_L < lens_R[:, None], np.float32(0), np.float32(-np.inf))
    return (blocks_RL * block_size + written_RL % block_size).astype(np.int32), mask_RL
