"""The operands of a matmul, and the three functions that a kernel for it has. Knows no kernel.

M rows of x, K input features, N output features, G groups of 128 input features.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from npu_runner.platforms.quantised import Fp8Rows, Fp8Weight, Int8Rows, Int8Weight


class Matmul(NamedTuple):
    """y = x W^T + b, (M, N) of `dtype`.

    With `scale`, W is in int8 or FP8, and so is x: y = (x W^T) s_x s_w + b. x has one scale per row, (M,), and W one
    per output, (N,) or (1,). FP8 has them by block, too: x one per row and 128 inputs, (M, G) with stride 1 along M,
    and W one per 128 x 128 block, (N / 128, G), rounded up, contiguous. All scales are float32.
    """

    x_MK: Tensor
    weight: Any
    """Tensor (N, K), or a GroupedWeight as `grouped.lay_out` returns it."""
    bias_N: Tensor | None
    dtype: torch.dtype
    x_scale: Tensor | None = None
    scale: Tensor | None = None

    @classmethod
    def from_rounded(cls, x: Int8Rows | Fp8Rows, weight: Int8Weight | Fp8Weight, bias_N: Tensor | None) -> Matmul:
        return cls(x.values_TI, weight[0], bias_N, x.dtype, x[1], weight[1])

    @property
    def in_blocks(self) -> bool:
        return self.scale is not None and self.scale.dim() == 2

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """s_x and s_w."""
        assert self.x_scale is not None, "x in int8 and FP8 has scales"
        assert self.scale is not None, "a weight in int8 and FP8 has scales"
        return self.x_scale, self.scale

    def empty_output(self) -> Tensor:
        return torch.empty((len(self.x_MK), len(self.weight)), dtype=self.dtype, device=self.x_MK.device)


class MatmulKernel(Protocol):
    """A module with these functions. It is one row of a list in kernels.py."""

    def prepare(self, matmul: Matmul) -> None:
        """Compile, or start to compile, what the kernel needs for this weight, dtype and bias."""

    def accepts(self, matmul: Matmul) -> bool:
        """Whether the kernel multiplies these operands, and is the fastest on this GPU."""

    def multiply(self, matmul: Matmul) -> Tensor:
        """(M, N). Callers have asked `accepts`."""
