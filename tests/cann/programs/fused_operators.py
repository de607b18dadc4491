"""Fused operators against plain torch on the CPU, in the types a model uses."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from .emulation import close

TYPES = (torch.float32, torch.float16, torch.bfloat16)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def check_rms_norm() -> None:
    for dtype in TYPES:
        x, weight = draw(5, 3, 64, dtype=dtype), draw(64, dtype=dtype, seed=1)
        y, rstd = torch_npu.npu_rms_norm(x.npu(), weight.npu(), 1e-5)
        close(y, torch.nn.functional.rms_norm(x.float(), (64,), weight.float(), 1e-5).to(dtype))
        close(rstd, torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5))
        wide = torch_npu.npu_rms_norm(x.npu(), weight.float().npu(), 1e-5)[0]
        close(wide, y.cpu())


def check_add_rms_norm() -> None:
    for dtype in TYPES:
        x, residual, weight = draw(7, 64, dtype=dtype), draw(7, 64, dtype=dtype, seed=1), draw(64, dtype=dtype, seed=2)
        y, _, total = torch_npu.npu_add_rms_norm(x.npu(), residual.npu(), weight.npu(), 1e-6)
        close(total, x + residual)
        close(y, torch.nn.functional.rms_norm((x + residual).float(), (64,), weight.float(), 1e-6).to(dtype))


def check_swiglu() -> None:
    for dtype in TYPES:
        x = draw(4, 96, dtype=dtype)
        gate, up = x.float().chunk(2, -1)
        close(torch_npu.npu_swiglu(x.npu()), (torch.nn.functional.silu(gate) * up).to(dtype))


def check_apply_rotary_pos_emb_updates_in_place() -> None:
    for dtype in TYPES:
        for head_dim in (64, 128):
            q, k = draw(6, 4, head_dim, dtype=dtype), draw(6, 2, head_dim, dtype=dtype, seed=1)
            cos, sin = draw(6, 1, head_dim, dtype=dtype, seed=2), draw(6, 1, head_dim, dtype=dtype, seed=3)
            query, key = q.npu(), k.npu()
            out_q, out_k = torch_npu.npu_apply_rotary_pos_emb(query, key, cos.npu(), sin.npu(), layout="TND")
            close(out_q, rotated(q.float(), cos.float(), sin.float()).to(dtype))
            close(out_k, rotated(k.float(), cos.float(), sin.float()).to(dtype))
            close(query, out_q.cpu())


def check_apply_rotary_pos_emb_in_bsnd() -> None:
    q, k, cos, sin = draw(2, 3, 4, 64), draw(2, 3, 1, 64, seed=1), draw(2, 3, 1, 64, seed=2), draw(2, 3, 1, 64, seed=3)
    out_q, out_k = torch_npu.npu_apply_rotary_pos_emb(q.npu(), k.npu(), cos.npu(), sin.npu(), layout="BSND")
    close(out_q, rotated(q, cos, sin))
    close(out_k, rotated(k, cos, sin))


def check_rotary_mul() -> None:
    for dtype in TYPES:
        x, cos, sin = (
            draw(1, 6, 4, 72, dtype=dtype),
            draw(1, 6, 1, 72, dtype=dtype, seed=1),
            draw(1, 6, 1, 72, dtype=dtype, seed=2),
        )
        close(
            torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu()),
            rotated(x.float(), cos.float(), sin.float()).to(dtype),
        )


def check_rotary_mul_interleaved() -> None:
    x, cos, sin = draw(1, 6, 4, 32), draw(1, 6, 1, 32, seed=1), draw(1, 6, 1, 32, seed=2)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack((-odd, even), -1).flatten(-2)
    close(torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), "interleave"), x * cos + turned * sin)


def check_mrope_sections_choose_their_axis() -> None:
    head_dim, sections = 64, [8, 12, 12]
    positions = torch.tensor([[0, 1, 2, 3, 4], [5, 5, 6, 6, 7], [9, 8, 7, 6, 5]])
    cache = draw(16, head_dim)
    q, k = draw(5, 4 * head_dim, seed=1), draw(5, head_dim, seed=2)
    rows = cache[positions]
    cos, sin = (
        torch.cat([half[axis].split(sections, -1)[axis] for axis in range(3)], -1) for half in rows.chunk(2, -1)
    )
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]
    out_q, out_k = torch_npu.npu_mrope(positions.npu(), q.npu(), k.npu(), cache.npu(), head_dim, mrope_section=sections)
    close(out_q, rotated(q.view(5, 4, head_dim), cos, sin).flatten(1))
    close(out_k, rotated(k.view(5, 1, head_dim), cos, sin).flatten(1))


def check_mrope_interleaved_cache() -> None:
    """The order of Qwen3-VL: time, height, width, time, ... for the first frequencies, time for the rest."""
    head_dim, sections = 64, [12, 10, 10]
    positions = torch.tensor([[0, 1, 2, 3], [5, 5, 6, 6], [9, 8, 7, 6]])
    cache, q, k = draw(16, head_dim), draw(4, 2 * head_dim, seed=1), draw(4, head_dim, seed=2)
    halves = []
    for half in cache[positions].chunk(2, -1):
        mixed = half[0].clone()
        for axis in (1, 2):
            mixed[..., axis : sections[axis] * 3 : 3] = half[axis][..., axis : sections[axis] * 3 : 3]
        halves.append(torch.cat((mixed, mixed), -1)[:, None])
    out_q, _ = torch_npu.npu_mrope(
        positions.npu(), q.npu(), k.npu(), cache.npu(), head_dim, mrope_section=sections, cache_mode="interleave"
    )
    close(out_q, rotated(q.view(4, 2, head_dim), *halves).flatten(1))


def check_scatter_pa_kv_cache_writes_only_its_slots() -> None:
    for dtype in TYPES:
        keys, values = draw(3, 2, 32, dtype=dtype), draw(3, 2, 32, dtype=dtype, seed=1)
        cache = draw(2, 4, 16, 2, 32, dtype=dtype, seed=2)
        expected = cache.clone()
        slots = torch.tensor([5, 63, 16])
        expected[0].flatten(0, 1)[slots] = keys
        expected[1].flatten(0, 1)[slots] = values
        on_npu = cache.npu()
        torch_npu.npu_scatter_pa_kv_cache(
            keys.npu(), values.npu(), on_npu[0], on_npu[1], slots.int().npu(), cache_mode="Norm"
        )
        close(on_npu, expected)


def check_scatter_pa_kv_cache_in_nz() -> None:
    heads, head_dim, block_size = 2, 32, 16
    keys, values = (
        draw(3, heads, head_dim, dtype=torch.bfloat16),
        draw(3, heads, head_dim, dtype=torch.bfloat16, seed=1),
    )
    cache = torch.zeros(2, 4, heads * head_dim // 16, block_size, 16, dtype=torch.bfloat16).npu()
    slots = torch.tensor([5, 63, 16])
    torch_npu.npu_scatter_pa_kv_cache(
        keys.npu(), values.npu(), cache[0], cache[1], slots.int().npu(), cache_mode="PA_NZ"
    )
    rows = cache.cpu()[:, slots // block_size, :, slots % block_size]  # (T, 2, H * D / 16, 16)
    close(rows[:, 0].reshape(3, heads, head_dim), keys)
    close(rows[:, 1].reshape(3, heads, head_dim), values)


def check_qkv_rms_norm_rope_cache_equals_its_parts() -> None:
    tokens, q_heads, kv_heads, head_dim, block_size = 3, 2, 1, 128, 16
    dtype = torch.bfloat16
    qkv, gamma_q, gamma_k = (
        draw(tokens, 4 * head_dim, dtype=dtype),
        draw(head_dim, dtype=dtype, seed=1),
        draw(head_dim, dtype=dtype, seed=2),
    )
    cos, sin = draw(tokens, head_dim, dtype=dtype, seed=3), draw(tokens, head_dim, dtype=dtype, seed=4)
    slots = torch.tensor([3, 17, -1])
    q_out = torch.zeros(tokens, q_heads * head_dim, dtype=dtype).npu()
    caches = torch.zeros(2, 2, head_dim // 16, block_size, 16, dtype=dtype).npu()
    torch_npu.npu_qkv_rms_norm_rope_cache(
        qkv.npu(),
        gamma_q.npu(),
        gamma_k.npu(),
        cos.npu(),
        sin.npu(),
        slots.npu(),
        q_out,
        caches[0],
        caches[1],
        [1, tokens, q_heads + 2 * kv_heads, head_dim],
        [q_heads, kv_heads, kv_heads],
        epsilon=1e-6,
        cache_mode="PA_NZ",
    )
    q, k, v = qkv.view(tokens, 4, head_dim).float().split([q_heads, kv_heads, kv_heads], 1)

    def turned(x: Tensor, gamma: Tensor) -> Tensor:
        normed = torch.nn.functional.rms_norm(x, (head_dim,), gamma.float(), 1e-6)
        return rotated(normed, cos.float()[:, None], sin.float()[:, None]).to(dtype)

    close(q_out.view(tokens, q_heads, head_dim), turned(q, gamma_q))
    rows = caches.cpu()[:, slots[:2] // block_size, :, slots[:2] % block_size].reshape(2, 2, head_dim)
    close(rows[:, 0], turned(k, gamma_k)[:2, 0])
    close(rows[:, 1], v[:2, 0].to(dtype))
    assert int((caches.cpu() != 0).any(2).any(-1).sum()) == 4, "a token with slot -1 was stored"


def check_top_k_top_p() -> None:
    logits = draw(4, 50)
    p, k = torch.tensor([1.0, 0.5, 0.9, 0.1]), torch.tensor([5, 50, 3, 1], dtype=torch.int32)
    out = torch_npu.npu_top_k_top_p(logits.npu(), p.npu(), k.npu()).cpu()
    for row in range(4):
        kept = torch.isfinite(out[row])
        order = logits[row].argsort(descending=True)
        top = order[: int(k[row])]
        share = logits[row][top].softmax(0)
        nucleus = top[(share.cumsum(0) - share) < p[row]]
        assert set(kept.nonzero().flatten().tolist()) == set(nucleus.tolist()), row
        close(out[row][kept], logits[row][kept])
