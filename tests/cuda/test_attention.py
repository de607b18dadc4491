"""Attention over the paged cache and within images in Triton against the definition in float64.

On a GPU, or in triton's interpreter. Over graphs: tests/oracle/test_attention_backends.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from npu_runner.platforms.step_inputs import AttentionMetadata
from tests.cuda.paged_work import PagedWork, assert_close, need_fp8
from tests.oracle.attention_reference import within_each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (num_heads, num_kv_heads): one query head a kv head, a group that is no power of 2, one larger than a matmul's rows.
GROUPS = [(2, 2), (6, 2), (20, 1)]
# One token, a block and one less and more, and contexts that do not end with a block.
CONTEXTS = [0, 62, 63, 64, 150]


@pytest.fixture
def memory_full_of_nan() -> Iterator[None]:
    """What torch.empty returns is NaN: torch fills it where algorithms are to be deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_decode_step(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    work = PagedWork(CONTEXTS, [1] * 5, head_dim=head_dim, dtype=dtype)
    work.assert_equals_definition(device, is_prefill=False)


@pytest.mark.parametrize(("num_sms", "num_parts"), [(1, 1), (4, 2), (90, 16)])
def test_contexts_in_one_part_and_in_more_than_they_have_steps(device: torch.device, num_sms: int, num_parts: int,
                                                               memory_full_of_nan: None) -> None:
    """Parts that are empty leave nothing, whatever their memory held before."""
    from npu_runner.platforms.cuda.attention.tiles import num_decode_parts

    work = PagedWork([0, 150, 70] * 3, [1] * 9, dtype=torch.bfloat16)
    assert num_decode_parts(9, work.num_kv_heads, num_sms) == num_parts
    work.assert_equals_definition(device, is_prefill=False, num_sms=num_sms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prompts_and_chunks_behind_a_cached_context(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    work = PagedWork([0, 0, 64, 77, 150], [1, 70, 64, 20, 1], head_dim=head_dim, dtype=dtype)
    work.assert_equals_definition(device, is_prefill=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 40], ids=["all", "window"])
def test_a_prefill_of_padded_tokens_and_empty_tiles(device: torch.device, window: int | None, dtype: torch.dtype,
                                                    memory_full_of_nan: None) -> None:
    """As a captured one has them: tokens in no tile attend to nothing, in every layer."""
    work = PagedWork([0, 0, 64, 77, 150], [1, 70, 64, 20, 1], dtype=dtype, window=window)
    backend, num_tokens, num_padded = work.backend(), sum(work.query_lens), 40
    found = backend.graph_tiles(work.query_lens, work.context_lens, num_tokens)["tiles"]
    most = backend.most_graph_tiles(num_tokens, len(work.query_lens))
    tiles = torch.zeros((most["tiles"], 4), dtype=torch.int32)
    assert len(found) < len(tiles)
    tiles[: len(found)] = torch.from_numpy(found)
    q_TNH = torch.cat([work.q_TNH, torch.full((num_padded, work.num_heads, work.head_dim), torch.nan, dtype=dtype)])
    metadata = AttentionMetadata(True, torch.empty(0), torch.empty(0), work.block_tables_BW.to(device),
                                 backend.plan_of_tiles({"tiles": tiles.to(device)}))
    for _ in range(2):
        out_TNH = backend.prefill(q_TNH.to(device), work.k_cache.to(device), work.v_cache.to(device), metadata,
                                  work.head_dim**-0.5, window=window).cpu()
        assert_close(out_TNH[:num_tokens], work.expected(), dtype)
        assert not out_TNH[num_tokens:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [24, 128, 256])
@pytest.mark.parametrize("is_prefill", [True, False], ids=["prefill", "decode"])
def test_a_cache_in_fp8(device: torch.device, is_prefill: bool, head_dim: int, dtype: torch.dtype) -> None:
    if device.type == "cuda":
        need_fp8(device)
    work = PagedWork([0, 64, 77, 150], [70, 64, 20, 1] if is_prefill else [1] * 4, head_dim=head_dim, dtype=dtype,
                     cache_dtype=torch.float8_e4m3fn, window=None if head_dim == 128 else 40)
    work.assert_equals_definition(device, is_prefill=is_prefill)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_sms", [1, 4], ids=["one part", "parts"])
@pytest.mark.parametrize("is_prefill", [True, False], ids=["prefill", "decode"])
def test_a_cache_in_fp8_with_scales(device: torch.device, is_prefill: bool, num_sms: int, dtype: torch.dtype) -> None:
    """Of keys and of values; the one in the place of the other is another answer."""
    if device.type == "cuda":
        need_fp8(device)
    work = PagedWork([0, 64, 77, 150], [70, 64, 20, 1] if is_prefill else [1] * 4, dtype=dtype,
                     cache_dtype=torch.float8_e4m3fn, kv_scales=(0.37, 5.3))
    work.assert_equals_definition(device, is_prefill=is_prefill, num_sms=num_sms)
    expected = work.expected()
    work.kv_scales = (5.3, 0.37)
    swapped = work.backend().with_kv_scales(torch.tensor(work.kv_scales, device=device))
    with pytest.raises(AssertionError, match="of the largest value"):
        assert_close(work.run(device, swapped, is_prefill=is_prefill), expected, dtype)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), GROUPS)
