"""What CANN 8.5 lacks or refuses and 9.0 takes: runs with CANN_EMU_CANN_VERSION=8.5.0."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu

from .attention_operators import BLOCK, mask
from .emulation import calls, close, error_of, refused, reset_counters
from .fused_operators import draw
from .refusals import KERNEL, PARAMETER, TILING, attention

BF16 = torch.bfloat16


def check_the_version_is_the_switch() -> None:
    assert torch_npu.npu.utils.get_cann_version() == "8.5.0"


def check_paged_attention_in_tnd_takes_grouped_heads() -> None:
    assert attention(dtype=BF16, head_dim=128).shape == (2, 4, 128)
    assert attention(dtype=torch.float16, head_dim=64).shape == (2, 4, 64)
    assert attention(dtype=BF16, head_dim=256).shape == (2, 4, 256)


def check_paged_attention_in_tnd_is_for_blocks_of_128() -> None:
    cache = torch.zeros(8, 64, 256, dtype=BF16).npu()
    table = torch.zeros(2, 4, dtype=torch.int32).npu()
    with refused(TILING, "blockSize is 64"):
        attention(dtype=BF16, head_dim=128, key=cache, value=cache.clone(), block_size=64, block_table=table)


def check_equal_heads_have_a_tiling_of_their_own() -> None:
    def equal(dtype: torch.dtype = BF16, head_dim: int = 128, **changes: Any) -> torch.Tensor:
        q, k, v = (draw(5, 2, head_dim, dtype=dtype).npu() for _ in range(3))
        return attention(query=q, key=k, value=v, num_heads=2, **{
            "block_table": None, "block_size": 0, "actual_seq_lengths": [2, 5], "actual_seq_lengths_kv": [2, 5],
            "atten_mask": None, "sparse_mode": 0, **changes})

    assert equal().shape == (5, 2, 128)
    assert equal(head_dim=64).shape == (5, 2, 64)
    for head_dim in (96, 256):
        with refused(TILING, "192/128/64"):
            equal(head_dim=head_dim)
    with refused(TILING, "float16"):
        equal(dtype=torch.float16)
    assert equal(dtype=torch.float16, inner_precise=1).shape == (5, 2, 128)
    with refused(TILING, "float16"):
        equal(dtype=torch.float16, inner_precise=1, sparse_mode=3, atten_mask=mask())
    cache = torch.zeros(4, BLOCK, 256, dtype=BF16).npu()
    with refused(TILING, "equal heads in TND over a paged cache"):
        attention(query=draw(2, 2, 128, dtype=BF16).npu(), key=cache, value=cache.clone(), num_heads=2)


def check_a_band_is_for_head_dims_of_64_and_128() -> None:
    def band(head_dim: int) -> torch.Tensor:
        return attention(dtype=BF16, head_dim=head_dim, query=draw(4, 4, head_dim, dtype=BF16).npu(),
                         actual_seq_lengths=[2, 4], sparse_mode=4, pre_tokens=3, next_tokens=0)

    assert band(128).shape == (4, 4, 128)
    with refused(TILING, "192/128/64"):
        band(256)


def rotated(num_heads: int, dtype: torch.dtype = BF16, layout: str = "BSND") -> None:
    q, cos = draw(3, num_heads, 128, dtype=dtype).npu(), draw(3, 1, 128, dtype=dtype).npu()
    k = draw(3, 1, 128, dtype=dtype).npu()
    q, k, cos = (x if layout == "TND" else x.unsqueeze(0) for x in (q, k, cos))
    torch_npu.npu_apply_rotary_pos_emb(q, k, cos, cos, layout=layout)


def check_fused_rotary_takes_both_layouts() -> None:
    rotated(4, layout="TND")
    rotated(4, layout="BSND")


def check_fused_rotary_takes_as_many_heads_as_its_buffer_holds() -> None:
    rotated(75)
    with refused(TILING, "77 heads of 128 need"):
        rotated(76)
    with refused(TILING, "at most 255"):
        rotated(255, dtype=torch.float16)


def check_what_is_missing_is_not_found() -> None:
    """The wheel takes the older function where it has one, and names the other."""
    x, cos = draw(1, 3, 4, 64).npu(), draw(1, 3, 1, 64).npu()
    reset_counters()
    turned = torch_npu.npu_rotary_mul(x, cos, cos)
    assert calls("launches") == {"aclnnRotaryPositionEmbedding": 1}
    halves = x.cpu().chunk(2, -1)
    close(turned, x.cpu() * cos.cpu() + torch.cat([-halves[1], halves[0]], -1) * cos.cpu())
    cache = draw(16, 64, dtype=BF16).npu()
    rows = draw(3, 128, dtype=BF16).npu()
    text = error_of(lambda: torch_npu.npu_mrope(torch.arange(3).npu(), rows, rows.clone(), cache, 64,
                                                mrope_section=[0, 0, 0], rotary_mode="half"))
    assert "aclnnRopeWithSinCosCacheGetWorkspaceSize not in libopapi.so" in text, text


def scatter(dtype: torch.dtype = BF16, slots: tuple[int, ...] = (131, 132)) -> None:
    rows = torch.ones(len(slots), 2, 32).to(dtype).npu()
    caches = [torch.zeros(2, 128, 2, 32, dtype=dtype).npu() for _ in range(2)]
    torch_npu.npu_scatter_pa_kv_cache(rows, rows.clone(), *caches, torch.tensor(slots, dtype=torch.int32).npu(),
                                      cache_mode="Norm")


def check_cache_writes_take_few_types_and_each_slot_once() -> None:
    for dtype in (BF16, torch.float16, torch.int8):
        scatter(dtype)
    with refused(PARAMETER, "dtype Float"):
        scatter(torch.float32)
    with refused(KERNEL, "a slot twice"):
        scatter(slots=(131, 131))
    scatter(slots=(3, 3))  # block 0 is the null block of steps that measure memory
