"""Gated DeltaNet on the CPU: as in plain torch, but an eager decode step works on the states where they lie.

Knows no model and no pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu_runner.platforms.torch_gated_delta import TorchGatedDelta


class CpuGatedDelta(TorchGatedDelta):
    def _decode(self, qkv_BC: Tensor, beta_BV: Tensor, g_BV: Tensor, state: Tensor, slots_B: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super()._decode(qkv_BC, beta_BV, g_BV, state, slots_B)
        # One row after the other, in place: a copy of all states leaves the processor's caches, and is three times as
        # slow at 64 rows.
        rows = zip(qkv_BC.split(1), beta_BV.split(1), g_BV.split(1), slots_B.tolist(), strict=True)
        return torch.cat([self._step(qkv, beta, g, state[slot : slot + 1]) for qkv, beta, g, slot in rows])
