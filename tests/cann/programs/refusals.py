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


def check_sampling_refusals() -> None:
    logits = draw(2, 8).npu()
    with refused(161001):
        torch_npu.npu_top_k_top_p(logits, None, None)
    with refused(PARAMETER):
        torch_npu.npu_top_k_top_p(logits, torch.rand(3).npu(), None)
    with refused(PARAMETER):
        torch_npu.npu_top_k_top_p(logits, None, torch.tensor([3, 3]).npu())


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
        weight.index_copy_(0, torch.tensor([-1]).npu(), draw(1, 4).npu())


def check_an_operator_that_is_not_emulated_names_itself() -> None:
    """A boolean index takes the old route (NonZero) in this torch_npu; programs have integer indices and masked_select."""
    with refused(500002, "NonZero took the aclop route"):
        x = draw(3, 4).npu()
        x[x > 0]
