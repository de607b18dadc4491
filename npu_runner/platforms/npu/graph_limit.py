"""No more decode graphs than a device can hold with collectives inside, or none. Knows not how graphs are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from npu_runner.platforms.graphs import DecodeForward, GraphCompiler, GraphResourceError, Recorder


class LimitedGraphCompiler(GraphCompiler):
    """Another compiler's graphs, the first `most_graphs` of them; for any more the device "has no resources left"."""

    def __init__(self, compiler: GraphCompiler, most_graphs: int):
        self._compiler = compiler
        self.context_lens_dtype = compiler.context_lens_dtype
        self.waits_for_replay = compiler.waits_for_replay
        self._most_graphs = most_graphs
        self._made: set[tuple[int, object]] = set()

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        made = batch_size, getattr(forward, "__func__", forward)
        if made not in self._made and len(self._made) == self._most_graphs:
            return self._refuse
        self._made.add(made)
        return self._compiler.compile(forward, batch_size)

    def _refuse(self, *inputs: Tensor) -> Tensor:
        raise GraphResourceError(f"HCCL on the AI CPU serves {self._most_graphs} graphs of a device at most; unset "
                                 "HCCL_OP_EXPANSION_MODE or give fewer graph_batch_sizes")

    def was_loaded(self, batch_size: int) -> bool:
        return self._compiler.was_loaded(batch_size)

    def discard(self, batch_size: int) -> None:
        self._compiler.discard(batch_size)

    def before_replay(self, batch_size: int, context_lens_B: Sequence[int],
                      sequences_3S: np.ndarray | None = None) -> None:
        self._compiler.before_replay(batch_size, context_lens_B, sequences_3S)

    def recorder(self) -> Recorder | None:
        return self._compiler.recorder()

    def release(self) -> None:
        self._compiler.release()
