"""Fused attention against softmax written out: prefill and decode, paged and plain, with and without a mask."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from .emulation import close
from .fused_operators import draw

BLOCK = 128


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int = 1 << 30) -> Tensor:
    """(S, N, D) attention of one sequence in float32; grouped heads; the last query sees the last key.

    A causal query sees `window` keys, its own place's included.
    """
    group = query.shape[1] // key.shape[1]
    q, k, v = query.float().transpose(0, 1), key.float().transpose(0, 1), value.float().transpose(0, 1)
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * query.shape[-1] ** -0.5
    if causal:
        rows, columns = scores.shape[1:]
        scores = scores.masked_fill(
            torch.triu(torch.ones(rows, columns, dtype=torch.bool), columns - rows + 1), float("-inf")
        )
        scores = scores.masked_fill(
            torch.tril(torch.ones(rows, columns, dtype=torch.bool), columns - rows - window), float("-inf")
        )
    return (scores.softmax(-1) @ v.repeat_interleave(group, 0)).transpose(0, 1).to(query.dtype)


def mask() -> Tensor:
    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool), 1).npu()


def running_totals(lengths: list[int]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


def paged_case(
    q_lengths: list[int], kv_lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
    window: int | None = None,
) -> None:
    blocks_each = max((length + BLOCK - 1) // BLOCK for length in kv_lengths)
    num_blocks = 1 + blocks_each * len(q_lengths)
    query = draw(sum(q_lengths), heads, head_dim, dtype=dtype)
    key = draw(num_blocks, BLOCK, kv_heads * head_dim, dtype=dtype, seed=1)
    value = draw(num_blocks, BLOCK, kv_heads * head_dim, dtype=dtype, seed=2)
    table = (
        torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3))
        .add(1)
        .view(len(q_lengths), blocks_each)
        .int()
    )
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        atten_mask=mask(),
        block_table=table.npu(),
        input_layout="TND",
        block_size=BLOCK,
        actual_seq_lengths=running_totals(q_lengths),
        actual_seq_lengths_kv=kv_lengths,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=head_dim**-0.5,
        sparse_mode=3 if window is None else 4,
        **({} if window is None else {"pre_tokens": window - 1, "next_tokens": 0}),
    )
    parts = []
    for i, rows in enumerate(query.split(q_lengths)):
        k, v = (
            x[table[i].long()].flatten(0, 1)[: kv_lengths[i]].unflatten(-1, (kv_heads, head_dim)) for x in (key, value)
        )
        parts.append(attend(rows, k, v, causal=True, window=window or 1 << 30))
    close(out, torch.cat(parts))


def check_paged_prefill_of_a_band() -> None:
    paged_case([9, 140, 1], [150, 140, 300], heads=4, kv_heads=2, head_dim=64, dtype=torch.bfloat16, window=20)


def check_paged_decode_with_a_mask_of_its_own() -> None:
    """BSND, a mask for each sequence over all that its row of the table names."""
    query = draw(2, 1, 4, 64, dtype=torch.float16)
    key, value = (draw(5, BLOCK, 2 * 64, dtype=torch.float16, seed=seed) for seed in (1, 2))
    table, lengths, first_seen = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32), [130, 40], [100, 7]
    hidden = torch.arange(2 * BLOCK) < torch.tensor(first_seen)[:, None]
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        atten_mask=hidden[:, None, None].npu(),
        block_table=table.npu(),
        input_layout="BSND",
        block_size=BLOCK,
        actual_seq_lengths_kv=lengths,
        num_heads=4,
        num_key_value_heads=2,
        scale=0.125,
        sparse_mode=0,
    )
    for row, (length, first) in enumerate(zip(lengths, first_seen, strict=True)):
        k, v = (x[table[row].long()].flatten(0, 1)[first:length].unflatten(-1, (2, 64)) for x in (key, value))
        close(out[row], attend(query[row], k, v, causal=False))


def check_paged_decode() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        paged_case([1, 1, 1], [130, 7, 256], heads=4, kv_heads=2, head_dim=64, dtype=dtype)


def check_paged_prefill_of_uneven_sequences() -> None:
    paged_case([9, 140, 1], [9, 140, 1], heads=4, kv_heads=4, head_dim=128, dtype=torch.bfloat16)


def check_paged_prefill_of_a_later_chunk() -> None:
    paged_case([5, 20], [150, 20], heads=8, kv_heads=2, head_dim=64, dtype=torch.float32)


def check_plain_prefill_with_running_key_totals() -> None:
    lengths = [3, 10, 6]
    q, k, v = draw(19, 4, 64), draw(19, 2, 64, seed=1), draw(19, 2, 64, seed=2)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        q.npu(),
        k.npu(),
        v.npu(),
        atten_mask=mask(),
        input_layout="TND",
        actual_seq_lengths=running_totals(lengths),
        actual_seq_lengths_kv=running_totals(lengths),
        num_heads=4,
        num_key_value_heads=2,
        scale=0.125,
        sparse_mode=3,
    )
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    close(out, torch.cat([attend(q, k, v, causal=True) for q, k, v in parts]))


def check_images_attend_without_a_mask() -> None:
    """The vision tower: heads of 72 padded to 128, sparse mode 0, images apart by their lengths."""
    lengths = [4, 16]
    q, k, v = (torch.nn.functional.pad(draw(20, 2, 72, dtype=torch.float16, seed=i), (0, 56)) for i in range(3))
    out, _ = torch_npu.npu_fused_infer_attention_score(
        q.npu(),
        k.npu(),
        v.npu(),
        input_layout="TND",
        actual_seq_lengths=running_totals(lengths),
        actual_seq_lengths_kv=running_totals(lengths),
        num_heads=2,
        num_key_value_heads=2,
        scale=128**-0.5,
        sparse_mode=0,
    )
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    close(out, torch.cat([attend(q, k, v, causal=False) for q, k, v in parts]))


def check_batched_layouts_agree() -> None:
    q, k, v = draw(2, 5, 4, 64), draw(2, 5, 2, 64, seed=1), draw(2, 5, 2, 64, seed=2)
    expected = torch.stack([attend(q[i], k[i], v[i], causal=False) for i in range(2)])

    def call(layout: str, *tensors: Tensor) -> Tensor:
        return torch_npu.npu_fused_infer_attention_score(
            *(x.contiguous().npu() for x in tensors),
            input_layout=layout,
            num_heads=4,
            num_key_value_heads=2,
            scale=0.125,
        )[0]

    close(call("BSND", q, k, v), expected)
    close(call("BNSD", *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), expected)
    close(call("BSH", *(x.flatten(2) for x in (q, k, v))).unflatten(-1, (4, 64)), expected)


def check_log_sum_exp_of_the_scores() -> None:
    q, k, v = draw(6, 2, 64), draw(6, 2, 64, seed=1), draw(6, 2, 64, seed=2)
    _, lse = torch_npu.npu_fused_infer_attention_score(
        q.npu(),
        k.npu(),
        v.npu(),
        input_layout="TND",
        actual_seq_lengths=[6],
        actual_seq_lengths_kv=[6],
        num_heads=2,
        num_key_value_heads=2,
        scale=0.125,
        softmax_lse_flag=True,
    )
    close(lse.squeeze(-1), (torch.einsum("qnd,knd->qnk", q, k) * 0.125).logsumexp(-1))


def check_version_two_takes_the_same_route() -> None:
    q, k, v = (
        draw(6, 2, 64, dtype=torch.float16),
        draw(6, 2, 64, dtype=torch.float16, seed=1),
        draw(6, 2, 64, dtype=torch.float16, seed=2),
    )
    out, _ = torch_npu.npu_fused_infer_attention_score_v2(
        q.npu(),
        k.npu(),
        v.npu(),
        input_layout="TND",
        actual_seq_qlen=[6],
        actual_seq_kvlen=[6],
        num_query_heads=2,
        num_key_value_heads=2,
        softmax_scale=0.125,
    )
    close(out, attend(q, k, v, causal=False))
