"""Decode graphs on Ascend: captured graphs (aclgraph) and graphs of the graph engine (GE). Knows nothing of models.

Context lengths change every step, and the attention kernel wants them on the host (see attention.py):
- aclgraph: they are symbolic integers of one trace. torchair captures one graph with them and gives the attention of
  every layer its new lengths at each replay, without recompiling or recapturing. Each sliding window has its own.
- recorded (NPU_RUNNER_ASCEND_CAPTURE=recorded): torch.npu.graph around the eager step, without a compiler. torch_npu
  notes each attention call while it records, and runs it again with new lengths before a replay.
- GE: they are a tensor on the device, an input like the others.
docs/ascend.md says what else was weighed.

B sequences of the step, W blocks per sequence.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from npu_runner.platforms.graphs import (
    DecodeForward,
    GraphCaptureError,
    GraphCompiler,
    GraphResourceError,
    capture_errors,
    forget,
    own_code,
)
from npu_runner.platforms.npu import torchair
from npu_runner.platforms.npu.attention import DeviceLengths, NpuAttention
from npu_runner.platforms.npu.preflight.errors import NEWER_DRIVER
from npu_runner.platforms.npu.settings import npu_settings
from npu_runner.platforms.npu.versions import cann_version, release
from npu_runner.platforms.step_inputs import StepInputs

logger = logging.getLogger(__name__)

# The trace takes 0 and 1 for constants: shorter contexts than this would be traced again. A decoding sequence has a
# prompt and a new token, so only padding is shorter, and the null block holds more than it reads.
_LEAST_TRACED = 2
_graph_numbers = itertools.count()
_TILES_ON_DEVICE_FROM = (9, 0)
# Stream exhaustion, resource allocation failure, and what an old driver says when its queues run out.
_RESOURCE_WORDS = ("207005", "207008", "sq cq")


class AclGraphCompiler(GraphCompiler):
    """One captured graph per bucket, all in one memory pool."""

    def __init__(self, attention: NpuAttention) -> None:
        self._attention = attention
        self._pool = torch.npu.graph_pool_handle()
        self._graphs: dict[int, list[_AclGraph]] = {}
        self.waits_for_replay = npu_settings().replay == "waiting"

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        graph = _AclGraph(forward, batch_size, self._backend(), self._attention)
        self._graphs.setdefault(batch_size, []).append(graph)
        return graph

    def before_replay(self, batch_size: int, context_lens_B: Sequence[int],
                      sequences_3S: np.ndarray | None = None) -> None:
        for graph in self._graphs[batch_size]:
            graph.set_context_lens(context_lens_B, sequences_3S)

    def release(self) -> None:
        for graph in itertools.chain(*self._graphs.values()):
            forget(graph.code)
        self._graphs.clear()

    def _backend(self) -> Callable[..., Any]:
        if torchair.has_npugraph_ex():
            torchair.load("npugraph_ex")
            # Inputs are the bucket's own buffers, weights stay where they are, and the cache is written in place.
            options = {"use_graph_pool": self._pool, "reuse_graph_pool_in_same_fx": False, "clone_input": False,
                       "frozen_parameter": True}
            backend: Any = torch._dynamo.lookup_backend("npugraph_ex")
            return lambda graph, inputs: backend(graph, inputs, options=options)
        module = torchair.load("torchair")
        config = module.CompilerConfig()
        config.mode = "reduce-overhead"
        config.debug.aclgraph.clone_input = False
        config.experimental_config.frozen_parameter = True
        config.aclgraph_config.use_custom_pool = self._pool
        return module.get_npu_backend(compiler_config=config)


class _AclGraph:
    """Captures on the first call, replays on the others; always over the same input tensors."""

    def __init__(self, forward: DecodeForward, batch_size: int, backend: Callable[..., Any], attention: NpuAttention):
        self._attention = attention
        self._batch_size = batch_size
        self._forward = forward
        self._context_lens = [_LEAST_TRACED] * batch_size
        self._sequences_3S: np.ndarray | None = None

        # dynamo takes every integer for a constant until it sees it change. What only reads the lengths shows it the
        # first ones, without a trace of the model; in the trace behind it they are symbols.
        def decode(inputs: StepInputs, lengths: list[list[int]], only_reads: bool) -> Tensor | int:
            if only_reads:
                return sum([length for of_window in lengths for length in of_window])
            return forward(inputs, attention.graph_plan(lengths))

        self._backend = _Counted(backend, batch_size)
        # Dynamo remembers changed values by the code's name, also for the next engine of this process.
        name = f"decode_{batch_size}_of_graph_{next(_graph_numbers)}"
        traced = own_code(decode, name)
        self.code = traced.__code__
        self._decode = torch.compile(traced, fullgraph=True, backend=self._backend)
        self._is_captured = False

    def set_context_lens(self, context_lens_B: Sequence[int], sequences_3S: np.ndarray | None) -> None:
        assert len(context_lens_B) == self._batch_size, "padding has lengths, too"
        self._context_lens = [max(_LEAST_TRACED, length) for length in context_lens_B]
        if sequences_3S is not None:
            self._sequences_3S = np.maximum(sequences_3S, [[0], [0], [_LEAST_TRACED]])

    def __call__(self, inputs: StepInputs) -> Tensor:
        if not self._is_captured:
            self._capture(inputs)
        return self._decode(inputs, self._lengths(inputs), False)

    def _lengths(self, inputs: StepInputs) -> list[list[int]]:
        is_grouped = inputs.sequences is not None
        return self._attention.lengths_by_window(self._context_lens, self._sequences_3S if is_grouped else None)

    def _traced_lengths(self, inputs: StepInputs, length: int) -> list[list[int]]:
        """With another `length` all lengths and totals are other ones but the last total, a constant of the graph."""
        sequences_3S, num_rows = None, self._batch_size
        if inputs.sequences is not None:
            totals_S = np.arange(inputs.sequences.shape[1]) + length
            totals_S[-1] = num_rows + len(totals_S)
            sequences_3S = np.stack([totals_S, totals_S, np.full_like(totals_S, num_rows + length)])
        return self._attention.lengths_by_window([length] * num_rows, sequences_3S)

    def _capture(self, inputs: StepInputs) -> None:
        num_rows = self._batch_size
        # torchair compares where an input's storage begins with where its values do, and copies those for which the two
        # differ onto themselves at each replay: all but the first of a bucket's, which share one storage.
        for tensor in inputs.given():
            torch._dynamo.mark_static_address(tensor)
        # Lengths that happen to be equal while they are traced must not become one symbol.
        with ResourceErrors(), torch.fx.experimental._config.patch(use_duck_shape=False), _in_place_operators():
            # Kernels of these shapes are loaded, and communicators made, outside of the capture.
            lengths = self._traced_lengths(inputs, _LEAST_TRACED)
            self._backend.num_symbols = sum(map(len, lengths)) - (inputs.sequences is not None)
            self._forward(inputs, self._attention.graph_plan(lengths))
            torch.npu.synchronize()
            for length, only_reads in ((_LEAST_TRACED, True), (_LEAST_TRACED + 1, False)):
                self._decode(inputs, self._traced_lengths(inputs, length), only_reads)
            torch.npu.synchronize()
        assert self._backend.num_compiled == 1, f"{self._backend.num_compiled} graphs for {num_rows} sequences"
        self._is_captured = True


@contextlib.contextmanager
def _in_place_operators() -> Iterator[None]:
    """Lets operators return their inputs though their schemas do not say so.

    npu_apply_rotary_pos_emb and the attention that writes into a given tensor do. torch looks for such operators at the
    first call of a compiled function. It warns of them, and refuses them if CI is set. It matters to a graph that reads
    the old values afterwards; this one does not.
    """
    settings = torch._functorch.config
    if not hasattr(settings, "error_on_custom_op_aliasing"):  # older than torch 2.11
        yield
        return
    with settings.patch(error_on_custom_op_aliasing=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*The output of this custom operator")
        yield


class GraphEngineCompiler(GraphCompiler):
    """One GE graph of static shape per bucket."""

    context_lens_dtype = np.int64

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        backend = torchair.load("torchair").get_npu_backend(compiler_config=graph_engine_config())
        module = GraphEngineDecode(forward, batch_size)
        decode = torch.compile(own_code(module.decode, module.name), dynamic=False, fullgraph=True,
                               backend=_Counted(backend, batch_size))
        return _FirstCall(decode)


class GraphEngineDecode(torch.nn.Module):
    """The decode step, or what runs behind it, as GE takes it: flat tensors, lengths among them. `name`: of its
    graph."""

    def __init__(self, forward: DecodeForward, batch_size: int):
        super().__init__()
        self.step = forward.__self__  # type: ignore[attr-defined]
        self.name = f"{type(self.step).__name__}_{batch_size}"
        totals_B = torch.arange(1, batch_size + 1, dtype=torch.int64)
        self.register_buffer("query_totals_B", totals_B.npu(), persistent=False)

    def decode(self, *tensors: Tensor) -> Tensor:
        """The forward over the tensors of a StepInputs, with lengths in int64 as attention needs them."""
        inputs = StepInputs(*tensors)
        if inputs.sequences is None:
            return self.step(inputs, DeviceLengths(self.query_totals_B, inputs.context_lens))
        _, totals_S, lens_S = inputs.sequences
        return self.step(inputs, DeviceLengths(totals_S, lens_S, len(totals_S)))


def graph_engine_config() -> Any:
    """torchair's settings for GE."""
    config = torchair.load("torchair").CompilerConfig()
    config.mode = "max-autotune"
    config.experimental_config.frozen_parameter = True
    if _tiles_on_device():
        # Attention's tiling depends on lengths, which are on the device: computed there, the host need not fetch them
        # before each layer. The order of operators is then fixed, too.
        config.experimental_config.tiling_schedule_optimize = True
        config.experimental_config.topology_sorting_strategy = "StableRDFS"
    return config


