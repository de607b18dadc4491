"""What CANN 8.5 refuses and 9.0 takes: runs with CANN_EMU_CANN_VERSION=8.5.0."""

from __future__ import annotations

import torch
import torch_npu

from .emulation import refused
from .fused_operators import draw
from .refusals import PARAMETER, TILING, attention


def check_paged_attention_in_tnd_is_for_bfloat16_and_128() -> None:
    assert attention(dtype=torch.bfloat16, head_dim=128).shape == (2, 4, 128)
    with refused(TILING, "float16", "CANN 9.0"):
        attention(dtype=torch.float16, head_dim=128)
    with refused(TILING, "head dim 64", "CANN 9.0"):
        attention(dtype=torch.bfloat16, head_dim=64)


def check_fused_rotary_takes_no_tnd() -> None:
    q, cos = draw(3, 4, 64).npu(), draw(3, 1, 64).npu()
    with refused(PARAMETER, "TND", "CANN 9.0"):
        torch_npu.npu_apply_rotary_pos_emb(q, q.clone(), cos, cos, layout="TND")
    q, cos = draw(1, 3, 4, 64).npu(), draw(1, 3, 1, 64).npu()
    torch_npu.npu_apply_rotary_pos_emb(q, q.clone(), cos, cos, layout="BSND")
