"""Every constraint that is refused, with its code: a call that a device refuses must not pass here."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu
from torch import Tensor

from .attention_operators import BLOCK, mask
from .emulation import refused
from .fused_operators import draw

PARAMETER, TILING, KERNEL = 161002, 561002, 507035


def attention(dtype: torch.dtype = torch.float16, head_dim: int = 64, **changes: Any) -> Tensor:
    """A paged decode of two sequences that is right; `changes` make it wrong."""
    cache = torch.zeros(4, BLOCK, 2 * head_dim, dtype=dtype).npu()
    arguments: dict[str, Any] = dict(
        query=draw(2, 4, head_dim, dtype=dtype).npu(),
        key=cache,
        value=cache.clone(),
        atten_mask=mask(),
        block_table=torch.tensor([[1, 2], [3, 0]], dtype=torch.int32).npu(),
        input_layout="TND",
        block_size=BLOCK,
        actual_seq_lengths=[1, 2],
        actual_seq_lengths_kv=[5, 6],
        num_heads=4,
        num_key_value_heads=2,
        scale=0.125,
        sparse_mode=3,
    )
    arguments |= changes
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    return torch_npu.npu_fused_infer_attention_score(query, key, value, **arguments)[0].cpu()


def check_attention_accepts_what_it_should() -> None:
    assert attention().shape == (2, 4, 64)


def check_attention_refuses_types() -> None:
    with refused(PARAMETER, "float32"):
        attention(dtype=torch.float32)
    with refused(PARAMETER):
        attention(query=draw(2, 4, 64, dtype=torch.bfloat16).npu())
    with refused(PARAMETER, "blockTable"):
        attention(block_table=torch.tensor([[1, 2], [3, 0]]).npu())
    with refused(PARAMETER, "attenMask"):
        attention(atten_mask=mask().float())


def check_attention_refuses_lists() -> None:
    with refused(TILING, "actualSeqLengths"):
        attention(actual_seq_lengths=[1, 1])
    with refused(TILING, "running totals"):
        attention(actual_seq_lengths=[2, 1])
    with refused(TILING, "numbers"):
        attention(actual_seq_lengths_kv=[5])
    with refused(PARAMETER, "actualSeqLengthsKv"):
        attention(actual_seq_lengths_kv=None)
    with refused(TILING, "sparseMode 3"):
        attention(actual_seq_lengths_kv=[5, 0])


def check_attention_refuses_masks() -> None:
    with refused(TILING, "2048"):
        attention(atten_mask=None)
    with refused(TILING, "2048"):
        attention(atten_mask=torch.ones(6, 6, dtype=torch.bool).npu())
    with refused(TILING, "sparseMode 0"):
        attention(sparse_mode=0)
    with refused(TILING, "have no effect where queries are of length 1"):
        attention(sparse_mode=4, pre_tokens=3, next_tokens=0)
    rows: dict[str, Any] = dict(
        query=draw(4, 4, 64, dtype=torch.float16).npu(), actual_seq_lengths=[2, 4], sparse_mode=4
    )
    attention(**rows, pre_tokens=3, next_tokens=0)
    with refused(TILING, "nothing in common"):
        attention(**rows, pre_tokens=3, next_tokens=-4)
    with refused(TILING, "sparseMode 4 in TND"):
        attention(**rows, pre_tokens=-3, next_tokens=9)
    with refused(TILING, "2048"):
        attention(**rows, pre_tokens=3, next_tokens=0, atten_mask=None)
    with refused(KERNEL, "triangle"):
        attention(atten_mask=torch.zeros(2048, 2048, dtype=torch.bool).npu())


def check_attention_refuses_cache_shapes() -> None:
    with refused(TILING, "blockSize"):
        attention(block_size=100)
    with refused(TILING, "key cache"):
        attention(block_size=64)
    with refused(TILING, "blockTable"):
        attention(block_table=torch.tensor([[1, 2]], dtype=torch.int32).npu())
    with refused(TILING, "columns"):
        attention(actual_seq_lengths_kv=[5, 300])
    with refused(KERNEL, "blockTable"):
        attention(block_table=torch.tensor([[1, 2], [9, 0]], dtype=torch.int32).npu())


def check_attention_refuses_contexts_above_its_document() -> None:
    longest = 262_144
    table = torch.ones(2, longest // 128 + 1, dtype=torch.int32).npu()
    attention(block_table=table, actual_seq_lengths_kv=[5, longest])
    with refused(TILING, "one query reads 262145 keys, at most 262144"):
        attention(block_table=table, actual_seq_lengths_kv=[5, longest + 1])


def check_attention_refuses_heads() -> None:
    with refused(PARAMETER, "multiple"):
        attention(num_key_value_heads=3)
    with refused(PARAMETER, "numHeads"):
        attention(num_heads=8)
    with refused(TILING, "aligned"):
        attention(head_dim=72)
    with refused(TILING, "256"):
        attention(head_dim=272)
    with refused(PARAMETER, "innerPrecise"):
        attention(inner_precise=1)


def check_attention_refuses_strided_queries() -> None:
    with refused(PARAMETER, "contiguous"):
        attention(query=draw(2, 4, 128, dtype=torch.float16).npu()[..., :64])


def check_attention_of_towers_refuses_keys_and_values_with_gaps() -> None:
    """CANN makes no copy of them (vllm-ascend #13460, #17925): parts of a qkv GEMM are made contiguous before."""
    qkv = draw(6, 3, 2, 64, dtype=torch.float16).npu()
    dense = [part.contiguous() for part in qkv.unbind(1)]

    def call(*given: torch.Tensor) -> None:
        torch_npu.npu_fused_infer_attention_score(
            *given, input_layout="TND", actual_seq_lengths=[6], actual_seq_lengths_kv=[6], num_heads=2,
            num_key_value_heads=2, scale=0.125, sparse_mode=0)

    call(*dense)
    for place in range(3):
        given = [part if index != place else qkv[:, place] for index, part in enumerate(dense)]
        with refused(PARAMETER, "contiguous"):
            call(*given)


def scatter(**changes: Any) -> None:
    arguments: dict[str, Any] = dict(
        key=draw(2, 2, 32).npu(),
        value=draw(2, 2, 32).npu(),
        key_cache=torch.zeros(2, 16, 2, 32).npu(),
        value_cache=torch.zeros(2, 16, 2, 32).npu(),
        slot_mapping=torch.tensor([3, 4], dtype=torch.int32).npu(),
        cache_mode="Norm",
    )
    torch_npu.npu_scatter_pa_kv_cache(**(arguments | changes))
    torch.npu.synchronize()


def check_cache_write_refusals() -> None:
    scatter()
    with refused(PARAMETER, "contiguous"):
        scatter(value=draw(2, 4, 32).npu()[:, ::2])
    with refused(PARAMETER):
        scatter(slot_mapping=torch.tensor([3, 4, 5], dtype=torch.int32).npu())
    with refused(PARAMETER):
        scatter(slot_mapping=torch.tensor([3.0, 4.0]).npu())
    with refused(PARAMETER):
        scatter(key_cache=torch.zeros(2, 16, 64).npu())
    with refused(PARAMETER):
        scatter(key=draw(2, 2, 32, dtype=torch.float16).npu())
    with refused(KERNEL, "slotMapping"):
        scatter(slot_mapping=torch.tensor([3, 32], dtype=torch.int32).npu())
    with refused(KERNEL, "slotMapping"):
        scatter(slot_mapping=torch.tensor([3, -1], dtype=torch.int32).npu())
    rows, slots = draw(33, 2, 32).npu(), torch.arange(33, dtype=torch.int32).npu()
    with refused(TILING, "33 tokens, the cache has 32 slots"):
        scatter(key=rows, value=rows.clone(), slot_mapping=slots)


def check_rotary_refusals() -> None:
    def call(head_dim: int = 64, layout: str = "TND", mode: str = "half", heads_of_cos: int = 1) -> None:
        q, cos = draw(3, 4, head_dim).npu(), draw(3, heads_of_cos, head_dim).npu()
        torch_npu.npu_apply_rotary_pos_emb(q, q.clone(), cos, cos, layout=layout, rotary_mode=mode)

    call()
    with refused(PARAMETER, "head dim"):
        call(head_dim=96)
    with refused(PARAMETER, "rotaryMode"):
        call(mode="interleave")
    with refused(PARAMETER):
        call(layout="BSND")
    with refused(PARAMETER):
        call(heads_of_cos=4)
    with refused(PARAMETER, "head dim"):
        x = draw(1, 3, 2, 900).npu()
        torch_npu.npu_rotary_mul(x, x[:, :, :1], x[:, :, :1])


def check_rotary_mul_refusals() -> None:
    def call(x: Tensor, cos: Tensor, mode: str = "half") -> None:
        torch_npu.npu_rotary_mul(x.npu(), cos.npu(), cos.npu(), mode)

    x = draw(2, 3, 5, 32)
    call(x, draw(1, 1, 5, 32))
    call(x, draw(2, 3, 1, 32))
    with refused(PARAMETER, "layout"):
        call(x, draw(1, 1, 1, 32))
    with refused(PARAMETER, "layout"):
        call(x, draw(1, 3, 5, 32))
    with refused(PARAMETER, "layout"):
        call(x, draw(2, 1, 5, 32), "interleave")
    with refused(PARAMETER, "layout"):
        call(draw(40, 3, 30, 32), draw(1, 3, 1, 32), "interleave")
    with refused(PARAMETER, "head dim"):
        call(draw(1, 1, 5, 31), draw(1, 1, 5, 31))
    with refused(PARAMETER, "cos"):
        call(x, draw(1, 1, 5, 16))


def check_mrope_refusals() -> None:
    def call(**changes: Any) -> None:
        arguments: dict[str, Any] = dict(
            positions=torch.arange(3).repeat(3, 1).npu(),
            query=draw(3, 128).npu(),
            key=draw(3, 64).npu(),
            cos_sin_cache=draw(8, 64).npu(),
            head_size=64,
            mrope_section=[16, 8, 8],
        )
        torch_npu.npu_mrope(**(arguments | changes))

    call()
    with refused(PARAMETER, "mropeSection"):
        call(mrope_section=[16, 8, 4])
    with refused(PARAMETER, "rotaryDim"):
        call(cos_sin_cache=draw(8, 72).npu())
    with refused(PARAMETER, "headSize"):
        call(query=draw(3, 100).npu())
    with refused(PARAMETER, "cosSinCache"):
        call(cos_sin_cache=draw(8, 64).half().npu())
    with refused(KERNEL, "positions"):
        call(positions=torch.full((3, 3), 8).npu())


def qkv_cache(**changes: Any) -> None:
    half = torch.float16
    arguments: dict[str, Any] = dict(
        qkv=draw(2, 4 * 128, dtype=half).npu(),
        q_gamma=draw(128, dtype=half).npu(),
        k_gamma=draw(128, dtype=half).npu(),
        cos=draw(2, 128, dtype=half).npu(),
        sin=draw(2, 128, dtype=half).npu(),
        index=torch.tensor([3, -1]).npu(),
        q_out=torch.zeros(2, 256, dtype=half).npu(),
        k_cache=torch.zeros(2, 8, 16, 16, dtype=half).npu(),
        v_cache=torch.zeros(2, 8, 16, 16, dtype=half).npu(),
        qkv_size=[2, 1, 4, 128],
        head_nums=[2, 1, 1],
    )
    torch_npu.npu_qkv_rms_norm_rope_cache(**(arguments | changes))
    torch.npu.synchronize()


def check_qkv_cache_refusals() -> None:
    qkv_cache()
    with refused(PARAMETER, "headNums"):
        qkv_cache(head_nums=[2, 2, 1])
    with refused(PARAMETER, "head dim"):
        qkv_cache(qkv_size=[2, 1, 8, 64], head_nums=[4, 2, 2])
    with refused(PARAMETER, "qkv"):
        qkv_cache(qkv=draw(2, 3 * 128, dtype=torch.float16).npu())
    with refused(PARAMETER, "index"):
        qkv_cache(index=torch.tensor([3, 4, 5]).npu())
    with refused(PARAMETER, "cos"):
        qkv_cache(cos=draw(2, 64, dtype=torch.float16).npu())
    with refused(PARAMETER, "cache"):
        qkv_cache(k_cache=torch.zeros(2, 16, 1, 128, dtype=torch.float16).npu())
    with refused(KERNEL, "slotMapping"):
        qkv_cache(index=torch.tensor([3, 32]).npu())


def check_attention_refuses_layouts() -> None:
    q, k = draw(2, 5, 4, 64, dtype=torch.float16).npu(), draw(2, 7, 2, 64, dtype=torch.float16).npu()

    def call(**changes: Any) -> None:
        arguments: dict[str, Any] = dict(input_layout="BSND", num_heads=4, num_key_value_heads=2)
        torch_npu.npu_fused_infer_attention_score(q, k, k, **(arguments | changes))

    call()
    with refused(PARAMETER, "inputLayout"):
        call(input_layout="BNSD_BSND")
    with refused(PARAMETER, "numHeads"):
        call(input_layout="BNSD")
    with refused(TILING, "actualSeqLengths"):
        call(actual_seq_lengths=[5, 6])
    with refused(TILING, "actualSeqLengthsKv"):
        call(actual_seq_lengths_kv=[8])
    with refused(TILING, "attenMask"):
        call(atten_mask=torch.zeros(5, 7, dtype=torch.bool).npu())
    with refused(TILING, "attenMask"):
        call(atten_mask=torch.zeros(2, 1, 5, 6, dtype=torch.bool).npu())
    with refused(PARAMETER, "sparseMode"):
        call(sparse_mode=5)
    wide = draw(1, 4, 4, 320, dtype=torch.float16).npu()
    torch_npu.npu_fused_infer_attention_score(wide, wide, wide, input_layout="BSND", num_heads=4)
    with refused(TILING, "grouped heads"):
        few = wide[:, :, :2].contiguous()
        torch_npu.npu_fused_infer_attention_score(
            wide, few, few, input_layout="BSND", num_heads=4, num_key_value_heads=2
        )
    with refused(PARAMETER, "not emulated"):
        call(pse_shift=torch.zeros(2, 4, 5, 7, dtype=torch.float16).npu())


def check_norm_and_activation_refusals() -> None:
    x = draw(3, 8).npu()
    with refused(PARAMETER, "gamma"):
        torch_npu.npu_rms_norm(x, draw(4).npu())
    with refused(PARAMETER):
        torch_npu.npu_add_rms_norm(x, x.half(), draw(8).npu())
    with refused(PARAMETER, "odd"):
        torch_npu.npu_swiglu(draw(3, 7).npu())
    with refused(PARAMETER):
        torch_npu.npu_rms_norm(x.double(), draw(8).double().npu())
    with refused(PARAMETER, "gamma"):
        torch_npu.npu_rms_norm(x, draw(8).half().npu())
    with refused(PARAMETER, "gamma"):
        torch_npu.npu_add_rms_norm(x.half(), x.half(), draw(8).npu())
    with refused(PARAMETER, "gamma"):
        torch_npu.npu_rms_norm(x[0], draw(8).npu())
    with refused(PARAMETER, "x1 and x2"):
        torch_npu.npu_add_rms_norm(x, x[:2].contiguous(), draw(8).npu())
    with refused(PARAMETER, "x"):
        torch_npu.npu_swiglu(torch.ones(3, 8, dtype=torch.int32).npu())


def check_sampling_refusals() -> None:
    logits = draw(2, 8).npu()
    with refused(161001):
        torch_npu.npu_top_k_top_p(logits, None, None)
    with refused(PARAMETER):
        torch_npu.npu_top_k_top_p(logits, torch.rand(3).npu(), None)
    with refused(PARAMETER):
        torch_npu.npu_top_k_top_p(logits, None, torch.tensor([3, 3]).npu())
    with refused(PARAMETER):
        torch_npu.npu_top_k_top_p(logits, torch.rand(2).half().npu(), None)
    for k in (0, 9):
        with refused(KERNEL, "k holds"):
            torch_npu.npu_top_k_top_p(logits, None, torch.tensor([3, k], dtype=torch.int32).npu())
    with refused(KERNEL, "p holds"):
        torch_npu.npu_top_k_top_p(logits, torch.tensor([0.5, 1.5]).npu(), None)
    with refused(KERNEL, "probabilities"):
        torch.multinomial(torch.tensor([0.0, 0.0]).npu(), 1)


def check_products_refuse_types() -> None:
    with refused(PARAMETER):
        torch.mm(torch.ones(2, 2, dtype=torch.int32).npu(), torch.ones(2, 2, dtype=torch.int32).npu())


def check_indices_out_of_range_fault_in_the_kernel() -> None:
    weight = draw(5, 4).npu()
    with refused(KERNEL, "indices holds 7"):
        torch.nn.functional.embedding(torch.tensor([1, 7]).npu(), weight)
    with refused(KERNEL):
        weight.index_select(0, torch.tensor([5]).npu())
    with refused(KERNEL):
        weight.gather(1, torch.tensor([[4]]).npu())
    with refused(KERNEL):
        weight.index_fill_(0, torch.tensor([5]).npu(), 1.0)
    with refused(KERNEL):
        weight.scatter_(1, torch.tensor([[4]]).npu(), 1.0)
    with refused(KERNEL):
        torch.take(weight, torch.tensor([20]).npu())
    with refused(KERNEL):
        weight[torch.tensor([5]).npu()]
    with refused(KERNEL):
        weight.index_copy_(0, torch.tensor([-1]).npu(), draw(1, 4).npu())


def check_an_operator_that_is_not_emulated_names_itself() -> None:
    """A boolean index takes the old route (NonZero) in this torch_npu; programs have integers and masked_select."""
    with refused(500002, "NonZero took the aclop route"):
        x = draw(3, 4).npu()
        x[x > 0]
