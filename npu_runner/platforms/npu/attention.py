"""Paged attention through npu_fused_infer_attention_score (FIA). Knows nothing of models or requests.

T tokens, B sequences, N query heads, K kv heads, H head dim, NB blocks, S block size.

FIA needs the lengths of a step where the kernel's tiling is computed. There are two kinds of `AttentionMetadata.plan`:
- eager and captured (aclgraph): lists of Python integers, `HostLengths`; a captured graph takes new ones at replay.
- the graph engine (GE): int64 tensors on the device, `DeviceLengths`, since GE computes the tiling itself.

Sliding windows: prefill uses sparse mode 4, a band. By its documents, that mode has no effect if all queries are one
token long. So decode gets a table that begins with the window's first block, lengths that count from there, and a mask
for tokens of that block before the window (WindowDecode). A step reads the window and less than a block more. V blocks
that a window may touch, L = V * S.

A step with drafts gives the kernel all queries of a sequence together, so that it reads keys and values once: TND,
sparse mode 3, running totals. Layers with a window take each token as a row of its own, as does everything where
`kernels` say so. A captured step has a fixed number of sequences, none of them empty, so the queries have some of
padding before them (platforms/attention.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch_npu
from torch import Tensor

from npu_runner.platforms.attention import AttentionBackend, ends_of_tokens
from npu_runner.platforms.npu.kernels import CACHE_WRITES, FIRST_CHOICES, VISION_ATTENTIONS
from npu_runner.platforms.npu.settings import ATTENTION_FACTS
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.platforms.transfers import upload_together

_MASK_SIDE = 2048  # what sparse mode 3 ("right-down causal") asks for, whatever the lengths
_CAUSAL, _BAND, _FULL = 3, 4, 0
# A sequence of padding has as many keys as queries: at most one more than the graph's tokens, and three in a trace.
_MOST_KEYS_BEHIND = 3
# Copied keys, and copied values, lie beside the caches for a moment: far less than what the memory ledger leaves free.
_COPIED_BYTES = 32 << 20


class HostLengths(NamedTuple):
    """Running totals of the query lengths, and each sequence's context length.

    seen_lens: by sliding window, if some context is longer: lengths of the contexts from the window's first block on.
    calls: records the window of each call; None records nothing.
    num_ahead: queries of padding before the step's.
    """

    query_totals: list[int]
    context_lens: list[int]
    seen_lens: dict[int, list[int]] = {}  # noqa: RUF012 - read-only
    calls: list[int | None] | None = None
    num_ahead: int = 0


class DeviceLengths(NamedTuple):
    """The same, as int64 tensors on the device."""

    query_totals_B: Tensor
    context_lens_B: Tensor
    num_ahead: int = 0


def _kernel(plan: HostLengths | DeviceLengths) -> Any:
    if isinstance(plan, DeviceLengths):
        return torch.ops.air.npu_fused_infer_attention_score  # torchair registers it; graphs.py loads that
    return torch_npu.npu_fused_infer_attention_score


class NpuAttention(AttentionBackend):
    facts = ATTENTION_FACTS

    def __init__(self, *, num_heads: int, num_kv_heads: int, block_size: int, device: torch.device,
                 masks_decode: bool = True, kernels: Mapping[str, str] = FIRST_CHOICES):
        """`masks_decode` False: decode goes without a mask, as the kernel's own paths for one query a row ask for."""
        self._write_cache = CACHE_WRITES[kernels["cache_write"]]
        self._attend_images = VISION_ATTENTIONS[kernels["vision"]]
        self._gathers_windows = kernels["window"] != FIRST_CHOICES["window"]
        self._groups_drafts = masks_decode and kernels["drafts"] == FIRST_CHOICES["drafts"]
        self.masks_decode = masks_decode
        self.pads_with_real_rows = not masks_decode
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        self._windows: dict[int | None, WindowDecode | None] = {None: None}
        self.mask = torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool).triu(1).to(device)

    @property
    def groups_drafts(self) -> bool:  # type: ignore[override]
        return self._groups_drafts and None in self._windows

    @property
    def windows(self) -> tuple[int | None, ...]:  # type: ignore[override]
        return tuple(self._windows)

    @windows.setter
    def windows(self, windows: tuple[int | None, ...]) -> None:
        self._windows = {window: None if window is None else WindowDecode(window, self.block_size, self.mask.device)
                         for window in windows}

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                     device: torch.device) -> HostLengths:
        return HostLengths(list(accumulate(query_lens_B)), list(context_lens_B), self._outgrown(context_lens_B))

    def plan_decode(self, context_lens_B: Sequence[int], block_tables_BW: np.ndarray, device: torch.device,
                    query_lens_B: Sequence[int] | None = None) -> HostLengths:
        totals, ends = list(range(1, len(context_lens_B) + 1)), list(context_lens_B)
        if query_lens_B is not None:
            ends = ends_of_tokens(query_lens_B, context_lens_B).tolist()
            if self.groups_drafts:
                return HostLengths(list(accumulate(query_lens_B)), list(context_lens_B), self._outgrown(ends))
            totals = list(range(1, len(ends) + 1))
        return HostLengths(totals, ends, self._outgrown(ends))

    def _outgrown(self, context_lens_B: Sequence[int]) -> dict[int, list[int]]:
        longest = max(context_lens_B)
        return {window: seen_lens(context_lens_B, window, self.block_size) for window in self.windows
                if window is not None and window < longest}

    def lengths_by_window(self, context_lens_B: Sequence[int],
                          sequences_3S: np.ndarray | None = None) -> list[list[int]]:
        """The lengths for a decode graph's attention calls, for each of `windows`; at the end, with `sequences_3S`,
        their running totals."""
        whole, *totals = [list(context_lens_B)] if sequences_3S is None else sequences_3S[:0:-1].tolist()
        return [*(whole if window is None else seen_lens(context_lens_B, window, self.block_size)
                  for window in self.windows), *totals]

    def graph_plan(self, lengths: Sequence[list[int]], calls: list[int | None] | None = None) -> HostLengths:
        """The plan of a decode graph, given what `lengths_by_window` gave: every window counts as outgrown."""
        is_grouped = len(lengths) > len(self.windows)
        by_window = dict(zip(self.windows, lengths, strict=not is_grouped))
        totals = lengths[-1] if is_grouped else list(range(1, len(lengths[0]) + 1))
        seen = {window: lens for window, lens in by_window.items() if window is not None}
        return HostLengths(totals, by_window.get(None, []), seen, calls, len(totals) if is_grouped else 0)

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
        # The kernels take no strided input: v is a slice of the qkv matmul and costs a copy. The caches go in as they
        # are: torchair leaves a write in place only when it is into an input of the graph, not into a view of one.
        # npu_scatter_pa_kv_cache refuses more tokens than the cache has slots. Only dummy steps over one block have
        # more, and what they write is not read.
        num_slots = k_cache.shape[0] * k_cache.shape[1]
        if len(slot_mapping_T) > num_slots:
            k_TKH, v_TKH, slot_mapping_T = (x[:num_slots] for x in (k_TKH, v_TKH, slot_mapping_T))
        self._write_cache(k_TKH.contiguous(), v_TKH.contiguous(), k_cache, v_cache, slot_mapping_T)

    def copy_blocks(self, k_cache: Tensor, v_cache: Tensor, pairs_N2: np.ndarray) -> None:
        # index_copy_ along the second axis would transpose a whole cache, twice. A cache write takes the blocks of all
        # layers for those of one, keys and values together.
        num_layers, num_blocks, block_size = k_cache.shape[:3]
        keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        blocks_N2 = (np.arange(num_layers, dtype=np.int32)[:, None, None] * num_blocks + pairs_N2).reshape(-1, 2)
        slots_T = (blocks_N2[:, 1:] * block_size + np.arange(block_size, dtype=np.int32)).ravel()
        sources_N, slots_T = upload_together([blocks_N2[:, 0], slots_T], k_cache.device)
        num_at_once = max(1, _COPIED_BYTES // keys[0].nbytes)
        for sources, slots in zip(sources_N.split(num_at_once), slots_T.split(num_at_once * block_size), strict=True):
            k_TKH, v_TKH = (cache.index_select(0, sources).flatten(0, 1) for cache in (keys, values))
            self.write_kv(k_TKH, v_TKH, keys, values, slots)

    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
                window: int | None = None) -> Tensor:
        plan: HostLengths = metadata.plan
        if window is None or window not in plan.seen_lens:
            return self._attend(q_TNH, k_cache, v_cache, metadata, scale, is_masked=True)
        if plan.query_totals[-1] == len(plan.query_totals):
            return self._attend_in_window(q_TNH, k_cache, v_cache, metadata, scale, window)
        return self._attend(q_TNH, k_cache, v_cache, metadata, scale, is_masked=True, window=window)

    def decode(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
               window: int | None = None) -> Tensor:
        plan = metadata.plan
        if isinstance(plan, HostLengths) and plan.calls is not None:
            plan.calls.append(window)
        if window is None or (isinstance(plan, HostLengths) and window not in plan.seen_lens):
            return self._attend(q_BNH, k_cache, v_cache, metadata, scale, is_masked=self.masks_decode)
        return self._attend_in_window(q_BNH, k_cache, v_cache, metadata, scale, window)

    def plan_vision(self, lengths: Sequence[int], device: torch.device) -> list[int]:
        return list(accumulate(lengths))

    def vision(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: list[int], scale: float) -> Tensor:
        return self._attend_images(q_TNH.contiguous(), k_TNH.contiguous(), v_TNH.contiguous(), plan, scale)

    def _attend(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
                is_masked: bool, window: int | None = None) -> Tensor:
        """Over all, or with a window over a band of it: for queries of which some is longer than a token."""
        plan = metadata.plan
        if isinstance(plan, DeviceLengths):
            query_totals, context_lens = plan.query_totals_B, plan.context_lens_B
        else:
            query_totals, context_lens = plan.query_totals, plan.context_lens
        mode = _FULL if not is_masked else _CAUSAL if window is None else _BAND
        band = {} if window is None else {"pre_tokens": window - 1, "next_tokens": 0}
        tables_BW, ahead = metadata.block_tables_BW, None
        if metadata.sequences_3S is not None:
            tables_BW, ahead = self._of_sequences(q_TNH, metadata, metadata.sequences_3S)
        out_TNH = _kernel(plan)(
            q_TNH.contiguous() if ahead is None else torch.cat((ahead, q_TNH)), k_cache.flatten(2), v_cache.flatten(2),
            atten_mask=self.mask if is_masked else None, block_table=tables_BW, input_layout="TND",
            block_size=self.block_size, actual_seq_lengths=query_totals, actual_seq_lengths_kv=context_lens,
            num_heads=self.num_heads, num_key_value_heads=self.num_kv_heads, scale=scale, sparse_mode=mode, **band)[0]
        return out_TNH if ahead is None else out_TNH[len(ahead) :]

    def _of_sequences(self, q_TNH: Tensor, metadata: AttentionMetadata,
                      sequences_3S: Tensor) -> tuple[Tensor, Tensor | None]:
        """The block tables of sequences, and a graph's queries before the step's; made in a step's first layer."""
        num_ahead = metadata.plan.num_ahead
        if "sequences" not in metadata.derived:
            tables_SW = metadata.block_tables_BW.index_select(0, sequences_3S[0])
            # Padding has a key for each of its queries, also where no context may be as long.
            num_missing = -(-(len(q_TNH) + _MOST_KEYS_BEHIND) // self.block_size) - tables_SW.shape[1]
            if num_ahead and num_missing > 0:
                tables_SW = torch.cat((tables_SW, tables_SW.new_zeros(len(tables_SW), num_missing)), dim=1)
            ahead = q_TNH.new_zeros(num_ahead, *q_TNH.shape[1:]) if num_ahead else None
            metadata.derived["sequences"] = tables_SW, ahead
        tables_SW, ahead = metadata.derived["sequences"]
        return tables_SW, ahead

    def _attend_in_window(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata,
                          scale: float, window: int) -> Tensor:
        """One token of each sequence. In BSND: TND takes no mask of one's own."""
        if window not in metadata.derived:
            maker = self._windows[window]
            assert maker is not None, f"window {window} is not among {self.windows}"
            metadata.derived[window] = maker.seen_blocks(metadata.context_lens_B, metadata.block_tables_BW)
        seen: SeenBlocks = metadata.derived[window]
        if self._gathers_windows:
            return _attend_gathered(q_BNH, k_cache, v_cache, seen, scale)
        plan = metadata.plan
        lens = seen.lens_B.to(torch.int64) if isinstance(plan, DeviceLengths) else plan.seen_lens[window]
        out_B1NH = _kernel(plan)(
            q_BNH.contiguous().unsqueeze(1), k_cache.flatten(2), v_cache.flatten(2), atten_mask=seen.is_before_B11L,
            block_table=seen.block_tables_BV, input_layout="BSND", block_size=self.block_size,
            actual_seq_lengths_kv=lens, num_heads=self.num_heads, num_key_value_heads=self.num_kv_heads, scale=scale,
            sparse_mode=_FULL)[0]
        return out_B1NH.squeeze(1)


def _attend_gathered(q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, seen: SeenBlocks, scale: float) -> Tensor:
    """The same in plain operators, over copies of the blocks."""
    num_rows, num_kv_heads = len(q_BNH), k_cache.shape[2]
    keys_BKLH, values_BKLH = (cache.index_select(0, seen.block_tables_BV.flatten()).view(
        num_rows, -1, *cache.shape[2:]).transpose(1, 2) for cache in (k_cache, v_cache))
    places_L = torch.arange(keys_BKLH.shape[2], device=q_BNH.device, dtype=torch.int32)
    is_hidden_BL = seen.is_before_B11L[:, 0, 0] | (places_L >= seen.lens_B[:, None])
    q_BKGH = q_BNH.unflatten(1, (num_kv_heads, -1)) * scale
    scores_BKGL = (q_BKGH @ keys_BKLH.mT).float().masked_fill(is_hidden_BL[:, None, None], -torch.inf)
    # Behind a context lie blocks that were never written: their values may be no numbers, and weigh nothing.
    values_BKLH = values_BKLH.masked_fill(is_hidden_BL[:, None, :, None], 0.0)
    return (scores_BKGL.softmax(-1).to(q_BNH.dtype) @ values_BKLH).flatten(1, 2)


class SeenBlocks(NamedTuple):
    """block_tables_BV: int32. lens_B: int32, tokens from the first of these blocks on. is_before_B11L: bool, hidden."""

    block_tables_BV: Tensor
    lens_B: Tensor
    is_before_B11L: Tensor


# Captured graphs take a length of 1 for a constant: more is left of each context that has more.
_LEAST_LEFT = 2


def seen_lens(context_lens_B: Sequence[int], window: int, block_size: int) -> list[int]:
    """Tokens of each context from the window's first block on; 1 for a context of 1 alone."""
    window = max(window, _LEAST_LEFT)
    return [length - max(0, length - window) // block_size * block_size for length in context_lens_B]


class WindowDecode:
    """Makes SeenBlocks on the device, from tensors of a step alone, so that graphs can hold it; once for all layers."""

    def __init__(self, window: int, block_size: int, device: torch.device):
        self.window = window
        self.block_size = block_size
        self.least_left = max(window, _LEAST_LEFT)
        most_blocks = -(-(self.least_left - 1) // block_size) + 1
        self.blocks_V = torch.arange(most_blocks, dtype=torch.int32).to(device)
        self.places_L = torch.arange(most_blocks * block_size, dtype=torch.int32).to(device)

    def seen_blocks(self, context_lens_B: Tensor, block_tables_BW: Tensor) -> SeenBlocks:
        first_B = (context_lens_B - self.least_left).clamp(min=0) // self.block_size
        skipped_B = first_B * self.block_size
        # Behind a row's last block the table's last column repeats: no kernel reads beyond a length.
        columns_BV = (first_B[:, None] + self.blocks_V).clamp(max=block_tables_BW.shape[1] - 1)
        is_before_BL = self.places_L < (context_lens_B - skipped_B - self.window)[:, None]
        return SeenBlocks(block_tables_BW.gather(1, columns_BV.long()), context_lens_B - skipped_B,
                          is_before_BL[:, None, None])