@pytest.mark.parametrize("is_prefill", [True, False], ids=["prefill", "decode"])
def test_groups_of_query_heads(device: torch.device, is_prefill: bool, num_heads: int, num_kv_heads: int) -> None:
    query_lens = [50, 1, 3] if is_prefill else [1, 1, 1]
    work = PagedWork([0, 40, 64], query_lens, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=torch.bfloat16)
    work.assert_equals_definition(device, is_prefill=is_prefill)


@pytest.mark.parametrize("head_dim", [16, 24, 96])
@pytest.mark.parametrize("is_prefill", [True, False], ids=["prefill", "decode"])
def test_head_dims_that_are_filled_up(device: torch.device, is_prefill: bool, head_dim: int) -> None:
    work = PagedWork([0, 64], [30, 5] if is_prefill else [1, 1], head_dim=head_dim, dtype=torch.bfloat16)
    work.assert_equals_definition(device, is_prefill=is_prefill)


@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize("block_size", [16, 24, 32, 128])
@pytest.mark.parametrize("is_prefill", [True, False], ids=["prefill", "decode"])
def test_block_sizes(device: torch.device, is_prefill: bool, block_size: int, window: int | None) -> None:
    """A step's columns are several blocks, parts of some, and a part of one."""
    query_lens = [70, 20, 1] if is_prefill else [1, 1, 1]
    work = PagedWork([0, 77, 127], query_lens, block_size=block_size, window=window, dtype=torch.bfloat16)
    work.assert_equals_definition(device, is_prefill=is_prefill)


@pytest.mark.parametrize("window", [1, 30, 64, 100, 1000])
@pytest.mark.parametrize("is_prefill", [True, False], ids=["prefill", "decode"])
def test_windows(device: torch.device, is_prefill: bool, window: int) -> None:
    """What lies behind a window is NaN; columns within all windows of a tile, at their beginnings, and none."""
    query_lens = [100, 40, 1] if is_prefill else [1, 1, 1]
    work = PagedWork([0, 150, 190], query_lens, window=window, dtype=torch.bfloat16)
    work.assert_equals_definition(device, is_prefill=is_prefill)


def test_what_stands_after_the_diagonal_is_not_read(device: torch.device) -> None:
    """NaN from some tile's first token on reaches no tile before it."""
    work = PagedWork([10], [200], num_heads=4, num_kv_heads=1, dtype=torch.bfloat16)
    backend = work.backend()
    num_before = 4 * (backend.prefill_tile.rows // backend.group)
    for place in range(10 + num_before, 210):
        block = int(work.block_tables_BW[0, place // 64])
        work.k_cache[block, place % 64], work.v_cache[block, place % 64] = torch.nan, torch.nan
    out_TNH = work.run(device, backend, is_prefill=True)
    assert_close(out_TNH[:num_before], work.expected()[:num_before], work.dtype)
    assert out_TNH[num_before:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 128])
def test_images_of_many_sizes(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    check_images(device, head_dim, dtype, [4, 130, 64, 1, 63, 65])


@pytest.mark.parametrize("head_dim", [16, 20, 40, 96])
def test_images_of_other_head_dims(device: torch.device, head_dim: int) -> None:
    check_images(device, head_dim, torch.bfloat16, [70, 16])


def check_images(device: torch.device, head_dim: int, dtype: torch.dtype, lengths: list[int]) -> None:
    """Queries and keys are slices of one matmul, values of another; what stands behind the last image is NaN."""
    from npu_runner.platforms.cuda.attention.backend import TritonAttention

    torch.manual_seed(0)
    backend = TritonAttention(num_heads=2, num_kv_heads=2, head_dim=64, block_size=64, dtype=dtype)
    qk, qkv = (torch.randn(sum(lengths) + 64, parts, 2, head_dim).to(dtype) for parts in (2, 3))
    qk[sum(lengths):], qkv[sum(lengths):] = torch.nan, torch.nan
    q_TNH, k_TNH, v_TNH = (x.to(device)[:sum(lengths)] for x in (qk[:, 0], qk[:, 1], qkv[:, 2]))
    out_TNH = backend.vision(q_TNH, k_TNH, v_TNH, backend.plan_vision(lengths, device), head_dim**-0.5)
    assert_close(out_TNH.cpu(), within_each(q_TNH, k_TNH, v_TNH, lengths), dtype)


@pytest.mark.parametrize("head_dim", [72, 80])
def test_heads_in_two_parts_are_taken_where_they_are_right_and_only_there(
        device: torch.device, head_dim: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that the compiler made wrong is named in a warning and not used."""
    from npu_runner.platforms.cuda.attention import vision_kernels

    launches = []
    right = vision_kernels.split_images

    class Wrong:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*arguments: Any, **constants: Any) -> None:
                launches.append(grid)
                right[grid](*arguments, **constants)
                if self.spoils:
                    arguments[3][300] += 1  # of a later image
            return launch

        spoils = False

    kernel = Wrong()
    monkeypatch.setattr(vision_kernels, "split_images", kernel)
    check_images(device, head_dim, torch.bfloat16, [70, 16])
    assert len(launches) == 2, "one is compared, one is used"
    assert not caplog.records
    kernel.spoils = True
    check_images(device, head_dim, torch.bfloat16, [70, 16])
    assert len(launches) == 3, "it is compared, and not used"
    assert "two parts is wrong" in caplog.text
    check_images(device, head_dim, torch.float32, [70, 16])
    assert len(launches) == 3
