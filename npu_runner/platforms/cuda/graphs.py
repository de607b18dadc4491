"""Decode graphs on CUDA: one captured graph per bucket, all in one memory pool. Knows nothing of models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_runner.platforms.base import DecodeForward, GraphCompiler
from npu_runner.platforms.dynamo import own_code


class CudaGraphCompiler(GraphCompiler):
    """`with_inductor`: compile the forward with inductor before it is captured (max-autotune)."""

    def __init__(self, *, with_inductor: bool):
        self._with_inductor = with_inductor
        self._pool: Any = None

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        if self._with_inductor:
            forward = torch.compile(own_code(forward), mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
        return _CapturedDecode(self, forward)

    def capture(self, forward: DecodeForward, inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Run once to warm kernels up, then record; graphs share memory, since only one runs at a time."""
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, pool=self._pool):
            output = forward(*inputs)
        self._pool = self._pool or graph.pool()
        return graph, output


class _CapturedDecode:
    """Captures on the first call, replays on the others; always over the same input tensors."""

    def __init__(self, compiler: CudaGraphCompiler, forward: DecodeForward):
        self._compiler = compiler
        self._forward = forward
        self._inputs: tuple[Tensor, ...] = ()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        if self._graph is None:
            self._graph, self._output = self._compiler.capture(self._forward, inputs)
            self._inputs = inputs
        addresses = [tensor.data_ptr() for tensor in inputs]
        assert addresses == [tensor.data_ptr() for tensor in self._inputs], "a graph replays over its own buffers only"
        self._graph.replay()
        assert self._output is not None, "captured graphs have an output"
        return self._output
