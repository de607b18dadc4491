"""The vision tower's attention on CUDA: all pictures of a call in one kernel. Knows no cache and no model.

What torch's scaled_dot_product_attention takes first on recent GPUs, cuDNN, builds a plan for every new pair of picture
size and number of pictures: 35 ms each on an H200, in the midst of serving. Nothing here depends on sizes.

T tokens, N heads, H head dim, B pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from npu_runner.platforms.cuda import vision_kernels as kernels
from npu_runner.platforms.cuda.attention_tiles import Tile, split_head
from npu_runner.platforms.upload import upload


class VisionPlan(NamedTuple):
    """Tokens of each picture, and where they begin: `starts_B1` int32 on the device, the end of the last behind it."""

    lengths: list[int]
    starts_B1: Tensor


def plan_pictures(lengths: Sequence[int], device: torch.device) -> VisionPlan:
    starts_B1 = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts_B1[1:])
    return VisionPlan(list(lengths), upload(starts_B1, device))


def picture_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: VisionPlan, scale: float,
                      tile: Tile) -> Tensor:
    """Full attention within each picture, (T, N, H); heads of one token lie together."""
    num_heads, head_dim = q_TNH.shape[1:]
    assert all(x.stride()[1:] == (head_dim, 1) for x in (q_TNH, k_TNH, v_TNH)), "heads of one token lie together"
    longest = max(plan.lengths)
    assert longest * max(x.stride(0) for x in (q_TNH, k_TNH, v_TNH)) < 2**31, "places within a picture fit into 32 bits"
    head, rest = split_head(head_dim)
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    kernels.pictures[(triton.cdiv(longest, tile.rows), num_heads, len(plan.lengths))](
        q_TNH, k_TNH, v_TNH, out_TNH, plan.starts_B1, q_TNH.stride(0), k_TNH.stride(0), v_TNH.stride(0),
        NUM_HEADS=num_heads, FACTOR=scale * math.log2(math.e), HEAD_DIM=head_dim, HEAD=head, REST=rest,
        ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )
    return out_TNH
