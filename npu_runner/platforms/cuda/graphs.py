"""Decode graphs on CUDA: one captured graph per bucket, and what is recorded behind it, all in one memory pool.

Knows nothing of models.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from npu_runner.platforms.graphs import DecodeForward, GraphCompiler, Recorder, capture_errors, own_code
from npu_runner.platforms.step_inputs import StepInputs

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class CudaGraphCompiler(GraphCompiler):
    """`with_inductor`: compile the forward with inductor before it is captured (max-autotune)."""

    def __init__(self, *, with_inductor: bool):
        self._with_inductor = with_inductor
        self._pool: Any = None
        self._stream = torch.cuda.Stream()

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        if self._with_inductor:
            forward = torch.compile(own_code(forward), mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)
        return _CapturedDecode(self, forward)

    def recorder(self) -> Recorder:
        return lambda run: self.capture(run)[0].replay

    def capture(self, run: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        """Run once to warm kernels up, then record; graphs share memory, since only one runs at a time."""
        started = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        warmed = time.perf_counter()
        output = self._recorded(graph, run)
        self._pool = self._pool or graph.pool()
        logger.debug("a graph: %.3f s to warm up, %.3f s to capture", warmed - started, time.perf_counter() - warmed)
        return graph, output

    def _recorded(self, graph: torch.cuda.CUDAGraph, run: Callable[[], _Result]) -> _Result:
        """Not by torch.cuda.graph, which frees all pinned host memory each time. The first steps reuse what was pinned
        while memory was measured; pinning it again would delay them."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream), capture_errors():
            graph.capture_begin(pool=self._pool)
            try:
                return run()
            finally:
                graph.capture_end()


class _CapturedDecode:
    """Captures on the first call, replays on the others; always over the same input tensors."""

    def __init__(self, compiler: CudaGraphCompiler, forward: DecodeForward):
        self._compiler = compiler
        self._forward = forward
        self._inputs: StepInputs | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor | None = None

    def __call__(self, inputs: StepInputs) -> Tensor:
        if self._graph is None:
            self._graph, self._output = self._compiler.capture(lambda: self._forward(inputs))
            self._inputs = inputs
        assert self._inputs is not None, "captured graphs have inputs"
        assert self._output is not None, "captured graphs have an output"
        pairs = zip(StepInputs._fields, inputs.given(), self._inputs.given(), strict=False)
        moved = [name for name, new, captured in pairs if new.data_ptr() != captured.data_ptr()]
        assert not moved, f"a graph replays over its own buffers only; others came for {', '.join(moved)}"
        self._graph.replay()
        return self._output
