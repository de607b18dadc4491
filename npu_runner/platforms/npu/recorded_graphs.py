"""Decode graphs recorded around the eager step with torch.npu.graph, without a compiler. Knows nothing of models.

The other way to reduce-overhead (NPU_RUNNER_ASCEND_CAPTURE=recorded, docs/ascend.md): torch_npu notes each attention
call while it records, and runs it again with new lengths before a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.graphs import DecodeForward, GraphCompiler
from npu_runner.platforms.npu.attention import NpuAttention
from npu_runner.platforms.npu.graphs import ResourceErrors
from npu_runner.platforms.step_inputs import StepInputs


class RecordedGraphCompiler(GraphCompiler):
    """One recorded graph per bucket, all in one memory pool."""

    def __init__(self, attention: NpuAttention) -> None:
        self._attention = attention
        self._pool = torch.npu.graph_pool_handle()
        self._graphs: dict[int, _RecordedGraph] = {}

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        self._graphs[batch_size] = _RecordedGraph(forward, batch_size, self._pool, self._attention)
        return self._graphs[batch_size]

    def before_replay(self, batch_size: int, context_lens_B: Sequence[int],
                      block_tables_BW: Callable[[], np.ndarray]) -> None:
        self._graphs[batch_size].context_lens = list(context_lens_B)


class _RecordedGraph:
    """Records on the first call, replays on all; always over the same input tensors."""

    def __init__(self, forward: DecodeForward, batch_size: int, pool: Any, attention: NpuAttention):
        self._attention = attention
        self._calls: list[int | None] = []
        self.context_lens = [1] * batch_size
        self._forward = forward
        self._pool = pool
        self._graph: Any = None
        self._logits_BV: Tensor | None = None
        self._done = torch.npu.Event()

    def __call__(self, inputs: StepInputs) -> Tensor:
        if self._graph is None:
            self._record(inputs)
        # A rank that does not sample never waits for a step: its graph may still be reading the last one's lengths.
        self._done.synchronize()
        self._graph.update(cpu_update_input=self._new_lengths())
        self._graph.replay()
        self._done.record()
        assert self._logits_BV is not None, "a recorded graph has its output"
        return self._logits_BV

    def _new_lengths(self) -> list[dict[str, list[int]]]:
        """For each attention call of the graph; one entry where all take the same."""
        lengths = dict(zip(self._attention.windows, self._attention.lengths_by_window(self.context_lens), strict=True))
        calls = self._calls if len(lengths) > 1 else self._calls[:1]
        return [{"actual_seq_lengths_kv": lengths[window]} for window in calls]

    def _record(self, inputs: StepInputs) -> None:
        plan = self._attention.graph_plan(self._attention.lengths_by_window(self.context_lens), self._calls)
        with ResourceErrors():
            self._forward(inputs, plan)  # kernels are loaded and communicators made outside of the graph
            torch.npu.synchronize()
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph, pool=self._pool, auto_dispatch_capture=True):
                self._calls.clear()
                self._logits_BV = self._forward(inputs, plan)
            torch.npu.synchronize()
        self._graph = graph
