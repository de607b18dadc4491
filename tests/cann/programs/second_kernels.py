"""Kernels that CANN 8.5 may need in the place of others: a cache write of ATB, and the attention for training."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_npu
from torch import Tensor

from .attention_operators import attend, running_totals
from .emulation import calls, close, library, refused
from .fused_operators import TYPES, draw
from .refusals import KERNEL, PARAMETER, TILING

BF16 = torch.bfloat16


def fusion(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **changes: Any) -> tuple[Tensor, ...]:
    arguments: dict[str, Any] = dict(
        head_num=q.shape[1], input_layout="TND", scale=q.shape[-1] ** -0.5, actual_seq_qlen=running_totals(lengths),
        actual_seq_kvlen=running_totals(lengths))
    found: tuple[Tensor, ...] = torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), **(arguments | changes))
    return found


def check_fusion_attention_keeps_images_apart() -> None:
    lengths = [4, 0, 15]
    for dtype in TYPES:
        for heads, kv_heads in ((2, 2), (4, 2)):
            q, k, v = (draw(19, n, 72, dtype=dtype, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
            out, row_max, row_sum, *_ = fusion(q, k, v, lengths)
            parts = list(zip(*(x.split(lengths) for x in (q, k, v)), strict=True))
            close(out, torch.cat([attend(q, k, v, causal=False) for q, k, v in parts]))
            scores = [torch.einsum("qnd,knd->qnk", q.float(), k.float().repeat_interleave(heads // kv_heads, 1))
                      * 72**-0.5 for q, k, _ in parts if len(q)]
            most = torch.cat([x.amax(-1) for x in scores])[..., None].expand(-1, -1, 8)
            total = torch.cat([(x - x.amax(-1, True)).exp().sum(-1) for x in scores])[..., None].expand(-1, -1, 8)
            close(row_max, most)
            close(row_sum, total)


def check_fusion_attention_refusals() -> None:
    q = draw(6, 2, 64, dtype=BF16)
    fusion(q, q, q, [6])
    with refused(TILING, "head dims 64, 64 and 128"):
        fusion(q, q, draw(6, 2, 128, dtype=BF16), [6])
    with refused(TILING, "head dims 784"):
        fusion(*[draw(6, 2, 784, dtype=BF16)] * 3, [6])
    with refused(PARAMETER, "not a multiple"):
        fusion(draw(6, 3, 64, dtype=BF16), q, q, [6])
    with refused(PARAMETER, "differ in dtype"):
        fusion(q, q.half(), q, [6])
    with refused(TILING, "ends with 5, there are 6 rows"):
        fusion(q, q, q, [5])
    with refused(TILING, "running totals"):
        fusion(q, q, q, [6], actual_seq_qlen=[4, 3, 6], actual_seq_kvlen=[4, 3, 6])
    with refused(TILING, "at most 2048"):
        fusion(q, q, q, [6] + [0] * 2048)
    with refused(PARAMETER, "not emulated"):
        fusion(q, q, q, [6], atten_mask=torch.zeros(6, 6, dtype=torch.bool).npu(), sparse_mode=1)


def write(**changes: Any) -> Tensor:
    """Three tokens into caches of two blocks; both of them, flat."""
    keys, values = draw(3, 2, 32, dtype=BF16), draw(3, 2, 32, dtype=BF16, seed=1)
    caches = draw(2, 2, 16, 2, 32, dtype=BF16, seed=2).npu()
    slots = torch.tensor([5, 31, 16], dtype=torch.int32)
    arguments = dict(key=keys.npu(), value=values.npu(), key_cache=caches[0], value_cache=caches[1],
                     slot_indices=slots.npu()) | changes
    torch_npu._npu_reshape_and_cache(**arguments)
    return caches.flatten(1, 2).cpu()


def check_reshape_and_cache_writes_only_its_slots() -> None:
    expected = draw(2, 2, 16, 2, 32, dtype=BF16, seed=2).flatten(1, 2)
    expected[:, [5, 31, 16]] = torch.stack([draw(3, 2, 32, dtype=BF16), draw(3, 2, 32, dtype=BF16, seed=1)])
    before = calls("launches").get("ReshapeAndCacheOperation", 0)
    close(write(), expected)
    assert calls("launches")["ReshapeAndCacheOperation"] == before + 1
    expected[:, 16] = draw(2, 2, 16, 2, 32, dtype=BF16, seed=2).flatten(1, 2)[:, 16]
    close(write(slot_indices=torch.tensor([5, 31, -1], dtype=torch.int32).npu()), expected)


def check_reshape_and_cache_takes_three_types() -> None:
    for dtype in (torch.float16, BF16, torch.int8):
        caches = torch.zeros(2, 2, 16, 2, 32).to(dtype).npu()
        rows = torch.ones(3, 2, 32).to(dtype).npu()
        close(write(key=rows, value=rows, key_cache=caches[0], value_cache=caches[1])[0, 5],
              draw(2, 2, 16, 2, 32, dtype=BF16, seed=2)[0, 0, 5])
        assert caches.cpu().float().sum() == 2 * rows.numel()


@contextmanager
def refused_by_atb(code: int, words: str) -> Iterator[None]:
    """The wheel says that the operation failed, and CANN's last message why."""
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    text = ""
    try:
        yield
    except RuntimeError as error:
        text = f"{error} {library.aclGetRecentErrMsg().decode()}"
    for said in ("ReshapeAndCacheOperation setup failed", f"error {code}: ", words):
        assert said in text, f"wanted '{said}' in: {text}"


def check_reshape_and_cache_refusals() -> None:
    """With ATB's own codes: a data type, a number of dimensions, a dimension."""
    with refused_by_atb(6, "data types"):
        write(key=draw(3, 2, 32).npu())
    with refused_by_atb(6, "key and value differ"):
        rows, cache = draw(3, 2, 32, dtype=torch.float16).npu(), torch.zeros(2, 16, 2, 32, dtype=torch.float16).npu()
        write(value=rows, value_cache=cache)
    with refused_by_atb(6, "slotMapping is int32"):
        write(slot_indices=torch.tensor([5, 31, 16]).npu())
    with refused_by_atb(8, "tokens, slots or blocks"):
        write(slot_indices=torch.tensor([5, 31], dtype=torch.int32).npu())
    with refused_by_atb(8, "heads of the tokens"):
        write(key=draw(3, 4, 32, dtype=BF16).npu())
    with refused_by_atb(16, "a cache of 4"):
        write(key_cache=torch.zeros(32, 2, 32, dtype=BF16).npu())
    with refused(KERNEL, "slotMapping holds 32, the cache has 32 slots"):
        write(slot_indices=torch.tensor([5, 32, 16], dtype=torch.int32).npu())
    with refused(KERNEL, "slotMapping names slot 16 twice"):
        write(slot_indices=torch.tensor([5, 16, 16], dtype=torch.int32).npu())
    write(slot_indices=torch.tensor([5, 5, 16], dtype=torch.int32).npu())  # in block 0, of steps that measure memory
