"""Norm, rotary embedding and cache write of heads in one kernel against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.ops import HeadNorms, TorchOps, rotate_leading
from tests.cuda.paged_work import need_fp8
from tests.oracle.attention_reference import within_each

# T tokens, N query heads, K kv heads, H head dim, R dims that turn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of the largest value: 16 bits round after the norm, after its weight and after the turn.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.6e-3}
HEADS = [(1, 1), (4, 4), (14, 2), (32, 8), (5, 1)]
DIMS = [(64, 64), (128, 128), (256, 256), (256, 64), (80, 80), (24, 16)]
NUM_BLOCKS, EPS = 5, 1e-6


class Work:
    """A step's queries, keys and values as one matmul leaves them, with a gate beside each query where one stands."""

    def __init__(self, num_tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, *,
                 block_size: int = 16, is_gated: bool = False, norm: str = "as x", seed: int = 0):
        torch.manual_seed(seed)
        (num_heads, num_kv_heads), (head_dim, rotary_dim) = heads, dims
        width = (2 if is_gated else 1) * head_dim
        sizes = [num_heads * width, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self.qkv = (torch.randn(num_tokens, sum(sizes)) * 2).to(dtype)
        self.sizes, self.width, self.head_dim = sizes, width, head_dim
        angles_TF = torch.rand(num_tokens, rotary_dim // 2) * 6
        self.cos_TR, self.sin_TR = (turn.repeat(1, 2).to(dtype) for turn in (angles_TF.cos(), angles_TF.sin()))
        weight_dtype = torch.float32 if norm == "float32" else dtype
        weights = [(torch.rand(head_dim) + 0.5).to(weight_dtype) for _ in range(2)]
        self.norms = None if norm == "none" else HeadNorms(*weights, EPS)
        self.cache = torch.randn(2, NUM_BLOCKS, block_size, num_kv_heads, head_dim).to(dtype)
        self.slots_T = torch.randperm(NUM_BLOCKS * block_size)[:num_tokens].int()

    def heads(self, device: torch.device | str = "cpu") -> list[Tensor]:
        q, k, v = self.qkv.clone().to(device).split(self.sizes, dim=-1)
        return [q.unflatten(-1, (-1, self.width))[..., :self.head_dim],
                *(x.unflatten(-1, (-1, self.head_dim)) for x in (k, v))]

    def norms_on(self, device: torch.device) -> HeadNorms | None:
        return self.norms and HeadNorms(self.norms.q_weight_H.to(device), self.norms.k_weight_H.to(device), EPS)

    def run(self, device: torch.device, kv_scales: Tensor | None = None) -> list[Tensor]:
        """Queries, the caches of keys and of values."""
        from npu_runner.platforms.cuda.attention.heads import norm_rotary_store

        k_cache, v_cache = self.cache.clone().to(device)
        q_TNH = norm_rotary_store(*self.heads(device), self.norms_on(device), self.cos_TR.to(device),
                                  self.sin_TR.to(device), k_cache=k_cache, v_cache=v_cache,
                                  slot_mapping_T=self.slots_T.to(device), kv_scales=kv_scales)
        assert q_TNH.is_contiguous()
        return [x.cpu() for x in (q_TNH, k_cache, v_cache)]

    def define(self) -> list[Tensor]:
        q_TNH, k_TKH, v_TKH = (x.double() for x in self.heads())
        if self.norms is not None:
            q_TNH, k_TKH = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()
                            for x, weight in zip((q_TNH, k_TKH), self.norms[:2], strict=True))
        q_TNH, k_TKH = (rotate_leading(x, self.cos_TR.double()[:, None], self.sin_TR.double()[:, None])
                        for x in (q_TNH, k_TKH))
        k_cache, v_cache = self.cache.double()
        k_cache.flatten(0, 1)[self.slots_T.long()] = k_TKH
        v_cache.flatten(0, 1)[self.slots_T.long()] = v_TKH
        return [q_TNH, k_cache, v_cache]


def assert_equals_definition(device: torch.device, work: Work) -> None:
    dtype = work.qkv.dtype
    (q_TNH, k_cache, v_cache), expected = work.run(device), work.define()
    for found, right in zip((q_TNH, k_cache), expected, strict=False):
        assert found.dtype == dtype
        assert (found.double() - right).abs().max() < TOLERANCE[dtype] * right.abs().max()
    is_written = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
    is_written.view(-1)[work.slots_T.long()] = True
    assert torch.equal(k_cache[~is_written], work.cache[0][~is_written])
    assert torch.equal(v_cache, expected[2].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads_and_dims(device: torch.device, heads: tuple[int, int], dims: tuple[int, int],
                        dtype: torch.dtype) -> None:
    assert_equals_definition(device, Work(7, heads, dims, dtype))


@pytest.mark.parametrize("block_size", [1, 16, 48, 64])
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_numbers_of_tokens_and_block_sizes(device: torch.device, num_tokens: int, block_size: int) -> None:
    assert_equals_definition(device, Work(num_tokens, (14, 2), (64, 64), torch.bfloat16, block_size=block_size))


@pytest.mark.parametrize("norm", ["none", "as x", "float32"])
@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dims", [(128, 128), (256, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_gates(device: torch.device, dtype: torch.dtype, dims: tuple[int, int], is_gated: bool,
                         norm: str) -> None:
    assert_equals_definition(device, Work(5, (8, 2), dims, dtype, is_gated=is_gated, norm=norm))


@pytest.mark.parametrize("dims", [(128, 128), (256, 64), (24, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_in_fp8_holds_what_a_wider_one_would_rounded(device: torch.device, dtype: torch.dtype,
                                                             dims: tuple[int, int]) -> None:
    """To the nearest; its largest number for larger ones; NaN stays."""
    need_fp8(device)
    work = Work(7, (8, 2), dims, dtype)
    work.qkv[:, -dims[0]:] *= 200
    work.qkv[3, -1] = torch.nan
    _, *wide = work.run(device)
    work.cache = work.cache.to(torch.float8_e4m3fn)
    _, *narrow = work.run(device)
    for found, whole in zip(narrow, wide, strict=True):
        assert found.dtype == torch.float8_e4m3fn
        rounded = whole.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(found.view(torch.uint8) & 0x7F, rounded.view(torch.uint8) & 0x7F)
        finite = ~rounded.float().isnan()
        assert torch.equal(found.view(torch.uint8)[finite], rounded.view(torch.uint8)[finite])
    assert narrow[1].float().isnan().sum() == 1
    assert (narrow[1].float().abs() == 448).any()


@pytest.mark.parametrize("dims", [(128, 128), (24, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_in_fp8_holds_what_was_divided_by_its_scales(device: torch.device, dtype: torch.dtype,
                                                             dims: tuple[int, int]) -> None:
    """In float32, to the nearest; so it does where a backend writes without the rotary embedding."""
    from npu_runner.platforms.cuda.attention.backend import TritonAttention

    need_fp8(device)
    work, scales = Work(7, (8, 2), dims, dtype), torch.tensor([3.7, 11.3])
    work.qkv[:, -dims[0]:] *= 900
    _, *wide = work.run(device)
    work.cache = torch.zeros_like(work.cache).to(torch.float8_e4m3fn)
    _, *narrow = work.run(device, scales.to(device))
    backend = TritonAttention(num_heads=8, num_kv_heads=2, head_dim=dims[0], block_size=16, dtype=dtype)
    backend = backend.with_kv_scales(scales.to(device))
    again = [cache.to(device) for cache in work.cache.clone()]
    places = work.slots_T.long()
    written = [whole.flatten(0, 1)[places] for whole in wide]
    backend.write_kv(*(x.to(device) for x in written), *again, work.slots_T.to(device))
    for found, other, x_TKH, scale in zip(narrow, again, written, scales, strict=True):
        rounded = (x_TKH.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(found.view(torch.uint8).flatten(0, 1)[places], rounded)
        assert torch.equal(other.cpu().view(torch.uint8).flatten(0, 1)[places], rounded)


def test_the_head_of_a_rank_has_no_neighbour_that_its_stride_leads_to(device: torch.device) -> None:
    """A network of transformers leaves keys as (heads, tokens, dims): with one head it is the same memory."""
    from npu_runner.platforms.cuda.attention.backend import TritonAttention

    backend = TritonAttention(num_heads=2, num_kv_heads=1, head_dim=16, block_size=4, dtype=torch.float32)
    k_TKH, v_TKH = torch.randn(2, 1, 6, 16, device=device).transpose(1, 2)
    assert k_TKH.stride(1) == 6 * 16
    k_cache, v_cache = torch.zeros(2, 3, 4, 1, 16, device=device)
    backend.write_kv(k_TKH, v_TKH, k_cache, v_cache, torch.arange(4, 10, dtype=torch.int32, device=device))
    for x_TKH, cache in ((k_TKH, k_cache), (v_TKH, v_cache)):
        assert torch.equal(cache.flatten(0, 1)[4:10], x_TKH)
        assert not cache.flatten(0, 1)[:4].any()


def test_one_head_of_a_tower_has_no_neighbour_either(device: torch.device) -> None:
    from npu_runner.platforms.cuda.attention.backend import TritonAttention

    lengths = [4, 2]
    backend = TritonAttention(num_heads=1, num_kv_heads=1, head_dim=16, block_size=4, dtype=torch.float32)
    qkv = torch.randn(3, 1, 6, 16, device=device).transpose(1, 2).unbind()
    out_TNH = backend.vision(*qkv, backend.plan_vision(lengths, device), 0.25)
    torch.testing.assert_close(out_TNH.cpu().double(), within_each(*qkv, lengths), rtol=1e-5, atol=1e-5)


def test_more_rows_than_a_program_has(device: torch.device) -> None:
    assert_equals_definition(device, Work(75, (3, 1), (64, 64), torch.bfloat16, norm="float32"))


@pytest.mark.parametrize("norm", ["none", "as x", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_rounds_where_the_separate_operators_round(device: torch.device, dtype: torch.dtype, norm: str) -> None:
    """All but the few values that a sum in another order turns to their neighbour are the same to the bit."""
    from npu_runner.platforms.attention import AttentionBackend
    from npu_runner.platforms.cuda.attention.backend import TritonAttention
    from npu_runner.platforms.cuda.ops import TritonOps

    work = Work(30, (8, 2), (128, 128), dtype, norm=norm)
    backend = TritonAttention(num_heads=8, num_kv_heads=2, head_dim=128, block_size=16, dtype=dtype)
    k_cache, v_cache = work.cache.clone().to(device)
    q_TNH = AttentionBackend.norm_rotary_store(
        backend, TritonOps(), *work.heads(device), work.norms_on(device), work.cos_TR.to(device),
        work.sin_TR.to(device), k_cache=k_cache, v_cache=v_cache, slot_mapping_T=work.slots_T.to(device))
    for found, separate in zip(work.run(device), (q_TNH, k_cache, v_cache), strict=True):
        assert (found != separate.cpu()).float().mean() < (0.3 if dtype == torch.float32 else 2e-3)


def test_the_backend_takes_the_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the separate operators runs."""
    from npu_runner.platforms.cuda.attention.backend import TritonAttention

    work = Work(3, (4, 2), (64, 64), torch.bfloat16)
    backend = TritonAttention(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    monkeypatch.setattr(TritonAttention, "write_kv", None)
    k_cache, v_cache = work.cache.clone().to(device)
    q_TNH = backend.norm_rotary_store(TorchOps(), *work.heads(device), work.norms_on(device), work.cos_TR.to(device),
                                      work.sin_TR.to(device), k_cache=k_cache, v_cache=v_cache,
                                      slot_mapping_T=work.slots_T.to(device))
    for found, expected in zip((q_TNH, k_cache, v_cache), work.run(device), strict=True):
        assert torch.equal(found.cpu(), expected)