def _tiles_on_device() -> bool:
    """Follow the setting; auto means the device if this CANN has the attention kernel's tiling for it."""
    wanted = npu_settings().ge_tiling
    return wanted == "device" or (wanted == "auto" and release(cann_version() or "") >= _TILES_ON_DEVICE_FROM)


class _FirstCall:
    """Turns what the first call, which compiles, says about resources into GraphResourceError."""

    def __init__(self, decode: DecodeForward):
        self._decode = decode
        self._is_compiled = False

    def __call__(self, inputs: StepInputs) -> Tensor:
        if self._is_compiled:
            return self._decode(*inputs.given())
        with ResourceErrors():
            output = self._decode(*inputs.given())
            torch.npu.synchronize()
        self._is_compiled = True
        return output


class _Counted:
    """A backend that says so when a bucket is compiled more than once: that costs seconds while serving.

    `num_symbols`: how many integers of a graph are symbolic, at least.
    """

    def __init__(self, backend: Callable[..., Any], batch_size: int):
        self.num_compiled = self.num_symbols = 0
        self._backend = backend
        self._batch_size = batch_size

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        found = sum(isinstance(value, torch.SymInt) for value in inputs)
        assert found >= self.num_symbols, f"{found} of {self.num_symbols} context lengths are symbols"
        self.num_compiled += 1
        if self.num_compiled > 1:
            logger.warning("the decode graph of batch size %d is compiled again (%d times now); TORCH_LOGS=recompiles "
                           "says why", self._batch_size, self.num_compiled)
        return self._backend(graph, inputs)


