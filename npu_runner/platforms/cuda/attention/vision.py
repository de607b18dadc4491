"""The vision tower's attention on CUDA: all images of a call in one kernel. Knows no cache and no model.

On recent GPUs torch's scaled_dot_product_attention prefers cuDNN. That builds a plan for every new pair of image size
and number of images, while serving: 35 ms each on an H200. Nothing here depends on sizes.

T tokens, N heads, H head dim, B images.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from npu_runner.platforms.cuda.attention import vision_kernels
from npu_runner.platforms.cuda.attention.tiles import SPLIT_HEAD, SPLIT_TOWER, AttentionTile, head_width
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.transfers import upload

logger = logging.getLogger(__name__)

# Some whole steps and a rest, a whole step alone, less than one; and the most that rounding to 16 bits changes.
_CHECKED_LENGTHS, _TOLERANCE = (273, 64, 5), 2e-2


class VisionPlan:
    """Where the images of a call lie, for all layers.

    `starts_B1` int32 on the device, the end of the last behind it.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self.lengths = list(lengths)
        self._starts_B1 = np.zeros(len(self.lengths) + 1, dtype=np.int32)
        np.cumsum(self.lengths, out=self._starts_B1[1:])
        self.starts_B1 = upload(self._starts_B1, device)
        self.seen = sum(length**2 for length in self.lengths) / sum(self.lengths)
        """The average number of tokens that a token sees."""
        self._tiles: dict[int, Tensor] = {}

    def tiles(self, rows: int, device: torch.device) -> Tensor:
        """(tiles, 4) int32: first token of the image, first of the tile, tokens left from there, tokens of the image.

        Of `rows` tokens each, those of the largest images first; made once.
        """
        if rows not in self._tiles:
            lengths_B = np.asarray(self.lengths, dtype=np.int32)
            order = np.argsort(-lengths_B, kind="stable")
            images = np.repeat(order, -(-lengths_B[order] // rows))
            firsts = np.concatenate([np.arange(0, length, rows) for length in lengths_B[order]])
            begins, lengths = self._starts_B1[images], lengths_B[images]
            tiles = np.stack([begins, begins + firsts, lengths - firsts, lengths], axis=1)
            self._tiles[rows] = upload(tiles.astype(np.int32), device)
        return self._tiles[rows]


def image_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: VisionPlan, scale: float,
                    tile: AttentionTile, *, is_split: bool = False) -> Tensor:
    """Full attention within each image, (T, N, H); heads of one token lie together. `is_split`: see `SplitHeads`."""
    num_heads, head_dim = q_TNH.shape[1:]
    assert all(x.stride(2) == 1 and (num_heads == 1 or x.stride(1) == head_dim) for x in (q_TNH, k_TNH, v_TNH))
    longest = max(plan.lengths)
    assert longest * max(x.stride(0) for x in (q_TNH, k_TNH, v_TNH)) < 2**31, "places within an image fit into 32 bits"
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    kernel = vision_kernels.split_images if is_split else vision_kernels.images
    widths = dict(zip(("FIRST", "REST"), SPLIT_HEAD, strict=True)) if is_split else {"HEAD": head_width(head_dim)}
    kernel[(triton.cdiv(longest, tile.rows), num_heads, len(plan.lengths))](
        q_TNH, k_TNH, v_TNH, out_TNH, plan.starts_B1, q_TNH.stride(0), k_TNH.stride(0), v_TNH.stride(0),
        NUM_HEADS=num_heads, FACTOR=scale * math.log2(math.e), HEAD_DIM=head_dim, ROWS=tile.rows,
        COLUMNS=tile.columns, num_warps=tile.num_warps, num_stages=tile.num_stages, **widths,
    )
    return out_TNH


class SplitHeads:
    """Whether a call may split heads into two parts: each kernel is compared once with plain operators.

    `shared_bytes`: the shared memory that a program may have.
    """

    def __init__(self, shared_bytes: int) -> None:
        self._fits = SPLIT_TOWER.shared_bytes(sum(SPLIT_HEAD), itemsize=2) <= shared_bytes
        self._is_right: dict[tuple[object, ...], bool] = {}

    def accepts(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, scale: float) -> bool:
        """The first use of a kernel waits for the device; that is with the dummy images of the start."""
        first, rest = SPLIT_HEAD
        is_split = self._fits and first < q_TNH.shape[2] <= first + rest and q_TNH.dtype != torch.float32
        if not is_split or torch.compiler.is_compiling():
            return False
        # All that a compiled kernel depends on.
        kind = (q_TNH.shape[1:], q_TNH.dtype, scale, *(
            (x.stride(0), x.data_ptr() % 16 == 0) for x in (q_TNH, k_TNH, v_TNH)))
        if is_ahead():  # nothing is computed that could be compared
            self._compare(q_TNH, k_TNH, v_TNH, scale)
            return True
        if kind not in self._is_right:
            self._is_right[kind] = self._compare(q_TNH, k_TNH, v_TNH, scale)
            if not self._is_right[kind]:
                logger.warning("the attention kernel for %d dims in two parts is wrong as it was compiled here (triton "
                               "%s); the slower one is taken", q_TNH.shape[2], triton.__version__)
        return self._is_right[kind]

    def _compare(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, scale: float) -> bool:
        q_TNH, k_TNH, v_TNH = inputs = [_like(x, sum(_CHECKED_LENGTHS), seed)
                                        for seed, x in enumerate((q_TNH, k_TNH, v_TNH))]
        plan = VisionPlan(_CHECKED_LENGTHS, q_TNH.device)
        found_TNH = image_attention(q_TNH, k_TNH, v_TNH, plan, scale, SPLIT_TOWER, is_split=True).float()
        parts = zip(*(x.float().transpose(0, 1).split(_CHECKED_LENGTHS, dim=1) for x in inputs), strict=True)
        expected_TNH = torch.cat([(torch.softmax(q @ k.transpose(1, 2) * scale, -1) @ v).transpose(0, 1)
                                  for q, k, v in parts])
        # A comparison with NaN is false.
        return bool((found_TNH - expected_TNH).abs().max() <= _TOLERANCE * expected_TNH.abs().max())


def _like(x_TNH: Tensor, num_tokens: int, seed: int) -> Tensor:
    """Random rows with the strides and the alignment of `x_TNH`."""
    generator = torch.Generator().manual_seed(seed)
    shift = x_TNH.data_ptr() % 16 // x_TNH.itemsize
    flat = torch.randn(shift + num_tokens * x_TNH.stride(0), generator=generator).to(x_TNH.device, x_TNH.dtype)
    return flat.as_strided((num_tokens, *x_TNH.shape[1:]), x_TNH.stride(), shift)
