"""Decode graphs on the CPU: torch.compile with inductor, one callable per bucket. Knows nothing of models."""

from __future__ import annotations

import torch

from npu_runner.platforms.base import DecodeForward, GraphCompiler
from npu_runner.platforms.dynamo import own_code


class InductorCompiler(GraphCompiler):
    """`max-autotune` and `reduce-overhead` are torch.compile's own modes."""

    def __init__(self, mode: str):
        self.mode = mode

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        return torch.compile(own_code(forward), mode=self.mode, dynamic=False, fullgraph=True)
