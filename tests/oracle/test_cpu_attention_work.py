"""Attention on the CPU costs what the contexts add up to, in elements that are read; and equals its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from npu_runner.platforms.attention import ends_of_tokens
from npu_runner.platforms.cpu import attention as cpu_attention
from npu_runner.platforms.cpu.attention import CpuAttention
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.step_inputs import AttentionMetadata
from tests.oracle.attention_reference import attention

# B sequences, N query heads, K kv heads, H head dim, Q new tokens, L context, S block size

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 32, 16
BYTES_PER_TOKEN = 2 * NUM_KV_HEADS * HEAD_DIM * 4
SHORT, LONG = [30] * 200, [4000]


class Work(TorchDispatchMode):
    """Counts the tokens that are read from a cache, and the elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens_read = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor)]
        if not func.is_view:
            self.largest = max([self.largest, *(x.numel() for x in made)])
        if made and made[0].shape[-2:] == (NUM_KV_HEADS, HEAD_DIM) and "index" in func.name():
            self.tokens_read += made[0].numel() // (NUM_KV_HEADS * HEAD_DIM)
        return out


class Step:
    """Contexts in blocks out of order, over a cache that is NaN where nothing was written."""

    def __init__(self, query_lens: list[int], context_lens: list[int], **changes: Any):
        torch.manual_seed(0)
        self.query_lens, self.context_lens = query_lens, context_lens
        counts = [-(-length // BLOCK_SIZE) for length in context_lens]
        blocks = np.random.default_rng(0).permutation(np.arange(1, 1 + sum(counts))).astype(np.int32)
        self.tables_BW = np.zeros((len(counts), max(counts)), dtype=np.int32)
        self.k_cache, self.v_cache = (torch.full((1 + sum(counts), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), torch.nan)
                                      for _ in "kv")
        self.contexts: list[list[Tensor]] = []
        for row, (length, part) in enumerate(zip(context_lens, np.split(blocks, np.cumsum(counts)[:-1]), strict=True)):
            self.tables_BW[row, : len(part)] = part
            slots = torch.from_numpy(np.repeat(part, BLOCK_SIZE) * BLOCK_SIZE
                                     + np.tile(np.arange(BLOCK_SIZE), len(part)))[:length].long()
            self.contexts.append([torch.randn(length, NUM_KV_HEADS, HEAD_DIM) for _ in "kv"])
            for cache, context in zip((self.k_cache, self.v_cache), self.contexts[-1], strict=True):
                cache.flatten(0, 1)[slots] = context
        self.q_TNH = torch.randn(sum(query_lens), NUM_HEADS, HEAD_DIM)
        self.backend = CpuAttention(block_size=BLOCK_SIZE, bytes_per_token=BYTES_PER_TOKEN, **changes)

    def run(self, *, is_prefill: bool, window: int | None = None) -> tuple[Tensor, Work]:
        self.backend.windows = (window,)
        backend, cpu = self.backend, torch.device("cpu")
        lens = self.query_lens, self.context_lens
        query_lens = self.query_lens if max(self.query_lens) > 1 else None
        plan: Any = (backend.plan_prefill(*lens, self.tables_BW, cpu) if is_prefill
                     else backend.plan_decode(self.context_lens, self.tables_BW, cpu, query_lens))
        metadata = AttentionMetadata(is_prefill, torch.empty(0), torch.tensor(self.context_lens, dtype=torch.int32),
                                     torch.from_numpy(self.tables_BW), plan)
        attend = backend.prefill if is_prefill else backend.decode
        with Work() as work:
            out_TNH = attend(self.q_TNH, self.k_cache, self.v_cache, metadata, HEAD_DIM**-0.5, window=window)
        return out_TNH, work

    def assert_equals_definition(self, out_TNH: Tensor, window: int | None = None) -> None:
        parts = zip(self.q_TNH.split(self.query_lens), self.contexts, strict=True)
        expected = torch.cat([attention(q_QNH, *context, window) for q_QNH, context in parts])
        torch.testing.assert_close(out_TNH.double(), expected, atol=1e-5, rtol=1e-5)


def decode_work(context_lens: list[int]) -> int:
    """Tokens that one layer of a decode step reads, keys and values together."""
    step = Step([1] * len(context_lens), context_lens)
    out_BNH, work = step.run(is_prefill=False)
    step.assert_equals_definition(out_BNH)
    return work.tokens_read


def test_short_rows_beside_a_long_one_cost_what_both_cost_alone() -> None:
    alone = decode_work(SHORT) + decode_work(LONG)
    assert alone >= 2 * sum(SHORT + LONG)
    assert decode_work(SHORT + LONG) <= 1.3 * alone
    assert decode_work(LONG + SHORT) <= 1.3 * alone


@pytest.mark.parametrize("context_lens", [
    pytest.param(np.geomspace(10, 4000, 120).astype(int).tolist(), id="of every length"),
    pytest.param([1, 2000] * 40, id="two lengths in turn"),
    pytest.param([4000, *range(300, 400)], id="neighbours"),
])
def test_a_decode_step_reads_no_more_than_its_contexts_and_a_third(context_lens: list[int]) -> None:
    assert decode_work(context_lens) <= 1.3 * 2 * sum(context_lens)


def test_what_a_decode_step_gathers_at_once_is_bounded() -> None:
    """Rows that would share a piece are more of them, and one context that is larger than a piece is read in spans."""
    piece_bytes = 300 * BYTES_PER_TOKEN
    context_lens = [1000, 300, 299, 290, 100, 100, 99, 5, 1]
    step = Step([1] * len(context_lens), context_lens, piece_bytes=piece_bytes)
    out_BNH, work = step.run(is_prefill=False)
    step.assert_equals_definition(out_BNH)
    assert work.largest * 4 <= piece_bytes / 2  # keys and values are a tensor each
    assert work.tokens_read <= 1.3 * 2 * sum(context_lens)


@pytest.mark.parametrize("window", [1, 40, 100])
def test_a_window_costs_what_it_sees_and_not_its_context(window: int) -> None:
    context_lens = [3000, 2000, 99, 100, 101, 5]
    step = Step([1] * len(context_lens), context_lens)
    out_BNH, work = step.run(is_prefill=False, window=window)
    step.assert_equals_definition(out_BNH, window)
    assert work.tokens_read <= 1.3 * 2 * sum(min(length, window) for length in context_lens)
    step = Step([200, 7, 30, 1], [3000, 7, 90, 500])
    out_TNH, work = step.run(is_prefill=True, window=window)
    step.assert_equals_definition(out_TNH, window)
    assert work.tokens_read <= 2 * (200 + 7 + 30 + 1 + 4 * (window - 1))


@pytest.mark.parametrize("piece_tokens", [100_000, 300, 40])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_drafts_of_a_row_read_its_context_once(window: int | None, piece_tokens: int) -> None:
    """Rows with several tokens and with one; a piece holds all of them, some, or not even one context."""
    query_lens, context_lens = [5, 1, 4, 2, 5], [400, 90, 97, 2, 33]
    step = Step(query_lens, context_lens, piece_bytes=piece_tokens * BYTES_PER_TOKEN)
    out_TNH, work = step.run(is_prefill=False, window=window)
    step.assert_equals_definition(out_TNH, window)
    seen = [length if window is None else min(length, window + num - 1)
            for num, length in zip(query_lens, context_lens, strict=True)]
    assert work.tokens_read <= 2 * len(seen) * max(seen)
    if piece_tokens < 100_000 and window is None:
        assert work.tokens_read <= 1.4 * 2 * sum(seen)


def test_drafts_may_be_planned_as_rows_of_their_own() -> None:
    """As backends do that have no plan for several tokens of a sequence."""
    step = Step([3, 1, 2], [50, 20, 17])
    ends = ends_of_tokens(step.query_lens, step.context_lens).tolist()
    plan = step.backend.plan_decode(ends, step.tables_BW[[0, 0, 0, 1, 2, 2]], torch.device("cpu"))
    metadata = AttentionMetadata(False, torch.empty(0), torch.empty(0), torch.empty(0), plan)
    step.assert_equals_definition(step.backend.decode(step.q_TNH, step.k_cache, step.v_cache, metadata, HEAD_DIM**-0.5))


def test_a_long_prompt_over_a_window_makes_no_mask_of_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "MASK_ELEMENTS", 20_000)
    step = Step([1000], [1000])
    out_TNH, work = step.run(is_prefill=True, window=100)
    step.assert_equals_definition(out_TNH, 100)
    assert work.largest <= max(1000 * NUM_HEADS * HEAD_DIM, 20_000)


def test_a_row_with_a_long_context_in_spans_in_16_bits() -> None:
    step = Step([1, 1], [3000, 40], piece_bytes=256 * BYTES_PER_TOKEN)
    expected, _ = step.run(is_prefill=False)
    for name in ("q_TNH", "k_cache", "v_cache"):
        setattr(step, name, getattr(step, name).bfloat16())
    out_BNH, _ = step.run(is_prefill=False)
    torch.testing.assert_close(out_BNH.float(), expected, atol=2e-3, rtol=3e-2)


def test_a_chunk_behind_a_long_context_makes_no_mask_of_all_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk and context multiply; what one call is given of that is bounded, and the parts agree with the whole."""
    monkeypatch.setattr(cpu_attention, "MASK_ELEMENTS", 30_000)
    step = Step([200, 7, 30], [3000, 7, 90], piece_bytes=3000 * BYTES_PER_TOKEN)
    out_TNH, work = step.run(is_prefill=True)
    step.assert_equals_definition(out_TNH)
    assert work.tokens_read == 2 * sum(step.context_lens)
    one_context = 3000 * NUM_KV_HEADS * HEAD_DIM  # its keys; a mask of all that the chunk sees is three times that
    assert work.largest <= one_context


def test_the_platform_counts_both_keys_and_values_of_a_token() -> None:
    backend = CpuPlatform().make_attention("auto", num_heads=8, num_kv_heads=4, head_dim=64, block_size=16,
                                           dtype=torch.bfloat16)
    assert backend.bytes_per_token == 2 * 4 * 64 * 2  # type: ignore[attr-defined]
