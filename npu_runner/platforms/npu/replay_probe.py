"""One captured decode step that a start on CANN 8.5 replays with other lengths, against the CPU. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_runner.platforms.graphs import DecodeForward, GraphCompiler, GraphResourceError
from npu_runner.platforms.npu.probes import BOUND, DecodeLayer, Side, difference, step_inputs
from npu_runner.platforms.platform import ModelNeeds
from npu_runner.platforms.step_inputs import StepInputs

# Contexts before each replay. The second row's shrinks: who keeps an old length reads too much, or too little.
_DONE_LENS = ((5, 200), (131, 7))


def why_no_replay(compiler: GraphCompiler, npu: Side, cpu: Side, needs: ModelNeeds) -> str | None:
    """What is wrong with captured graphs here, if anything is. `compiler` is made for the attention of `npu`."""
    layers = {side: DecodeLayer(side, needs) for side in (npu, cpu)}
    for layer in layers.values():
        layer.step((0, 0), (256, 256), seed=20)  # contexts of any length below
    graph, worst = _Replayed(compiler, layers[npu]), 0.0
    try:
        for number, done_lens in enumerate(_DONE_LENS):
            found = graph.step(done_lens, seed=21 + number)
            worst = max(worst, difference(found, layers[cpu].step(done_lens, (1, 1), seed=21 + number)))
    except (RuntimeError, GraphResourceError) as refusal:
        return f"a captured graph of two rows fails: {str(refusal).strip().partition(chr(10))[0]}"
    finally:
        compiler.release()
    if worst <= BOUND:
        return None
    return (f"a graph that is replayed with other context lengths differs from the CPU by {100 * worst:.1f} % of a "
            f"row's length, {100 * BOUND:.0f} % is allowed")


class _Replayed:
    """A layer's decode graph, over inputs that are written in place, as a runner's are."""

    def __init__(self, compiler: GraphCompiler, layer: DecodeLayer):
        self._compiler, self._layer = compiler, layer
        self._graph = compiler.compile(layer.forward, len(_DONE_LENS[0]))
        self._inputs: StepInputs | None = None

    def step(self, done_lens: Sequence[int], seed: int) -> Tensor:
        inputs, context_lens, _ = step_inputs(self._layer.side, self._layer.needs, done_lens, (1, 1), seed)
        if self._inputs is None:
            self._inputs = inputs
        else:
            for kept, new in zip(self._inputs, inputs, strict=True):
                kept.copy_(new)
        torch.npu.synchronize()
        self._compiler.before_replay(len(context_lens), context_lens)
        return self._graph(self._inputs).cpu()


class NoGraphs(GraphCompiler):
    """Every graph is refused for one reason, so that all steps of all ranks run eagerly."""

    def __init__(self, reason: str):
        self._reason = reason

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        return self._refuse

    def _refuse(self, *inputs: Tensor) -> Tensor:
        raise GraphResourceError(self._reason)
