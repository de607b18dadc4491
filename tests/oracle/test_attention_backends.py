"""Every attention backend of the platform against the definition of attention, over a shuffled cache full of NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from npu_runner.errors import ConfigError
from npu_runner.platforms import find_platform, pick_platform
from npu_runner.platforms.attention import AttentionBackend
from npu_runner.platforms.graphs import GraphSettings
from npu_runner.platforms.platform import Platform
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs

# B sequences, T tokens of the step, N query heads, K kv heads, H head dim, L context, Q new tokens, S block size

CONTEXT_LENS = [1, 63, 64, 65, 300, 200]
QUERY_LENS = [1, 63, 10, 65, 100, 1]
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 2, 128, 64
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def attention(q_QNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, window: int | None = None) -> Tensor:
    """softmax(q k^T / sqrt(H)) v in float64; the last Q tokens of the context ask, none sees what comes after it.

    window: each sees as many tokens, itself included.
    """
    group = q_QNH.shape[1] // k_LKH.shape[1]
    k_LNH, v_LNH = (x.double().repeat_interleave(group, dim=1) for x in (k_LKH, v_LKH))
    scores_NQL = torch.einsum("qnh,lnh->nql", q_QNH.double(), k_LNH) * q_QNH.shape[-1] ** -0.5
    num_new, length = scores_NQL.shape[1:]
    distance_QL = torch.arange(length - num_new, length)[:, None] - torch.arange(length)
    is_unseen_QL = (distance_QL < 0) | (distance_QL >= (window or length))
    weights_NQL = scores_NQL.masked_fill(is_unseen_QL, -torch.inf).softmax(-1)
    return torch.einsum("nql,lnh->qnh", weights_NQL, v_LNH)


@dataclass
class Cache:
    """Contexts of random keys and values, in blocks out of order; whatever they do not fill is NaN."""

    backend: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    window: int | None = None

    def __post_init__(self) -> None:
        self.backend.windows = (self.window,)
        rng = np.random.default_rng(0)
        counts = [-(-length // BLOCK_SIZE) + 1 for length in CONTEXT_LENS]  # one to grow into
        blocks = rng.permutation(np.arange(1, 1 + sum(counts))).astype(np.int32)
        self.block_tables_BW = np.zeros((len(CONTEXT_LENS), max(counts)), dtype=np.int32)
        for row, part in enumerate(np.split(blocks, np.cumsum(counts)[:-1])):
            self.block_tables_BW[row, : len(part)] = part
        shape = (1 + sum(counts), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan, dtype=self.dtype, device=self.device) for _ in "kv")
        self.keys, self.values = ([self._random(length, NUM_KV_HEADS) for length in CONTEXT_LENS] for _ in "kv")
        self._write(range(len(CONTEXT_LENS)), [0] * len(CONTEXT_LENS))

    def _random(self, length: int, num_heads: int) -> Tensor:
        return torch.randn(length, num_heads, HEAD_DIM).to(self.dtype)

    def _write(self, rows: range, starts: list[int]) -> None:
        """Store what each context has from `starts` on."""
        slots = [self.block_tables_BW[row, place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
                 for row, start in zip(rows, starts, strict=True) for place in range(start, len(self.keys[row]))]
        k_TKH, v_TKH = (torch.cat([context[start:] for context, start in zip(contexts, starts, strict=True)])
                        .to(self.device) for contexts in (self.keys, self.values))
        slots_T = torch.tensor(slots, dtype=torch.int32, device=self.device)
        self.backend.write_kv(k_TKH, v_TKH, self.k_cache, self.v_cache, slots_T)

    def grow(self) -> None:
        """Each context gets one token more."""
        starts = [len(context) for context in self.keys]
        for row in range(len(starts)):
            self.keys[row] = torch.cat([self.keys[row], self._random(1, NUM_KV_HEADS)])
            self.values[row] = torch.cat([self.values[row], self._random(1, NUM_KV_HEADS)])
        self._write(range(len(starts)), starts)

    def forget_behind_window(self, query_lens: list[int]) -> None:
        """Blocks that no query sees become the null block in the table, and NaN in the cache: they are others' now."""
        if self.window is None:
            return
        for row, (num_new, length) in enumerate(zip(query_lens, self.context_lens, strict=True)):
            num_behind = max(0, length - num_new - self.window + 1) // BLOCK_SIZE
            for block in self.block_tables_BW[row, :num_behind].tolist():
                self.k_cache[block], self.v_cache[block] = torch.nan, torch.nan
            self.block_tables_BW[row, :num_behind] = 0
        # Kernels may read the null block behind a window, and weigh it with zero.
        self.k_cache[0], self.v_cache[0] = 7.0, 7.0

    @property
    def context_lens(self) -> list[int]:
        return [len(context) for context in self.keys]

    def queries(self, query_lens: list[int]) -> Tensor:
        return self._random(sum(query_lens), NUM_HEADS)

    def expected(self, q_TNH: Tensor, query_lens: list[int]) -> Tensor:
        parts = zip(q_TNH.split(query_lens), self.keys, self.values, strict=True)
        return torch.cat([attention(q, k, v, self.window) for q, k, v in parts])

    def assert_close(self, out_TNH: Tensor, q_TNH: Tensor, query_lens: list[int]) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(out_TNH.cpu().double(), self.expected(q_TNH, query_lens), atol=tolerance,
                                   rtol=tolerance)