class ResourceErrors:
    """A failure for want of device resources becomes GraphResourceError; every other one passes."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            text = str(error)
            if any(word in text.lower() for word in _RESOURCE_WORDS):
                old_driver = f"; {NEWER_DRIVER}" if "sq cq" in text.lower() else ""
                raise GraphResourceError(text.strip().partition("\n")[0] + old_driver) from error


@contextlib.contextmanager
def _capture(graph: Any, pool: Any) -> Iterator[None]:
    """torch.npu.graph; it alone would leave its stream and its dispatch mode on where a capture cannot begin or end."""
    mode = graph.graph_dispatch_mode
    with torch.npu.stream(torch.npu.current_stream()):
        try:
            with capture_errors(), torch.npu.graph(graph, pool=pool, auto_dispatch_capture=True):
                yield
        except GraphCaptureError:
            if _get_current_dispatch_mode() is mode:
                mode.__exit__(None, None, None)
            raise


class RecordedGraphCompiler(GraphCompiler):
    """One recorded graph per bucket, all in one memory pool."""

    def __init__(self, attention: NpuAttention) -> None:
        self._attention = attention
        self._pool = torch.npu.graph_pool_handle()
        self._graphs: dict[int, list[_RecordedGraph]] = {}

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        graph = _RecordedGraph(forward, batch_size, self._pool, self._attention)
        self._graphs.setdefault(batch_size, []).append(graph)
        return graph

    def before_replay(self, batch_size: int, context_lens_B: Sequence[int],
                      sequences_3S: np.ndarray | None = None) -> None:
        for graph in self._graphs[batch_size]:
            graph.context_lens, graph.sequences_3S = list(context_lens_B), sequences_3S


class _RecordedGraph:
    """Records on the first call, replays on all; always over the same input tensors."""

    def __init__(self, forward: DecodeForward, batch_size: int, pool: Any, attention: NpuAttention):
        self._attention = attention
        self._calls: list[int | None] = []
        self.context_lens = [1] * batch_size
        self.sequences_3S: np.ndarray | None = None
        self._is_grouped = False
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
        lengths = dict(zip([*self._attention.windows, "totals"], self._lengths(), strict=False))
        calls = self._calls if len(self._attention.windows) > 1 else self._calls[:1]
        totals = {"actual_seq_lengths": lengths["totals"]} if self._is_grouped else {}
        return [{"actual_seq_lengths_kv": lengths[window], **(totals if window is None else {})} for window in calls]

    def _lengths(self) -> list[list[int]]:
        return self._attention.lengths_by_window(self.context_lens, self.sequences_3S if self._is_grouped else None)

    def _record(self, inputs: StepInputs) -> None:
        self._is_grouped = inputs.sequences is not None
        plan = self._attention.graph_plan(self._lengths(), self._calls)
        with ResourceErrors():
            self._forward(inputs, plan)  # kernels are loaded and communicators made outside of the graph
            torch.npu.synchronize()
            graph = torch.npu.NPUGraph()
            with _capture(graph, self._pool):
                self._calls.clear()
                self._logits_BV = self._forward(inputs, plan)
            torch.npu.synchronize()
        self._graph = graph
