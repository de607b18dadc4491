"""Decode attention on Hopper that reads blocks once with which several block tables begin, against float64.

Each row is held to its own bound, since a row of a group must not lose precision to the others. Without a GPU the CPU
runs the same source (decode_on_cpu.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.step_inputs import AttentionMetadata
from tests.cuda.paged_work import FP8, PagedWork, assert_close, full_on_cpu, make_work, need_hopper

BUILDS = "g++ builds the kernel for each shape of heads, block size and dtype, and one of each kind is in the fast set"
EACH_CACHE = pytest.mark.parametrize("cache_dtype", [FP8, None], ids=str)
ALL_CACHES = pytest.mark.parametrize(("dtype", "cache_dtype"), [
    (torch.bfloat16, FP8),
    *full_on_cpu(BUILDS, (torch.float16, FP8), (torch.bfloat16, None), (torch.float16, None))], ids=str)


@pytest.fixture(autouse=True)
def _takes_all(decode_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_runner.platforms.cuda.attention import hopper_decode

    monkeypatch.setattr(hopper_decode, "LEAST_ROWS", {True: 1, False: 1})
    every = {is_fp8: shape._replace(saved_percent=1, saved_steps=0) for is_fp8, shape in hopper_decode.SHAPES.items()}
    monkeypatch.setattr(hopper_decode, "SHAPES", every)


def share(work: PagedWork, names: Sequence[Sequence[Any]], *, ids: bool = True) -> None:
    """Rows whose `names` begin alike begin with the same blocks, or with copies of them if not `ids`. Blocks of no row
    become NaN. The first row with a name is the longest one."""
    owners: dict[tuple[Any, ...], int] = {}
    size, caches = work.block_size, ((work.k_cache, work.keys), (work.v_cache, work.values))
    for row, blocks in enumerate(names):
        for column in range(len(blocks)):
            owner = owners.setdefault(tuple(blocks[: column + 1]), row)
            if owner == row:
                continue
            own, theirs = (int(work.block_tables_BW[each, column]) for each in (row, owner))
            for cache, parts in caches:
                mine = parts[row][column * size : (column + 1) * size]
                mine[:] = parts[owner][column * size : column * size + len(mine)]
                cache[own] = torch.full_like(cache[own], torch.nan) if ids else cache[theirs]
            if ids:
                work.block_tables_BW[row, column] = theirs


def pad(work: PagedWork, rows: Sequence[int]) -> None:
    """Let `rows` have the null block throughout."""
    caches = ((work.k_cache, work.keys), (work.v_cache, work.values))
    for cache, _ in caches:
        cache[0] = torch.randn(cache[0].shape).to(cache.dtype)
    for row in rows:
        work.block_tables_BW[row] = 0
        for cache, parts in caches:
            length = work.context_lens[row]
            parts[row] = cache[0].to(work.dtype).repeat(-(-length // work.block_size), 1, 1)[:length]


def prefix_ranges(metadata: AttentionMetadata) -> int:
    """How many of the plan's ranges read blocks of a group."""
    (plan,) = metadata.derived.values()
    return int(plan[0])


def check(work: PagedWork, device: torch.device, *, is_grouped: bool | None = True,
          num_sms: int | None = None) -> Tensor:
    """The kernel's result, (B, N, H), each of whose rows is right. `is_grouped`: None if either is right."""
    out_BNH, metadata = work.run_decode_kernel(device, num_sms)
    assert is_grouped is None or (prefix_ranges(metadata) > 0) == is_grouped
    for out_NH, expected_NH in zip(out_BNH, work.expected(), strict=True):
        assert_close(out_NH, expected_NH, work.dtype)
    return out_BNH


@ALL_CACHES
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [
    (8, 2), *full_on_cpu(BUILDS, (8, 1), (32, 8), (16, 8), (7, 1), (10, 2), (6, 2), (5, 5))])
def test_groups_of_many_sizes(device: torch.device, num_heads: int, num_kv_heads: int, dtype: torch.dtype,
                              cache_dtype: torch.dtype | None) -> None:
    """Groups of 1, of 2, that fill a team of warps, that end within a warp's columns, that need several teams."""
    names = [[group] * 3 for group, size in enumerate([1, 2, 8, 5, 17, 33, 3]) for _ in range(size)]
    work = make_work([200 + 37 * row % 190 for row in range(len(names))], num_heads=num_heads,
                     num_kv_heads=num_kv_heads, dtype=dtype, cache_dtype=cache_dtype)
    share(work, names)
    check(work, device)


