"""Attention of prompts in CUDA C++ on Hopper against the definition in float64, and who takes which step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.step_inputs import AttentionMetadata
from tests.cuda.paged_work import PagedWork, assert_close, need_fp8, need_hopper

# (num_heads, num_kv_heads): groups that fill a tile's 128 rows, groups that leave some, and one head alone.
GROUPS = [(2, 2), (8, 2), (10, 2), (7, 1), (16, 1)]
# New tokens behind cached ones: one alone, tiles of 128 columns filled, one less and one more, several of them.
STEPS = {"prompts": ([0, 0, 0, 0], [127, 128, 129, 300]), "behind contexts": ([1, 64, 127, 640], [1, 128, 130, 70]),
         "one": ([0], [513]), "many": ([0, 70] * 10, [60, 3] * 10)}


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    need_hopper(device)


@pytest.fixture
def takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_runner.platforms.cuda.attention import hopper_attention as prompt_attention

    monkeypatch.setattr(prompt_attention, "_LEAST_TOKENS", 1)
    monkeypatch.setattr(prompt_attention, "_LEAST_A_SEQUENCE", 1)


def run(work: PagedWork, device: torch.device, backend: Any) -> Tensor:
    """What the kernel makes of it; a step that it does not take fails."""
    from npu_runner.platforms.cuda.split_k import make_counters

    if work.kv_scales != (1.0, 1.0):
        backend = backend.with_kv_scales(torch.tensor(work.kv_scales, device=device))
    taken, attend = [], backend.prompts.attend
    backend.prompts.attend = lambda *arguments: taken.append(1) or attend(*arguments)
    out_TNH = work.run(device, backend, is_prefill=True)
    assert taken, "the kernel took the step"
    assert make_counters(device, 2)[:2].tolist() == [0, 0], "the next launch begins at the first tile"
    return out_TNH


def plain_torch(work: PagedWork) -> Tensor:
    """The definition in the work's own dtype."""
    outs = []
    for q_TNH, k_CKH, v_CKH in zip(work.q_TNH.split(work.query_lens), work.keys, work.values, strict=True):
        k_CNH, v_CNH = (x.repeat_interleave(work.num_heads // work.num_kv_heads, dim=1) * x_scale
                        for x, x_scale in zip((k_CKH, v_CKH), work.kv_scales, strict=True))
        scores_NTC = torch.einsum("tnh,cnh->ntc", q_TNH, k_CNH) * work.head_dim**-0.5
        num, end = len(q_TNH), len(k_CKH)
        is_later_TC = torch.arange(end) > torch.arange(end - num, end)[:, None]
        weights_NTC = scores_NTC.masked_fill(is_later_TC, -torch.inf).softmax(-1)
        outs.append(torch.einsum("ntc,cnh->tnh", weights_NTC, v_CNH))
    return torch.cat(outs)


def check(work: PagedWork, device: torch.device) -> None:
    check_with(work.backend(), work, device)


def check_with(backend: Any, work: PagedWork, device: torch.device) -> None:
    found, expected = run(work, device, backend), work.expected()
    assert_close(found, expected, work.dtype)
    errors = [float((each.double() - expected).norm()) for each in (found, plain_torch(work))]
    assert errors[0] <= 2 * errors[1], f"plain torch is {errors[1]:.1e} from the definition, the kernel {errors[0]:.1e}"


@pytest.mark.usefixtures("takes_all")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPS)
def test_prompts_and_chunks_behind_a_cached_context(device: torch.device, num_heads: int, num_kv_heads: int, step: str,
                                                    dtype: torch.dtype) -> None:
    cached_lens, query_lens = STEPS[step]
    check(PagedWork(cached_lens, query_lens, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128,
                    dtype=dtype), device)


