"""The operators in plain torch, but where host memory has something faster. Knows nothing of models."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.torch_ops import TorchOps, experts_one_by_one


class CpuOps(TorchOps):
    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        run = in_graph_experts if torch.compiler.is_compiling() else experts_one_by_one
        return run(x_TD, weights_TK, experts_TK, gate_up, down)

    def sort_ascending(self, x: Tensor) -> Tensor:
        # numpy sorts a vocabulary a hundred times as fast as torch does.
        return torch.from_numpy(np.sort(x.numpy(), axis=-1))


@torch.library.custom_op("npu_runner::cpu_experts", mutates_args=())
def in_graph_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`CpuOps.experts` inside a graph, whose shapes are fixed: who chose which expert is seen while it runs."""
    return experts_one_by_one(x_TD, weights_TK, experts_TK, gate_up, down)


@in_graph_experts.register_fake
def _experts_shape(x_TD: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format)
