"""Paged attention on the CPU through torch's scaled_dot_product_attention. Knows nothing of models or requests.

What a step costs follows the sum of its contexts, and what it takes beside the cache is bounded. So a decode batch is
cut into pieces, each computed as one padded batch. If every row were padded to the longest, one long context would
multiply the cost and the memory of all others. One call per row would cost a launch each. With a sliding window a row
is the tokens that it sees: nothing before them is read.

T tokens, B sequences, N query heads, K kv heads, G query heads of a kv head, H head dim, W blocks per sequence, S block
size, L context length, Q new tokens of a sequence, R rows of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.platforms.attention import AttentionBackend
from npu_runner.platforms.step_inputs import AttentionMetadata

# torch makes a float of each element of a mask.
MASK_ELEMENTS = 4 << 20
# Fewer query rows at once are not worth their launches, however little they see.
_LEAST_ROWS = 256
# Patches of a vision tower at once: their rows stay in the processor's caches from one operator to the next.
VISION_PATCHES = 2048
# The most bytes of keys and values of one piece. A larger piece leaves the processor's caches before it is read, and is
# fetched from the system and given back in each layer: 3 times slower at 8 kv heads of 128.
PIECE_BYTES = 16 << 20
# Padding that costs less than the launches of one more piece.
SLACK_BYTES = 384 << 10
# A row is padded by a quarter of its own length, where the slack does not allow more.
MOST_PADDING = 0.25


@dataclass(frozen=True, kw_only=True)
class PrefillPiece:
    """Neighbouring sequences whose keys and values are read together.

    query_lens: new tokens of each. seen_lens: tokens of each that are read, the new ones included. slots_L: int64,
    where these lie, one sequence after the other.
    """

    query_lens: list[int]
    seen_lens: list[int]
    slots_L: Tensor


class CpuAttention(AttentionBackend):
    """`piece_bytes`: what the keys and values that a decode step reads at once may take."""

    vision_patches = VISION_PATCHES

    def __init__(self, *, block_size: int, bytes_per_token: int, piece_bytes: int = PIECE_BYTES):
        self.block_size = block_size
        self.bytes_per_token = bytes_per_token
        self.piece_bytes = piece_bytes

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                     device: torch.device) -> dict[int | None, list[PrefillPiece]]:
        """The pieces for each window."""
        return {window: self._prefill_pieces(query_lens_B, context_lens_B, block_tables_BW, window)
                for window in self.windows}

    def _prefill_pieces(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                        window: int | None) -> list[PrefillPiece]:
        seen_lens_B = [length if window is None else min(length, num_new + window - 1)
                       for num_new, length in zip(query_lens_B, context_lens_B, strict=True)]
        pieces = []
        for start, stop in _cut(seen_lens_B, max(1, self.piece_bytes // self.bytes_per_token)):
            slots = []
            for row in range(start, stop):
                places_L = np.arange(context_lens_B[row] - seen_lens_B[row], context_lens_B[row])
                blocks_L = block_tables_BW[row][places_L // self.block_size]
                slots.append(blocks_L * self.block_size + places_L % self.block_size)
            pieces.append(PrefillPiece(query_lens=list(query_lens_B[start:stop]), seen_lens=seen_lens_B[start:stop],
                                       slots_L=torch.from_numpy(np.concatenate(slots))))
        return pieces

    def plan_decode(self, context_lens_B: Sequence[int], block_tables_BW: np.ndarray, device: torch.device,
                    query_lens_B: Sequence[int] | None = None) -> dict[int | None, Any]:
        """One plan for each window. Several tokens of a sequence read its context once, together."""
        if query_lens_B is not None:
            return {window: plan_draft_pieces(
                np.asarray(query_lens_B), np.asarray(context_lens_B), block_tables_BW, block_size=self.block_size,
                bytes_per_token=self.bytes_per_token, piece_bytes=self.piece_bytes, window=window)
                for window in self.windows}
        return {window: plan_pieces(np.asarray(context_lens_B), block_tables_BW, block_size=self.block_size,
                                    bytes_per_token=self.bytes_per_token, piece_bytes=self.piece_bytes, window=window)
                for window in self.windows}

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
        slots = slot_mapping_T.long()
        k_cache.flatten(0, 1).index_copy_(0, slots, k_TKH)
        v_cache.flatten(0, 1).index_copy_(0, slots, v_TKH)

    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
                window: int | None = None) -> Tensor:
        pieces: list[PrefillPiece] = metadata.plan[window]
        outputs = []
        for piece, q_PNH in zip(pieces, q_TNH.split([sum(piece.query_lens) for piece in pieces]), strict=True):
            k, v = (cache.flatten(0, 1).index_select(0, piece.slots_L).split(piece.seen_lens)
                    for cache in (k_cache, v_cache))
            for q_QNH, k_LKH, v_LKH in zip(q_PNH.split(piece.query_lens), k, v, strict=True):
                outputs += _causal_attention(q_QNH, k_LKH, v_LKH, scale, window or len(k_LKH))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def decode(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
               window: int | None = None) -> Tensor:
        if metadata.plan is None:  # a graph's step, of which only the tensors change
            return planned_decode(q_BNH, k_cache, v_cache, metadata.context_lens_B, metadata.block_tables_BW,
                                  self.bytes_per_token, self.piece_bytes, scale, window)
        plan = metadata.plan[window]
        attend = _decode_drafts if isinstance(plan, DraftPlan) else _decode
        return attend(q_BNH, k_cache, v_cache, plan, scale)

    def vision(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: list[int], scale: float) -> Tensor:
        """Neighbours of one length run as one batch."""
        outputs = []
        start = 0
        for length, run in groupby(plan):
            count = sum(1 for _ in run)
            rows = slice(start, start + count * length)
            q, k, v = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q_TNH, k_TNH, v_TNH))
            outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1))
            start = rows.stop
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


@torch.library.custom_op("npu_runner::cpu_planned_decode", mutates_args=())
def planned_decode(q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, context_lens_B: Tensor, block_tables_BW: Tensor,
                   bytes_per_token: int, piece_bytes: int, scale: float, window: int | None) -> Tensor:
    """`CpuAttention.decode` inside a graph, whose shapes are fixed: the pieces are cut while it runs."""
    plan = plan_pieces(context_lens_B.numpy(), block_tables_BW.numpy(), block_size=k_cache.shape[1],
                       bytes_per_token=bytes_per_token, piece_bytes=piece_bytes, window=window)
    return _decode(q_BNH, k_cache, v_cache, plan, scale)


@planned_decode.register_fake
def _planned_decode_shape(q_BNH: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q_BNH, memory_format=torch.contiguous_format)


def _decode(q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    # The query heads that share a kv head are its queries: they see the same tokens.
    q_BKGH = q_BNH.index_select(0, plan.order_B).unflatten(1, (k_cache.shape[2], -1))
    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    outputs = []
    for piece in plan.pieces:
        outputs.append(_attend(q_BKGH[piece.start : piece.stop], keys, values, piece.slots_RL, piece.mask_R11L,
                               plan.span, scale))
    out_BKGH = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return out_BKGH.flatten(1, 2).index_select(0, plan.places_B)


def _decode_drafts(q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, plan: DraftPlan, scale: float) -> Tensor:
    q_TKGH = q_TNH.unflatten(1, (k_cache.shape[2], -1))
    keys, values, num_groups = k_cache.flatten(0, 1), v_cache.flatten(0, 1), q_TKGH.shape[2]
    out_TKGH = torch.empty_like(q_TKGH)
    for piece in plan.pieces:
        tokens, sizes = piece.tokens_RQ.flatten(), piece.tokens_RQ.shape
        # Tokens and query heads that share a kv head are its queries, each with what it sees.
        q_RKMH = q_TKGH.index_select(0, tokens).unflatten(0, sizes).transpose(1, 2).flatten(2, 3)
        mask_R1ML = piece.mask_RQL[:, None, :, None].expand(-1, -1, -1, num_groups, -1).flatten(2, 3)
        out_RKMH = _attend(q_RKMH, keys, values, piece.slots_RL, mask_R1ML, plan.span, scale)
        out_RQKGH = out_RKMH.unflatten(2, (sizes[1], num_groups)).transpose(1, 2)
        out_TKGH.index_copy_(0, tokens, out_RQKGH.flatten(0, 1))
    return out_TKGH.flatten(1, 2)


def _attend(q_RKGH: Tensor, keys: Tensor, values: Tensor, slots_RL: Tensor, mask: Tensor | None, span: int,
            scale: float) -> Tensor:
    """`mask`: float32, added to the scores (R, K, G, L)."""
    if mask is not None and q_RKGH.dtype == torch.float64:  # torch would read it as float64
        mask = mask.double()
    if slots_RL.shape[1] > span:
        return _attend_in_spans(q_RKGH, keys, values, slots_RL, mask, span, scale)
    k_RKLH, v_RKLH = (cache.index_select(0, slots_RL.flatten()).unflatten(0, slots_RL.shape).transpose(1, 2)
                      for cache in (keys, values))
    return F.scaled_dot_product_attention(q_RKGH, k_RKLH, v_RKLH, attn_mask=mask, scale=scale)


def _attend_in_spans(q_1KGH: Tensor, keys: Tensor, values: Tensor, slots_1L: Tensor, mask: Tensor | None, span: int,
                     scale: float) -> Tensor:
    """One row over a context that is never gathered whole: all scores first, then the values."""
    spans = slots_1L[0].split(span)
    q_KGH = q_1KGH[0]
    scores_KGL = torch.cat([torch.bmm(q_KGH, keys.index_select(0, slots).permute(1, 2, 0)) for slots in spans], dim=-1)
    scores_KGL = scores_KGL.float() * scale
    weights_KGL = (scores_KGL if mask is None else scores_KGL + mask[0]).softmax(-1).to(q_KGH.dtype)
    parts = zip(weights_KGL.split(span, dim=-1), spans, strict=True)
    out_KGH = torch.zeros_like(q_KGH, dtype=torch.float32)
    for weights_KGM, slots in parts:
        out_KGH += torch.bmm(weights_KGM, values.index_select(0, slots).transpose(0, 1))
    return out_KGH.to(q_KGH.dtype)[None]


def _cut(lens: Sequence[int], most: int) -> list[tuple[int, int]]:
    """(start, stop) of runs of `lens` that add up to `most` or less, or have one element."""
    cuts, total = [0], 0
    for index, length in enumerate(lens):
        if total and total + length > most:
            cuts.append(index)
            total = 0
        total += length
    return list(pairwise([*cuts, len(lens)]))


def _causal_attention(q_QNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, scale: float, window: int) -> list[Tensor]:
    """The last Q tokens of L, each over `window` up to itself; several parts where a mask (Q, L) would be large."""
    num_new, length = len(q_QNH), len(k_LKH)
    q_1NQH, k_1KLH, v_1KLH = (x.transpose(0, 1)[None] for x in (q_QNH, k_LKH, v_LKH))
    if num_new == length <= window:
        out_1NQH = F.scaled_dot_product_attention(q_1NQH, k_1KLH, v_1KLH, is_causal=True, scale=scale, enable_gqa=True)
        return [out_1NQH[0].transpose(0, 1)]
    num_rows = max(1, MASK_ELEMENTS // length)
    if window < length:
        num_rows = max(_LEAST_ROWS, min(window, MASK_ELEMENTS // (2 * window)))
    outputs = []
    for start, stop in pairwise([*range(0, num_new, num_rows), num_new]):
        end = length - num_new + stop
        begin = max(0, end - (stop - start) - window + 1)
        mask_QL = torch.ones(stop - start, end - begin, dtype=torch.bool).tril(end - begin - (stop - start))
        if window < end - begin:
            mask_QL = mask_QL.triu(end - begin - (stop - start) - window + 1)
        out_1NQH = F.scaled_dot_product_attention(
            q_1NQH[:, :, start:stop], k_1KLH[:, :, begin:end], v_1KLH[:, :, begin:end], attn_mask=mask_QL, scale=scale,
            enable_gqa=True)
        outputs.append(out_1NQH[0].transpose(0, 1))
    return outputs


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
    for start, stop in _cut_decode(lens_B.tolist(), span, slack):
        slots_RL, mask_RL = _piece_slots(lens_B[start:stop], starts_B[start:stop], block_tables_BW[order_B[start:stop]],
                                         block_size)
        is_even = lens_B[start] == lens_B[stop - 1]
        mask_R11L = None if is_even else torch.from_numpy(mask_RL)[:, None, None]
        pieces.append(DecodePiece(start=start, stop=stop, slots_RL=torch.from_numpy(slots_RL), mask_R11L=mask_R11L))
    places_B = np.empty_like(order_B)
    places_B[order_B] = np.arange(len(order_B))
    return DecodePlan(order_B=torch.from_numpy(order_B), places_B=torch.from_numpy(places_B), pieces=pieces, span=span)


@dataclass(frozen=True, kw_only=True)
class DraftPiece:
    """Rows with several tokens each, as a DecodePiece has rows with one.

    tokens_RQ: int64, which of the step's tokens are theirs; a row that has fewer repeats its last one. mask_RQL: 0
    where a token sees another one, -inf elsewhere.
    """

    tokens_RQ: Tensor
    slots_RL: Tensor
    mask_RQL: Tensor


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """span: the most tokens that are read at once."""

    pieces: list[DraftPiece]
    span: int


def plan_draft_pieces(query_lens_B: np.ndarray, context_lens_B: np.ndarray, block_tables_BW: np.ndarray, *,
                      block_size: int, bytes_per_token: int, piece_bytes: int, window: int | None) -> DraftPlan:
    """`plan_pieces` for the last `query_lens_B` tokens of each context."""
    seen_B = context_lens_B if window is None else np.minimum(context_lens_B, window + query_lens_B - 1)
    firsts_B = np.cumsum(query_lens_B) - query_lens_B
    order_B = np.argsort(-seen_B, kind="stable")
    span = max(1, piece_bytes // bytes_per_token)
    pieces = []
    for start, stop in _cut_decode(seen_B[order_B].tolist(), span, min(piece_bytes, SLACK_BYTES) // bytes_per_token):
        rows_R = order_B[start:stop]
        lens_R, begins_R = seen_B[rows_R], (context_lens_B - seen_B)[rows_R]
        slots_RL, mask_RL = _piece_slots(lens_R, begins_R, block_tables_BW[rows_R], block_size)
        queries_RQ = np.minimum(np.arange(query_lens_B[rows_R].max()), query_lens_B[rows_R][:, None] - 1)
        # Of keys and of queries, counted from where the row is read.
        keys_L = np.arange(slots_RL.shape[1])
        places_RQ1 = ((lens_R - query_lens_B[rows_R])[:, None] + queries_RQ)[..., None]
        is_seen_RQL = (keys_L <= places_RQ1) & (keys_L > places_RQ1 - (window or slots_RL.shape[1]))
        mask_RQL = np.where(is_seen_RQL, mask_RL[:, None], np.float32(-np.inf))
        pieces.append(DraftPiece(tokens_RQ=torch.from_numpy(firsts_B[rows_R][:, None] + queries_RQ),
                                 slots_RL=torch.from_numpy(slots_RL), mask_RQL=torch.from_numpy(mask_RQL)))
    return DraftPlan(pieces=pieces, span=span)


def _cut_decode(lens: list[int], most_tokens: int, slack: int) -> list[tuple[int, int]]:
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


def _piece_slots(lens_R: np.ndarray, starts_R: np.ndarray, tables_RW: np.ndarray,
                 block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """slots (R, L) and mask (R, L) float32 of rows whose first is the longest; a row's tokens begin at its start.

    Behind its end a row repeats its last token: a mask would not hide NaN that the last holder of a block left there.
    """
    places_L = np.arange(lens_R[0], dtype=np.int32)
    written_RL = starts_R[:, None] + np.minimum(places_L, lens_R[:, None] - 1)
    blocks_RL = np.take_along_axis(tables_RW, written_RL // block_size, axis=1)
    mask_RL = np.where(places_L < lens_R[:, None], np.float32(0), np.float32(-np.inf))
    return (blocks_RL * block_size + written_RL % block_size).astype(np.int32), mask_RL