@pytest.mark.usefixtures("takes_all")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_scales", [(1.0, 1.0), (0.37, 5.3)], ids=["no scales", "scales"])
@pytest.mark.parametrize("step", ["prompts", "behind contexts", "many"])
def test_caches_in_fp8(device: torch.device, step: str, kv_scales: tuple[float, float], dtype: torch.dtype,
                       monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_runner.platforms.cuda.attention import hopper_attention as prompt_attention

    monkeypatch.setattr(prompt_attention, "FP8_PROMPT_ROOM", 5)
    cached_lens, query_lens = STEPS[step]
    check(PagedWork(cached_lens, query_lens, num_heads=8, num_kv_heads=2, head_dim=128, dtype=dtype,
                    cache_dtype=torch.float8_e4m3fn, kv_scales=kv_scales), device)


def test_memory_of_fp8_contexts_has_the_size_of_the_largest_step(device: torch.device) -> None:
    """Contexts that have no room there stay in Triton; a later step of fewer tokens does not change it."""
    fp8 = {"head_dim": 128, "dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn}
    backend = PagedWork([0], [1100], **fp8).backend()
    check_with(backend, PagedWork([0], [1100], **fp8), device)
    there = backend.prompts._wide
    assert there.shape == (2, -(-2 * 1100 // 64), 64, 2, 128)
    check_with(backend, PagedWork([900], [1024], **fp8), device)
    attend, backend.prompts.attend = backend.prompts.attend, None
    work = PagedWork([1300], [1024], **fp8)
    assert_close(work.run(device, backend, is_prefill=True), work.expected(), work.dtype)
    backend.prompts.attend = attend
    assert backend.prompts._wide is there
    check_with(backend, PagedWork([1200], [1200], **fp8), device)


@pytest.mark.usefixtures("takes_all")
@pytest.mark.parametrize("block_size", [128, 192])
def test_larger_blocks(device: torch.device, block_size: int) -> None:
    check(PagedWork([0, 200], [300, 129], head_dim=128, block_size=block_size, dtype=torch.bfloat16), device)


def test_contexts_of_more_blocks_than_a_warp_holds(device: torch.device) -> None:
    check(PagedWork([0, 5000], [2100, 200], num_heads=4, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16), device)


@pytest.mark.usefixtures("takes_all")
def test_random_steps(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(12):
        cached, new = (torch.randint(low, 400, (5,), generator=generator).tolist() for low in (0, 1))
        check(PagedWork(cached, new, num_heads=6, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16), device)


@pytest.mark.usefixtures("takes_all")
def test_scores_far_apart(device: torch.device) -> None:
    """The highest score of a row changes from tile to tile, and most weights are 0."""
    work = PagedWork([0], [700], head_dim=128, dtype=torch.bfloat16)
    work.q_TNH *= 30
    check(work, device)


@pytest.mark.usefixtures("takes_all")
def test_what_stands_after_the_diagonal_is_not_read(device: torch.device) -> None:
    """NaN from some tile's first token on reaches no tile before it."""
    work = PagedWork([10], [200], num_heads=4, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16)
    backend = work.backend()
    num_before = 3 * backend.prompts.tokens_a_tile
    for place in range(10 + num_before, 210):
        block = int(work.block_tables_BW[0, place // 64])
        work.k_cache[block, place % 64], work.v_cache[block, place % 64] = torch.nan, torch.nan
    out_TNH = run(work, device, backend)
    assert_close(out_TNH[:num_before], work.expected()[:num_before], work.dtype)
    assert out_TNH[num_before:].isnan().all()


def test_the_same_step_again_gives_the_same_bits(device: torch.device) -> None:
    work = PagedWork([0, 700], [2000, 900], num_heads=16, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    backend = work.backend()
    first = run(work, device, backend)
    assert all(torch.equal(first, run(work, device, backend)) for _ in range(3))


@pytest.mark.parametrize("change", [
    {"query_lens": [1000]}, {"query_lens": [60] * 20, "cached_lens": [40] * 20}, {"window": 200}, {"head_dim": 64},
    {"block_size": 32}, {"dtype": torch.float32}, {"cache_dtype": torch.float8_e4m3fn, "window": 200}], ids=str)
def test_all_else_stays_in_triton(device: torch.device, change: dict[str, Any],
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    if "cache_dtype" in change:
        need_fp8(device)
    from npu_runner.platforms.cuda.attention.hopper_attention import PromptAttention

    monkeypatch.setattr(PromptAttention, "attend", None)
    work = PagedWork(**{"cached_lens": [40], "query_lens": [1100], "head_dim": 128, "dtype": torch.bfloat16, **change})
    work.assert_equals_definition(device, is_prefill=True)


class GraphStep:
    """Attention of 3,000 tokens and 40 prompts at most, captured once; `run` gives it the lists of another step."""

    def __init__(self, work: PagedWork, device: torch.device):
        self.backend, self.device, self.num_tokens = work.backend(), device, 3000
        self.backend.windows = (None, work.window) if work.window else (None,)
        self.tiles = {name: torch.zeros((most, 4), dtype=torch.int32, device=device)
                      for name, most in self.backend.most_graph_tiles(self.num_tokens, 40).items()}
        self.tables_BW = torch.zeros((40, 64), dtype=torch.int32, device=device)
        self.q_TNH = torch.zeros((self.num_tokens, work.num_heads, work.head_dim), dtype=work.dtype, device=device)
        self.caches = [torch.zeros((200, *work.k_cache.shape[1:]), dtype=work.dtype, device=device) for _ in "kv"]
        self.window, self.scale = work.window, work.head_dim**-0.5
        self.attend()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out_TNH = self.attend()

    def attend(self) -> Tensor:
        metadata = AttentionMetadata(True, torch.empty(0), torch.empty(0), self.tables_BW,
                                     self.backend.plan_of_tiles(self.tiles))
        found: Tensor = self.backend.prefill(self.q_TNH, *self.caches, metadata, self.scale, window=self.window)
        return found

    def run(self, work: PagedWork) -> tuple[Tensor, dict[str, int]]:
        """The graph's result for the step (T, N, H), and how many tiles its lists have."""
        found = self.backend.graph_tiles(work.query_lens, work.context_lens, self.num_tokens)
        for name, tiles in found.items():
            self.tiles[name].zero_()
            self.tiles[name][: len(tiles)] = torch.from_numpy(tiles)
        num_rows, width = work.block_tables_BW.shape
        self.tables_BW[:num_rows, :width] = work.block_tables_BW
        self.q_TNH.fill_(torch.nan)
        self.q_TNH[: len(work.q_TNH)] = work.q_TNH
        for cache, filled in zip(self.caches, (work.k_cache, work.v_cache), strict=True):
            cache[: len(filled)] = filled
        self.graph.replay()
        out_TNH = self.out_TNH.cpu()
        assert not out_TNH[len(work.q_TNH) :].any(), "tokens in no tile attend to nothing"
        return out_TNH[: len(work.q_TNH)], {name: len(tiles) for name, tiles in found.items()}


@pytest.mark.parametrize("window", [None, 200])
def test_a_graph_gives_the_bits_of_each_eager_step(device: torch.device, window: int | None) -> None:
    """It has both kernels, and a step the faster one: this one, or Triton's for short prompts and few tokens."""
    from npu_runner.platforms.cuda.split_k import make_counters

    steps = [([0, 70, 900], [1100, 128, 1]), ([0, 70] * 20, [60, 3] * 20), ([40], [2900]), ([0] * 3, [40, 1, 300]),
             ([0, 5] * 20, [74] * 40)]
    works = [PagedWork(*lens, num_heads=8, head_dim=128, dtype=torch.bfloat16, window=window) for lens in steps]
    graph = GraphStep(works[0], device)
    for work in works * 2:
        found, counts = graph.run(work)
        is_ours = sum(work.query_lens) >= max(1024, 64 * len(work.query_lens))
        assert bool(counts["prompt_tiles"]) == is_ours
        assert bool(counts["tiles"]) != is_ours
        assert counts["window_tiles"]
        assert torch.equal(found, work.run(device, work.backend(), is_prefill=True))
        assert_close(found, work.expected(), work.dtype)
        assert make_counters(device, 2)[:2].tolist() == [0, 0]


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_what_was_compiled_is_kept(device: torch.device, fresh_cache: Path) -> None:
    from npu_runner.platforms.cuda.attention.hopper_attention import PromptAttention

    settings = {"num_kv_heads": 2, "group": 4, "block_size": 64, "dtype": torch.bfloat16}
    made = [PromptAttention(**settings).kernel._cubin.result() for _ in range(2)]
    assert [path.read_bytes() for path in fresh_cache.rglob("*.cubin")] == made[:1]
    assert made[0] == made[1]
    PromptAttention(**{**settings, "group": 2}).kernel._cubin.result()
    assert len(list(fresh_cache.rglob("*.cubin"))) == 2


def test_without_nvrtc_triton_takes_prompts(device: torch.device, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture) -> None:
    from npu_runner.platforms.cuda import compiled_source

    compiled_source._nvrtc.cache_clear()
    monkeypatch.setattr(compiled_source, "_nvrtc_names", lambda: iter(()))
    with caplog.at_level("INFO", logger="npu_runner"):
        PagedWork([0], [1100], head_dim=128, dtype=torch.bfloat16).assert_equals_definition(device, is_prefill=True)
    assert "attention of prompts: triton (no NVRTC" in caplog.text


def test_a_source_that_does_not_compile_says_where(device: torch.device, fresh_cache: Path, tmp_path: Path) -> None:
    from npu_runner.platforms.cuda.compiled_source import CompiledSource, NoKernel

    path = tmp_path / "wrong.cu"
    path.write_text("extern \"C\" __global__ void wrong() {\n  nothing();\n}\n")
    with pytest.raises(NoKernel, match=r'wrong\.cu\(2\).*"nothing" is undefined'):
        CompiledSource([path], {}, "sm_90a").cubin()
    assert not list(fresh_cache.rglob("*.cubin"))