@ALL_CACHES
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_rows", "num_blocks"), [
    (8, 2, 35, 7), *full_on_cpu("a minute in g++'s kernel", (32, 8, 130, 23))])
def test_all_rows_are_one_group(device: torch.device, num_heads: int, num_kv_heads: int, num_rows: int,
                                num_blocks: int, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    """Of several teams."""
    work = make_work([64 * num_blocks + 28 + row for row in range(num_rows)], num_heads=num_heads,
                     num_kv_heads=num_kv_heads, dtype=dtype, cache_dtype=cache_dtype)
    share(work, [["system prompt"] * num_blocks] * num_rows)
    check(work, device)


@EACH_CACHE
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_rows", "num_blocks"), [
    (8, 2, 16, 4), *full_on_cpu(BUILDS, (32, 8, 40, 10))])
def test_shared_ids_beside_equal_contents_under_separate_ids(device: torch.device, num_heads: int, num_kv_heads: int,
                                                             num_rows: int, num_blocks: int,
                                                             cache_dtype: torch.dtype | None) -> None:
    """Only ids make a group. Both are within each row's bound, and repeat their bits."""
    for ids in (True, False):
        work = make_work([64 * num_blocks + 60 + 3 * row for row in range(num_rows)], num_heads=num_heads,
                         num_kv_heads=num_kv_heads, cache_dtype=cache_dtype)
        share(work, [[row // 8] * num_blocks for row in range(num_rows)], ids=ids)
        first = check(work, device, is_grouped=ids)
        for _ in range(20 if device.type == "cuda" else 1):
            assert torch.equal(check(work, device, is_grouped=ids), first)


@pytest.mark.parametrize(("seed", "cache_dtype"), [
    (1, FP8), (8, None), *full_on_cpu(BUILDS, (1, None), (8, FP8), *itertools.product(
        (0, *range(2, 8), *range(9, 12)), (FP8, None)))], ids=str)
def test_random_steps(device: torch.device, seed: int, cache_dtype: torch.dtype | None) -> None:
    """Prefixes that fork up to four times, rows in any order, drafts (rows of one table, each a token longer), padded
    rows; numbers behind a context are those of real blocks. The step's ranges are few or many."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    block_size, (num_kv_heads, group) = [16, 48, 64, 128][seed % 4], [(8, 4), (1, 8), (2, 5), (4, 1), (5, 3)][seed % 5]
    rows: list[tuple[int, list[Any]]] = []
    for _ in range(draw(1, 30)):
        depth, names, num_drafts = draw(1, 5), [], draw(1, 4)
        for fork in range(depth):
            names += [(fork, draw(0, 3))] * draw(2, 4) if seed % 2 else [(fork, draw(0, 2))] * 3
        length = len(names) * block_size + draw(1, 200)
        whole = [*names, *[("row", len(rows))] * (-(-length // block_size) - len(names))]
        rows += [(length - draft, whole) for draft in range(num_drafts)]
    rows += [(1 + row, []) for row in range(3)]
    if seed % 3 == 0:
        rows.sort(key=lambda row: -row[0])
    lengths = [length for length, _ in rows]
    work = make_work(lengths, num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads, block_size=block_size,
                     cache_dtype=cache_dtype, dtype=[torch.bfloat16, torch.float16][seed % 2])
    is_behind_BW = torch.arange(work.block_tables_BW.shape[1]) >= -(-torch.tensor(lengths) // block_size)[:, None]
    work.block_tables_BW[is_behind_BW] = 1
    share(work, [names[: -(-length // block_size)] for length, names in rows])
    pad(work, [row for row, (_, names) in enumerate(rows) if not names])
    check(work, device, is_grouped=None, num_sms=[None, 16, 40][seed % 3])


@EACH_CACHE
def test_the_null_block_is_shared_by_no_rows(device: torch.device, cache_dtype: torch.dtype | None) -> None:
    work = make_work([300] * 16, cache_dtype=cache_dtype)
    pad(work, range(16))
    check(work, device, is_grouped=False)


@EACH_CACHE
def test_layers_with_a_window_have_no_groups(device: torch.device, cache_dtype: torch.dtype | None) -> None:
    work = make_work([400] * 16, cache_dtype=cache_dtype, window=250)
    share(work, [["a"] * 5] * 16)
    check(work, device, is_grouped=False)


def test_few_shared_tokens_make_no_groups(device: torch.device) -> None:
    work = make_work([400] * 16)
    share(work, [["a"]] * 16)
    check(work, device, is_grouped=False)


def test_queries_far_apart_in_a_group(device: torch.device) -> None:
    """Over e4m3, queries are scaled by column: small ones beside large ones keep their precision."""
    work = make_work([300] * 16, cache_dtype=FP8, kv_scales=(0.37, 5.3))
    share(work, [["a"] * 4] * 16)
    work.q_TNH *= torch.tensor([1.0, 1e7]).repeat(8)[:, None, None].to(work.dtype)
    check(work, device)


@EACH_CACHE
def test_an_empty_row_and_nan_beside_a_group(device: torch.device, cache_dtype: torch.dtype | None) -> None:
    """An own NaN stays in its row. One in a shared block is in all rows of the group."""
    work = make_work([300] * 16 + [40], cache_dtype=cache_dtype)
    share(work, [["a"] * 4] * 8 + [["b"] * 4] * 8 + [[]])
    work.context_lens[16] = 0
    work.v_cache[int(work.block_tables_BW[3, 4]), 2, 1, 7] = torch.nan
    work.v_cache[int(work.block_tables_BW[8, 1]), 2, 1, 7] = torch.nan
    backend = work.backend()
    out_BNH = work.run(device, backend, is_prefill=False)
    is_nan_BNH = torch.zeros(out_BNH.shape, dtype=torch.bool)
    is_nan_BNH[3, 4:, 7] = is_nan_BNH[8:16, 4:, 7] = True
    assert torch.equal(out_BNH.isnan(), is_nan_BNH)
    assert not out_BNH[16].any()


@EACH_CACHE
def test_a_graph_follows_groups_that_split_and_join(device: torch.device, cache_dtype: torch.dtype | None) -> None:
    """Captured over padded rows, replayed over groups, over none, over others; each replay repeats its bits."""
    need_hopper(device)
    works = [make_work([500 + 9 * row for row in range(64)], cache_dtype=cache_dtype) for _ in range(4)]
    names = [[[row // 8] * 7 for row in range(64)], [[row] for row in range(64)],
             [["all"] * 2 + [row % 5] * 4 for row in range(64)], [["all"] * 7] * 64]
    for work, its_names in zip(works, names, strict=True):
        share(work, its_names)
    backend, one = works[0].backend(), works[0]
    q_BNH, k_cache, v_cache = (x.contiguous().to(device) for x in (one.q_TNH, one.k_cache, one.v_cache))
    lens_B = torch.ones(64, dtype=torch.int32, device=device)
    tables_BW = torch.zeros_like(one.block_tables_BW, device=device)

    def step() -> tuple[Tensor, AttentionMetadata]:
        metadata = AttentionMetadata(False, lens_B, lens_B, tables_BW)
        for _ in range(3):
            out_BNH: Tensor = backend.decode(q_BNH, k_cache, v_cache, metadata, 128**-0.5)
        return out_BNH, metadata

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out_BNH, metadata = step()
    for work in (*works, works[0]):
        lens_B.copy_(torch.tensor(work.context_lens))
        for there, here in ((tables_BW, work.block_tables_BW), (k_cache, work.k_cache), (v_cache, work.v_cache),
                            (q_BNH, work.q_TNH)):
            there.copy_(here)
        graph.replay()
        first = out_BNH.cpu()
        assert (prefix_ranges(metadata) > 0) == (work is not works[1])
        for out_NH, expected_NH in zip(first, work.expected(), strict=True):
            assert_close(out_NH, expected_NH, work.dtype)
        for _ in range(20):
            graph.replay()
            assert torch.equal(out_BNH.cpu(), first)
