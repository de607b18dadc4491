"""What the operators of experts and of the gated delta rule refuse, with CANN's codes. Runs as CANN 9.0.0."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from .emulation import refused
from .expert_operators import routed, sort_tokens
from .fused_operators import draw
from .gated_delta_operators import BF16, BLOCKS, K_DIM, V_DIM, V_HEADS, inputs, step
from .quantised_operators import integers
from .refusals import KERNEL, PARAMETER, TILING


def check_gating_refuses() -> None:
    with refused(TILING, "k is 1025"):
        torch_npu.npu_moe_gating_top_k_softmax_v2(draw(2, 2048).npu(), k=1025, renorm=0)


def check_init_routing_refuses() -> None:
    x, experts = draw(5, 16), routed()
    with refused(PARAMETER, "expertIdx"):
        sort_tokens(x, experts.long(), 8)
    with refused(TILING, "activeNum"):
        sort_tokens(x, experts, 8, active_num=5)
    with refused(TILING, "expertTokensNumType"):
        sort_tokens(x, experts, 8, expert_tokens_num_flag=False)
    with refused(TILING, "activeExpertRange"):
        sort_tokens(x, experts, 8, active_expert_range=[4, 9])
    with refused(KERNEL, "expertIdx holds"):
        sort_tokens(x, experts, 4, active_expert_range=[0, 4])


def check_grouped_matmul_refuses() -> None:
    x, weight, counts = draw(4, 8).npu(), draw(3, 8, 8, seed=1).npu(), torch.tensor([1, 2, 1])

    def product(**changes: object) -> None:
        arguments: dict[str, object] = dict(split_item=2, group_type=0, group_list=counts.npu(), group_list_type=1)
        torch_npu.npu_grouped_matmul([x], [weight], **(arguments | changes))

    product()
    with refused(TILING, "groupType -1"):
        product(group_type=-1)
    with refused(TILING, "actType"):
        product(act_type=5)
    with refused(PARAMETER, "groupList"):
        product(group_list=counts.int().npu())
    with refused(TILING, "groupList"):
        product(group_list=torch.tensor([1, 3]).npu())
    with refused(KERNEL, "groupList leads to row 5"):
        product(group_list=torch.tensor([1, 3, 1]).npu())
    with refused(PARAMETER, "x and weight"):
        torch_npu.npu_grouped_matmul([x.half()], [weight], split_item=2, group_type=0, group_list=counts.npu(),
                                     group_list_type=1)
    with refused(TILING, "length 1"):
        torch_npu.npu_grouped_matmul([x], [weight[:1]], split_item=2, group_type=0, group_list_type=1,
                                     group_list=torch.tensor([4]).npu())
    with refused(TILING, "1025 groups"):
        torch_npu.npu_grouped_matmul([x], [torch.zeros(1025, 8, 8).npu()], split_item=2, group_type=0,
                                     group_list_type=1, group_list=torch.zeros(1025, dtype=torch.long).npu())
    with refused(TILING, "below 65536"):
        torch_npu.npu_grouped_matmul([x], [torch.zeros(3, 8, 65536).npu()], split_item=2, group_type=0,
                                     group_list_type=1, group_list=counts.npu())


def check_products_of_int8_refuse() -> None:
    x, weight, counts = integers(4, 8).npu(), integers(3, 8, 64, seed=1).npu(), torch.tensor([1, 2, 1]).npu()
    scale, rows = draw(3, 64).bfloat16().npu(), draw(4, seed=1).npu()

    def product(**changes: object) -> Tensor:
        arguments: dict[str, object] = dict(scale=[scale], per_token_scale=[rows], output_dtype=torch.bfloat16)
        (out,) = torch_npu.npu_grouped_matmul([x], [weight], split_item=2, group_type=0, group_list=counts,
                                              group_list_type=1, **(arguments | changes))
        return out

    product()
    with refused(PARAMETER, "scale"):
        product(scale=[scale.float()])
    with refused(PARAMETER, "scale"):
        product(output_dtype=torch.float16)
    with refused(PARAMETER, "perTokenScale"):
        product(per_token_scale=[rows.bfloat16()])
    with refused(PARAMETER, "wants scale and perTokenScale"):
        product(per_token_scale=None)
    with refused(PARAMETER, "with an int32 output"):
        product(output_dtype=torch.int32)
    with refused(TILING, "perTokenScale"):
        product(per_token_scale=[rows[:3].contiguous()])
    with refused(TILING, "quantMode"):
        sort_tokens(draw(5, 16), routed(), 8, quant_mode=0)


def check_dequant_swiglu_quant_refuses() -> None:
    sums, counts, rows = torch.zeros(4, 128, dtype=torch.int32).npu(), torch.tensor([1, 2, 1]).npu(), draw(4).npu()
    scale = draw(3, 128).npu()

    def product(x: Tensor = sums, by: Tensor | None = scale, **changes: object) -> None:
        arguments: dict[str, object] = dict(activation_scale=rows, group_index=counts, activate_left=True, quant_mode=1)
        torch_npu.npu_dequant_swiglu_quant(x, weight_scale=by, **(arguments | changes))

    product()
    product(activation_scale=rows[:, None])  # the shape of op-plugin's document
    for width in (48, 7296):
        with refused(PARAMETER, "multiple of 64, at most 7232"):
            product(torch.zeros(4, width, dtype=torch.int32).npu(), draw(3, width).npu())
    with refused(PARAMETER, "weightScale"):
        product(by=scale.bfloat16())
    with refused(PARAMETER, "weightScale"):
        product(by=None)
    with refused(PARAMETER, "groupIndex"):
        product(group_index=None)
    with refused(PARAMETER, "activationScale"):
        product(activation_scale=rows[:3].contiguous())
    with refused(PARAMETER, "static"):
        product(quant_mode=0)
    with refused(KERNEL, "groupIndex leads to row 5"):
        product(group_index=torch.tensor([1, 3, 1]).npu())


def check_unpermute_refuses() -> None:
    expanded, places, weights = draw(6, 8).npu(), torch.arange(6, dtype=torch.int32), draw(2, 3).npu()
    with refused(PARAMETER, "sortedIndices"):
        torch_npu.npu_moe_token_unpermute(expanded, places.long().npu(), probs=weights)
    with refused(KERNEL, "sortedIndices holds -1"):
        torch_npu.npu_moe_token_unpermute(expanded, (places - 1).npu(), probs=weights)
    with refused(TILING, "at most 512"):
        torch_npu.npu_moe_token_unpermute(draw(513, 8).npu(), torch.arange(513, dtype=torch.int32).npu(),
                                          probs=draw(1, 513).npu())


def check_finalize_routing_refuses() -> None:
    expanded, places, weights = draw(6, 8).npu(), torch.arange(6, dtype=torch.int32).npu(), draw(2, 3).npu()
    with refused(PARAMETER, "expandedX and scales"):
        torch_npu.npu_moe_finalize_routing(expanded, None, None, None, weights.half(), places, None)
    with refused(TILING, "x2 without x1"):
        torch_npu.npu_moe_finalize_routing(expanded, None, draw(2, 8).npu(), None, weights, places, None)
    with refused(TILING, "dropPadMode 3"):
        torch_npu.npu_moe_finalize_routing(expanded, None, None, None, weights, places, None, drop_pad_mode=3)


def check_the_recurrent_rule_refuses() -> None:
    x, state = inputs(3), torch.zeros(BLOCKS, V_HEADS, V_DIM, K_DIM, dtype=BF16).npu()
    step(x, state, [1, 1, 1], [0, 1, 2])
    with refused(PARAMETER, "CANN 9.2"):
        step(x, state.float(), [1, 1, 1], [0, 1, 2])
    with refused(PARAMETER, "contiguous"):
        step(x, torch.zeros(BLOCKS, 2, V_HEADS, V_DIM, K_DIM, dtype=BF16).npu()[:, 0], [1, 1, 1], [0, 1, 2])
    with refused(PARAMETER, "query"):
        step(x | {"query": x["query"].half()}, state, [1, 1, 1], [0, 1, 2])
    with refused(PARAMETER, "value heads"):
        step(x | {"value": x["value"][:, :3]}, state, [1, 1, 1], [0, 1, 2])
    with refused(PARAMETER, "g"):
        step(x | {"g": x["g"].bfloat16()}, state, [1, 1, 1], [0, 1, 2])
    with refused(TILING, "at least one a token"):
        step(x, state[:2], [1, 1, 1], [0, 1, 1])
    with refused(KERNEL, "ssmStateIndices holds 9"):
        step(x, state, [1, 1, 1], [0, 1, 9])
    with refused(KERNEL, "add up to 2"):
        step(x, state, [1, 1, 0], [0, 1, 2])
    with refused(KERNEL, "outside [0, 8]"):
        step(inputs(9), state, [9], list(range(9)))
