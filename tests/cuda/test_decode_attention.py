"""Attention of decode steps in CUDA C++ on Hopper against the definition in float64, and who takes which step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.step_inputs import AttentionMetadata
from tests.cuda.paged_work import CACHES, FP8, PagedWork, assert_close, make_work, need_hopper

# (num_heads, num_kv_heads): groups that fill a matmul's 8 columns, groups that leave some, and one head alone.
GROUPS = [(32, 8), (16, 8), (8, 1), (7, 1), (5, 5), (6, 2)]


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    need_hopper(device)


@pytest.fixture(autouse=True)
def _takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_runner.platforms.cuda.attention import hopper_decode as decode_attention

    monkeypatch.setattr(decode_attention, "LEAST_ROWS", {True: 1, False: 1})


def check(work: PagedWork, device: torch.device, num_sms: int | None = None) -> None:
    assert_close(work.run_decode_kernel(device, num_sms)[0], work.expected(), work.dtype)


@CACHES
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPS)
def test_groups_of_query_heads(device: torch.device, num_heads: int, num_kv_heads: int, dtype: torch.dtype,
                               cache_dtype: torch.dtype | None) -> None:
    check(make_work([1, 15, 16, 17, 64, 65, 300, 1], num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype,
                    cache_dtype=cache_dtype), device)


@CACHES
@pytest.mark.parametrize("num_sms", [1, 2, 7, None])
def test_random_lengths_in_ranges_of_many_sizes(device: torch.device, num_sms: int | None, dtype: torch.dtype,
                                                cache_dtype: torch.dtype | None) -> None:
    """Rows in one range, in several, and ranges of several rows; most are short, as padded rows are."""
    generator = torch.Generator().manual_seed(5)
    for count, longest in ((1, 3000), (3, 2500), (40, 200), (200, 40)):
        lengths = [*torch.randint(1, longest, (count,), generator=generator).tolist(), 1, 1, 700]
        check(make_work(lengths, dtype=dtype, cache_dtype=cache_dtype), device, num_sms)


@CACHES
@pytest.mark.parametrize("window", [1, 16, 45, 100, 1000])
def test_windows(device: torch.device, window: int, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    """What lies behind a window is NaN."""
    check(make_work([1, 150, 190, 700, 16, 1001], window=window, dtype=dtype, cache_dtype=cache_dtype), device, 2)


@pytest.mark.parametrize("cache_dtype", [FP8, None], ids=str)
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_block_sizes(device: torch.device, block_size: int, cache_dtype: torch.dtype | None) -> None:
    check(make_work([1, 77, 700, 2600], block_size=block_size, cache_dtype=cache_dtype), device, 2)


@pytest.mark.parametrize("num_sms", [1, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_of_keys_and_of_values(device: torch.device, dtype: torch.dtype, num_sms: int | None) -> None:
    work = make_work([1, 77, 700], dtype=dtype, cache_dtype=FP8, kv_scales=(0.37, 5.3))
    check(work, device, num_sms)


@CACHES
@pytest.mark.parametrize("factor", [30, 1e-4, 1e4])
def test_scores_far_apart_and_close(device: torch.device, factor: float, dtype: torch.dtype,
                                    cache_dtype: torch.dtype | None) -> None:
    """The highest score of a row changes from step to step; queries go beyond what float16 has."""
    work = make_work([700, 90], dtype=dtype, cache_dtype=cache_dtype)
    work.q_TNH *= factor
    check(work, device, 7)


@pytest.mark.parametrize("cache_dtype", [FP8, None], ids=str)
def test_a_context_of_no_token_gives_0_and_nan_stays(device: torch.device, cache_dtype: torch.dtype | None) -> None:
    work = make_work([40, 40, 90], cache_dtype=cache_dtype)
    work.context_lens[0] = 0
    block = int(work.block_tables_BW[1, 0])
    work.v_cache[block, 3, 1, 7] = torch.nan
    out_TNH, _ = work.run_decode_kernel(device, None)
    assert not out_TNH[0].any()
    assert out_TNH[1, 4:, 7].isnan().all()
    out_TNH[1, 4:, 7] = 0
    expected = work.expected()
    expected[0], expected[1, 4:, 7] = 0, 0
    assert_close(out_TNH, expected, work.dtype)


@pytest.mark.parametrize("cache_dtype", [FP8, None], ids=str)
def test_a_graph_follows_the_lengths_and_gives_the_same_bits(device: torch.device,
                                                             cache_dtype: torch.dtype | None) -> None:
    """Captured with lengths of 1, replayed with others: parts are cut where the lengths of the replay say."""
    work = make_work([1500, 3, 700, 64] * 8, cache_dtype=cache_dtype)
    backend = work.backend()
    q_BNH, k_cache, v_cache = work.q_TNH.contiguous().to(device), work.k_cache.to(device), work.v_cache.to(device)
    lens_B = torch.ones(32, dtype=torch.int32, device=device)
    tables_BW = work.block_tables_BW.to(device)

    def step() -> Tensor:
        metadata = AttentionMetadata(False, lens_B, lens_B, tables_BW)
        for _ in range(3):
            out_BNH: Tensor = backend.decode(q_BNH, k_cache, v_cache, metadata, 128**-0.5)
        return out_BNH

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out_BNH = step()
    lens_B.copy_(torch.tensor(work.context_lens))
    graph.replay()
    first = out_BNH.cpu()
    assert_close(first, work.expected(), work.dtype)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out_BNH.cpu(), first)


@pytest.mark.parametrize("cache_dtype", [FP8, None], ids=str)
def test_small_m_stay_in_triton(device: torch.device, cache_dtype: torch.dtype | None,
                                monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_runner.platforms.cuda.attention import hopper_decode as decode_attention

    monkeypatch.setattr(decode_attention, "LEAST_ROWS", {True: 4, False: 4})
    monkeypatch.setattr(decode_attention.DecodeAttention, "attend", None)
    make_work([100, 700, 3], cache_dtype=cache_dtype).assert_equals_definition(device, is_prefill=False)
    with pytest.raises(TypeError):
        make_work([100, 700, 3, 5], cache_dtype=cache_dtype).assert_equals_definition(device, is_prefill=False)


def test_without_nvrtc_triton_takes_decode_steps(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    from npu_runner.platforms.cuda import compiled_source

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled_source._nvrtc.cache_clear()
    monkeypatch.setattr(compiled_source, "_nvrtc_names", lambda: iter(()))
    with caplog.at_level("INFO", logger="npu_runner"):
        make_work([100, 700]).assert_equals_definition(device, is_prefill=False)
    assert "attention of decode steps: triton (no NVRTC" in caplog.text


@pytest.mark.parametrize("change", [{"head_dim": 64}, {"block_size": 24}, {"dtype": torch.float32},
                                    {"num_heads": 18, "num_kv_heads": 2}], ids=str)
def test_all_else_stays_in_triton(device: torch.device, change: dict[str, Any]) -> None:
    work = make_work([100, 700], **change)
    assert work.backend().decodes is None
    work.assert_equals_definition(device, is_prefill=False)
