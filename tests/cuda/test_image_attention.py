"""Attention within images in CUDA C++ on Hopper against the definition in float64, and who takes which images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.paged_work import assert_close, need_hopper
from tests.oracle.attention_reference import within_each

DTYPES = [torch.bfloat16, torch.float16]
HEAD_DIMS = [64, 72, 80, 128]
# Tiles of rows and of columns filled, one less and one more; one token alone; several tiles.
LENGTHS = {"one": [1], "edges": [128, 127, 129, 112, 113, 192, 191, 193], "many": [4, 700, 64, 1, 63, 300]}


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    need_hopper(device)


@pytest.fixture
def takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_runner.platforms.cuda.attention import hopper_attention as image_attention

    monkeypatch.setattr(image_attention, "_SHAPES", {
        head_dim: (shape, 0) for head_dim, (shape, _) in image_attention._SHAPES.items()})


def backend_of(dtype: torch.dtype) -> Any:
    from npu_runner.platforms.cuda.attention.backend import TritonAttention

    return TritonAttention(num_heads=4, num_kv_heads=4, head_dim=64, block_size=64, dtype=dtype)


def made_up(lengths: list[int], head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Queries and keys are slices of one matmul, values of another; what stands behind the last image is NaN."""
    torch.manual_seed(0)
    qk, qkv = (torch.randn(sum(lengths) + 128, parts, 4, head_dim).to(dtype) for parts in (2, 3))
    qk[sum(lengths):], qkv[sum(lengths):] = torch.nan, torch.nan
    return tuple(x.to(device)[:sum(lengths)] for x in (qk[:, 0], qk[:, 1], qkv[:, 2]))


def plain_torch(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: list[int]) -> Tensor:
    """The definition in the tensors' own dtype."""
    parts = zip(*(x.cpu().split(lengths) for x in (q_TNH, k_TNH, v_TNH)), strict=True)
    return torch.cat([torch.einsum("nts,snh->tnh", (torch.einsum("tnh,snh->nts", q, k) * q.shape[-1]**-0.5)
                                   .softmax(-1), v) for q, k, v in parts])


@pytest.mark.usefixtures("takes_all")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", LENGTHS)
def test_images_of_many_sizes(device: torch.device, kind: str, head_dim: int, dtype: torch.dtype) -> None:
    backend, lengths = backend_of(dtype), LENGTHS[kind]
    qkv, plan = made_up(lengths, head_dim, dtype, device), backend.plan_vision(lengths, device)
    assert backend.images.accepts(*qkv, plan)
    found = backend.vision(*qkv, plan, head_dim**-0.5).cpu()
    expected = within_each(*qkv, lengths)
    assert_close(found, expected, dtype)
    errors = [float((each.double() - expected).norm()) for each in (found, plain_torch(*qkv, lengths))]
    assert errors[0] <= 2 * errors[1], f"plain torch is {errors[1]:.1e} from the definition, the kernel {errors[0]:.1e}"


@pytest.mark.usefixtures("takes_all")
def test_images_do_not_see_each_other(device: torch.device) -> None:
    """NaN in one image reaches no other."""
    backend, lengths = backend_of(torch.bfloat16), [130, 100, 70]
    q_TNH, k_TNH, v_TNH = made_up(lengths, 64, torch.bfloat16, device)
    k_TNH[130:230], v_TNH[130:230] = torch.nan, torch.nan
    out_TNH = backend.vision(q_TNH, k_TNH, v_TNH, backend.plan_vision(lengths, device), 0.125)
    assert [bool(part.isnan().any()) for part in out_TNH.split(lengths)] == [False, True, False]


@pytest.mark.usefixtures("takes_all")
def test_two_streams_at_once(device: torch.device) -> None:
    """Each has tiles of its own to count."""
    backend, lengths = backend_of(torch.bfloat16), [1500, 900]
    qkv, plan = made_up(lengths, 64, torch.bfloat16, device), backend.plan_vision(lengths, device)
    expected = backend.vision(*qkv, plan, 0.125)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(backend.vision(*qkv, plan, 0.125))
    torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.usefixtures("takes_all")
@pytest.mark.parametrize(("head_dim", "dtype", "shift"), [
    (64, torch.float32, 0), (96, torch.bfloat16, 0), (64, torch.bfloat16, 4)], ids=["float32", "head dim", "address"])
def test_all_else_stays_in_triton(device: torch.device, head_dim: int, dtype: torch.dtype, shift: int,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    backend, lengths = backend_of(dtype), [300, 64]
    monkeypatch.setattr(backend.images, "attend", None)
    flat = torch.randn(3, sum(lengths) * 4 * head_dim + shift, device=device).to(dtype)[:, shift:]
    qkv = [x.view(sum(lengths), 4, head_dim) for x in flat]
    found = backend.vision(*qkv, backend.plan_vision(lengths, device), head_dim**-0.5)
    assert_close(found.cpu(), within_each(*qkv, lengths), dtype)


@pytest.mark.parametrize(("lengths", "is_taken"), [([2352] * 2, True), ([64] * 80, False)], ids=["images", "windows"])
def test_long_images_are_taken(device: torch.device, lengths: list[int], is_taken: bool) -> None:
    backend = backend_of(torch.bfloat16)
    qkv = made_up(lengths, 64, torch.bfloat16, device)
    assert backend.images.accepts(*qkv, backend.plan_vision(lengths, device)) == is_taken
