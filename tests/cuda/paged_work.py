"""Contexts in a paged cache for the attention kernels, and what the definition makes of them in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.step_inputs import AttentionMetadata
from tests.oracle.attention_reference import attention

# T tokens, B sequences, N query heads, K kv heads, H head dim, S block size, W blocks a sequence

# Of the largest value: float32 sums, or one rounding of weights and answer in 16 bits.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FP8 = torch.float8_e4m3fn
# What the kernels of decode steps for Hopper compute in, over caches of which dtype.
CACHES = pytest.mark.parametrize(("dtype", "cache_dtype"), [
    (torch.bfloat16, FP8), (torch.float16, FP8), (torch.bfloat16, None), (torch.float16, None)], ids=str)


@dataclass
class PagedWork:
    """`query_lens` new tokens behind `cached_lens` ones; whatever no query may see is NaN, as are blocks of nobody."""

    cached_lens: list[int]
    query_lens: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 64
    dtype: torch.dtype = torch.float32
    window: int | None = None
    cache_dtype: torch.dtype | None = None
    """Of the cache, where it is another one."""
    kv_scales: tuple[float, float] = (1.0, 1.0)
    """What keys and values were divided by before they were stored."""
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.context_lens = [c + q for c, q in zip(self.cached_lens, self.query_lens, strict=True)]
        self.keys, self.values = ([self._random(length, self.num_kv_heads) for length in self.context_lens]
                                  for _ in "kv")
        if self.cache_dtype is not None:
            self.keys, self.values = ([x.to(self.cache_dtype).to(self.dtype) for x in each]
                                      for each in (self.keys, self.values))
        # Beside other columns of a wider matmul, as in a fused qkv.
        self.q_TNH = self._random(sum(self.query_lens), self.num_heads + 2)[:, :self.num_heads]
        counts = [-(-length // self.block_size) for length in self.context_lens]
        order = iter((1 + torch.randperm(sum(counts))).tolist())
        self.block_tables_BW = torch.full((len(counts), max(counts) + 1), sum(counts) + 1, dtype=torch.int32)
        shape = (sum(counts) + 2, self.block_size, self.num_kv_heads, self.head_dim)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan).to(self.cache_dtype or self.dtype) for _ in "kv")
        for row, count in enumerate(counts):
            self.block_tables_BW[row, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
            self._fill(row)

    def _random(self, length: int, num_heads: int) -> Tensor:
        return torch.randn(length, num_heads, self.head_dim).to(self.dtype)

    def _fill(self, row: int) -> None:
        first_seen = max(0, self.cached_lens[row] + 1 - self.window) if self.window else 0
        places = torch.arange(first_seen, self.context_lens[row])
        where = self.block_tables_BW[row, places // self.block_size].long(), places % self.block_size
        for cache, each in ((self.k_cache, self.keys), (self.v_cache, self.values)):
            cache[where] = each[row][first_seen:].to(cache.dtype)

    def backend(self) -> Any:
        from npu_runner.platforms.cuda.attention.backend import TritonAttention

        return TritonAttention(num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
                               block_size=self.block_size, dtype=self.dtype)

    def scaled_backend(self, device: torch.device, num_sms: int | None) -> Any:
        """`num_sms`: of how many multiprocessors the backend is to think, None: as many as there are."""
        backend = self.backend()
        if num_sms:
            backend.gpu = backend.gpu._replace(num_sms=num_sms)
        if self.kv_scales == (1.0, 1.0):
            return backend
        return backend.with_kv_scales(torch.tensor(self.kv_scales, device=device))

    def run_decode_kernel(self, device: torch.device, num_sms: int | None) -> tuple[Tensor, AttentionMetadata]:
        """The result of decode attention in CUDA C++, (B, N, H), and the step's metadata. Another kernel fails."""
        from npu_runner.platforms.cuda.split_k import make_counters

        backend = self.scaled_backend(device, num_sms)
        seen, attend = [], backend.decodes.attend
        backend.decodes.attend = lambda *given, **settings: seen.append(given[3]) or attend(*given, **settings)
        out_BNH = self.run(device, backend, is_prefill=False)
        assert seen, "the kernel took the step"
        assert not make_counters(device, 1).any(), "the next launch begins with counters of 0"
        return out_BNH, seen[0]

    def run(self, device: torch.device, backend: Any, *, is_prefill: bool) -> Tensor:
        """What the kernels make of it, (T, N, H)."""
        plan = (backend.plan_prefill(self.query_lens, self.context_lens, self.block_tables_BW.numpy(), device)
                if is_prefill else None)
        lens_B = torch.tensor(self.context_lens, dtype=torch.int32, device=device)
        metadata = AttentionMetadata(is_prefill, torch.empty(0), lens_B, self.block_tables_BW.to(device), plan)
        wide_TNH = torch.cat([self.q_TNH, self.q_TNH[:, :2]], dim=1).to(device)[:, :self.num_heads]
        attend = backend.prefill if is_prefill else backend.decode
        out_TNH: Tensor = attend(wide_TNH, self.k_cache.to(device), self.v_cache.to(device), metadata,
                                 self.head_dim**-0.5, window=self.window)
        return out_TNH.cpu()

    def expected(self) -> Tensor:
        parts, (k_scale, v_scale) = zip(self.q_TNH.split(self.query_lens), self.keys, self.values,
                                        strict=True), self.kv_scales
        return torch.cat([attention(q, k.double() * k_scale, v.double() * v_scale, self.window) for q, k, v in parts])

    def assert_equals_definition(self, device: torch.device, *, is_prefill: bool, num_sms: int | None = 2) -> None:
        backend = self.scaled_backend(device, num_sms)
        assert_close(self.run(device, backend, is_prefill=is_prefill), self.expected(), self.dtype)


def make_work(context_lens: list[int], **settings: Any) -> PagedWork:
    """A decode step over contexts of these lengths, as those kernels take it."""
    return PagedWork([length - 1 for length in context_lens], [1] * len(context_lens),
                     **{"head_dim": 128, "num_heads": 8, "num_kv_heads": 2, "dtype": torch.bfloat16, **settings})


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert actual.isfinite().all()
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype], f"error {error:.1e} of the largest value, allowed {TOLERANCE[dtype]:.1e}"


def full_on_cpu(reason: str, *cases: Any) -> list[Any]:
    """Cases of pytest.mark.parametrize, as in `only_full`, that are `full` where no GPU runs them."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full_on_cpu(reason))
            for case in cases]


def need_hopper(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of sm_90")


def need_fp8(device: torch.device) -> None:
    """Skips where nothing rounds to e4m3 as a GPU does."""
    if device.type != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("e4m3 needs a GPU of compute capability 8.9")