class OneLayer(nn.Module):
    """A decode forward that is attention alone, over queries that stay where they are."""

    def __init__(self, cache: Cache, q_BNH: Tensor):
        super().__init__()
        self.cache = cache
        self.q_BNH = q_BNH

    def forward(self, inputs: StepInputs, plan: object = None) -> Tensor:
        metadata = AttentionMetadata.of(inputs, plan, is_prefill=False)
        cache = self.cache
        return cache.backend.decode(self.q_BNH, cache.k_cache, cache.v_cache, metadata, HEAD_DIM**-0.5,
                                    window=cache.window)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.config.getoption("--platform")
    metafunc.parametrize("backend_name", find_platform(name).attention_backends)


def make_cache(platform: Platform, name: str, dtype: torch.dtype, window: int | None = None) -> Cache:
    torch.manual_seed(0)
    device = platform.devices.set_device(0)
    try:
        backend = platform.make_attention(name, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM,
                                          block_size=BLOCK_SIZE, dtype=dtype)
    except ConfigError as reason:
        pytest.skip(str(reason))
    assert "FlashInfer" in type(backend).__name__ or name != "flashinfer"
    return Cache(backend, device, dtype, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_prefill_and_eager_decode(dtype: torch.dtype, backend_name: str, platform_name: str) -> None:
    cache = make_cache(pick_platform(platform_name), backend_name, dtype)
    assert_steps_equal_definition(cache)


@pytest.mark.parametrize("window", [1, 2, 50, 64, 128, 150, 299, 300, 1000])
def test_windows_of_every_length(window: int, backend_name: str, platform_name: str) -> None:
    """Shorter than a block, whole blocks, between two, and longer than all contexts."""
    dtype = torch.bfloat16 if backend_name == "flashinfer" else torch.float32
    cache = make_cache(pick_platform(platform_name), backend_name, dtype, window)
    assert_steps_equal_definition(cache)


def assert_steps_equal_definition(cache: Cache) -> None:
    for query_lens, is_prefill in ((QUERY_LENS, True), ([1] * len(CONTEXT_LENS), True),
                                   ([1] * len(CONTEXT_LENS), False)):
        cache.forget_behind_window(query_lens)
        q_TNH = cache.queries(query_lens)
        backend, tables_BW = cache.backend, cache.block_tables_BW
        plan = (backend.plan_prefill(query_lens, CONTEXT_LENS, tables_BW, cache.device) if is_prefill
                else backend.plan_decode(CONTEXT_LENS, tables_BW, cache.device))
        metadata = AttentionMetadata(is_prefill, torch.empty(0), torch.tensor(CONTEXT_LENS, dtype=torch.int32,
                                                                              device=cache.device),
                                     torch.from_numpy(tables_BW).to(cache.device), plan)
        attend = backend.prefill if is_prefill else backend.decode
        out_TNH = attend(q_TNH.to(cache.device), cache.k_cache, cache.v_cache, metadata, HEAD_DIM**-0.5,
                         window=cache.window)
        cache.assert_close(out_TNH, q_TNH, query_lens)


@pytest.mark.parametrize(("graph_mode", "window"), [("reduce-overhead", None), ("max-autotune", None),
                                                    ("reduce-overhead", 66)])
def test_one_decode_graph_serves_contexts_that_grow(graph_mode: str, window: int | None, backend_name: str,
                                                    platform_name: str) -> None:
    """Over a block's border, too; only a graph of its own is given the pages of each step."""
    if platform_name == "npu":
        pytest.skip("graphs on npu take their lengths from the runner's own step (tests/npu)")
    platform = pick_platform(platform_name)
    cache = make_cache(platform, backend_name, torch.float32 if platform_name == "cpu" else torch.bfloat16,
                       window)
    ones = [1] * len(CONTEXT_LENS)
    q_BNH = cache.queries(ones)
    layer = OneLayer(cache, q_BNH.to(cache.device))
    compiler = platform.make_graph_compiler(GraphSettings(mode=graph_mode))
    forward = compiler.compile(layer.forward, len(ones))
    numbers = {name: torch.zeros(len(ones), dtype=torch.int32, device=cache.device)
               for name in StepInputs._fields if name != "block_tables"}
    tables_BW = torch.from_numpy(cache.block_tables_BW).to(cache.device)
    with torch.inference_mode():
        for _ in range(3):
            cache.forget_behind_window(ones)
            tables_BW.copy_(torch.from_numpy(cache.block_tables_BW))
            lens_B = np.array(cache.context_lens, dtype=np.int32)
            numbers["context_lens"].copy_(torch.from_numpy(lens_B))
            compiler.before_replay(len(ones), lens_B.tolist())
            out_BNH = forward(StepInputs(**numbers, block_tables=tables_BW))
            cache.assert_close(out_BNH, q_BNH, ones)
            cache.grow()
