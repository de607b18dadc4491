"""A role of a platform: decode graphs, one for each batch size. Knows no vendor and no model.

torch._dynamo takes about as long to import as torch itself: nothing loads it before something is compiled with it.

B sequences of a step, W blocks per sequence.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from npu_runner.errors import Contract

DecodeForward = Callable[..., Tensor]
"""(inputs: StepInputs, plan=None) -> logits (B, vocab).

What is compiled is the bound method of an nn.Module that holds the model; compiled callables take no plan.
"""


Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""(run) -> replay: launches `run` over the same memory at once. `run` works on the device, waits for nothing, and is
called once or more while it is recorded."""


@dataclass(frozen=True, kw_only=True)
class GraphSettings:
    """The runner's settings for a graph compiler.

    `identity` holds everything of the runner that shapes a graph. `cache_dir` keeps compiled graphs from one run to the
    next; None keeps none. `has_foreign_modules`: the model has modules of another package, which a compiler may change
    or refuse; where it can be avoided they are captured as they run.
    """

    mode: str
    has_foreign_modules: bool = False
    identity: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: Path | None = None


class GraphCompiler(Contract, ABC):
    """Turns the decode forward into one callable per bucket; and what runs behind it over the same inputs, a forward
    like it, into another one. What is asked or said of a batch size is so of both."""

    _REPLACED: ClassVar = {"record": "recorder", "records": "recorder"}

    waits_for_replay: bool = False
    """The last replay may still read what `before_replay` writes, so the caller waits for it first."""
    context_lens_dtype: type[np.integer[Any]] = np.int32
    """The dtype of StepInputs.context_lens in graphs."""

    @abstractmethod
    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        """A callable for exactly this batch size and its static buffers, compiled or captured on its first call.

        That first call raises GraphResourceError if the device has no resources left for another graph. The caller
        treats out-of-memory errors alike.
        """

    def was_loaded(self, batch_size: int) -> bool:
        """Whether a graph of this batch size came from an earlier run: its answers are then to be compared."""
        return False

    def discard(self, batch_size: int) -> None:
        """Delete the kept graphs of this batch size, because their answers differ."""
        return None

    def before_replay(self, batch_size: int, context_lens_B: Sequence[int],
                      sequences_3S: np.ndarray | None = None) -> None:
        """Give the graphs of this batch size the lengths of the next step, padding included; most need none. Those that
        have `StepInputs.sequences` get them here, too.

        Called before the first run, too.
        """
        return None

    def recorder(self) -> Recorder | None:
        """A function that records other work than decode steps; None: nothing else is recorded."""
        return None

    def release(self) -> None:
        """Let go of every graph; none is called any more."""
        return None


class GraphResourceError(Exception):
    """The device cannot hold one more graph; what was captured stays usable."""


class GraphCaptureError(RuntimeError):
    """An operation cannot be captured. Nothing runs during a capture, so no rank waits for another."""


@contextmanager
def capture_errors() -> Iterator[None]:
    """Around a whole capture: raises GraphCaptureError with the text of the first error, and what ran out of memory."""
    try:
        yield
    except RuntimeError as error:
        # The end of a capture hides what ended it.
        first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        if isinstance(first, torch.OutOfMemoryError):
            raise first from None
        raise GraphCaptureError(str(first)) from error


class InductorCompiler(GraphCompiler):
    """`max-autotune` and `reduce-overhead` are torch.compile's own modes."""

    def __init__(self, mode: str):
        self.mode = mode

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        return torch.compile(own_code(forward), mode=self.mode, dynamic=False, fullgraph=True)


def own_code(forward: DecodeForward, name: str | None = None) -> DecodeForward:
    """The same function over a fresh code object, called `name` if one is given.

    dynamo counts recompilations per code object and falls back to eager after 8 without a word: every bucket gets its
    own. Code objects of different names also compare unequal, which look-ups need.
    """
    function = forward.__func__ if isinstance(forward, types.MethodType) else forward
    assert isinstance(function, types.FunctionType), f"{forward!r} is not a Python function"
    name = name or function.__name__
    code, defaults = function.__code__.replace(co_name=name), function.__defaults__
    fresh = types.FunctionType(code, function.__globals__, name, defaults, function.__closure__)
    return types.MethodType(fresh, forward.__self__) if isinstance(forward, types.MethodType) else fresh


def forget(code: types.CodeType) -> None:
    """Drop what was compiled from a code object: it and what guards it keep each other alive, out of gc's sight.

    torch._dynamo.reset would drop the graphs of every engine of this process.
    """
    from torch._dynamo.eval_frame import reset_code

    reset_code(code)
