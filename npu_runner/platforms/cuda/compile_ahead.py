"""Compiles the Triton kernels that a start needs in parallel, before its steps need them one by one.

The steps run once without launching a kernel of this folder. Each variant that they would have launched is compiled and
loaded in a thread. Most of that runs outside the GIL (LLVM, ptxas, the launcher's C compiler). No signature is guessed.
Knows nothing of models.
"""
# mypy: disable-error-code="method-assign"

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

logger = logging.getLogger(__name__)

_OWN = __name__.rpartition(".")[0] + "."
_MAX_THREADS = 16
_EMPTY = (torch.empty, torch.empty_like, Tensor.new_empty)
_launch = JITFunction.run
# Triton's one way to launch is put aside for a moment: two engines that start at once do that one after the other.
_one_at_a_time = threading.Lock()
_loading = threading.Lock()
_thread = threading.local()


class CompileOnce:
    """Compiles the variants of a kernel when they are first needed, so that nothing is compiled while serving."""

    def __init__(self) -> None:
        self._compiled: set[tuple[Hashable, ...]] = set()

    def __call__(self, key: tuple[Hashable, ...], run: Callable[[], object]) -> None:
        """Call `run`, which launches all variants of `key`, the first time. Inductor compiles kernels by itself."""
        if torch.compiler.is_compiling() or key in self._compiled:
            return
        self._compiled.add(key)
        run()


def is_ahead() -> bool:
    """Whether this thread launches nothing now: kernels are only compiled, and there are no results."""
    return getattr(_thread, "is_ahead", False)


def prepare(enter_thread: Callable[[], object]) -> Future[None]:
    """Have what all compilations share done in a thread, while a model is read and built.

    That is a hash of triton's own sources, the compiler's version, and a C module that loads kernels, which has to be
    compiled as well. Nothing in triton keeps several threads from doing it all at once, each for itself.
    """
    thread = ThreadPoolExecutor(1, "prepare-triton", enter_thread)
    try:
        return thread.submit(lambda: _load(_launch(_nothing, grid=(1,), warmup=True)))
    finally:
        thread.shutdown(wait=False)


def compile_ahead(run: Callable[[], object], enter_thread: Callable[[], object],
                  prepared: Future[None] | None = None) -> Callable[[], list[str]]:
    """Call `run` with none of our kernels launched, and return once all that it met are compiled and loaded.

    Memory that those would have written is 0. `enter_thread` makes the device current in a thread. Raises what a
    compiler raises. What comes back names the kernels of which more variants were compiled since, each once a variant.
    """
    started = time.perf_counter()
    threads = ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "compile", enter_thread)
    try:
        with _one_at_a_time, _met_instead_of_launched(threads, prepared) as variants, _Zeros():
            run()
        met_seconds = time.perf_counter() - started
        for variant in variants:
            variant.result()
    finally:
        threads.shutdown(cancel_futures=True)
    logger.info("%d variants of kernels compiled or loaded in %.2f s, the last one met after %.2f s", len(variants),
                time.perf_counter() - started, met_seconds)
    there = _num_variants()
    return lambda: sorted((_num_variants() - there).elements())


@contextmanager
def _met_instead_of_launched(threads: ThreadPoolExecutor,
                             prepared: Future[None] | None) -> Iterator[list[Future[None]]]:
    """Each variant of our kernels that this thread launches is compiled in one of `threads` instead, once `prepared`.

    Another thread may be serving.
    """
    launch = JITFunction.run
    seen: set[tuple[Any, ...]] = set()
    variants: list[Future[None]] = []

    def compile_and_load(kernel: Any, arguments: tuple[Any, ...], settings: dict[str, Any]) -> None:
        if prepared is not None:
            prepared.result()
        _load(launch(kernel, *arguments, grid=None, warmup=True, **settings))

    def meet(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        if not is_ahead() or not kernel.module.startswith(_OWN):
            return launch(kernel, *arguments, grid=grid, warmup=warmup, **settings)
        kind = _variant(kernel, arguments, settings)
        if kind not in seen:
            seen.add(kind)
            variants.append(threads.submit(compile_and_load, kernel, arguments, settings))
        return None

    JITFunction.run = meet
    _thread.is_ahead = True
    try:
        yield variants
    finally:
        _thread.is_ahead = False
        JITFunction.run = launch


def _load(compiled: Any) -> None:
    """Asked for how it is launched, a compiled kernel makes its launcher and loads itself.

    One at a time: C modules that were loaded before share one module object in CPython. A thread could take another
    kernel's launch function from it.
    """
    with _loading:
        assert compiled.run is not None, f"{compiled} cannot be launched"


@triton.jit
def _nothing():  # type: ignore[no-untyped-def]
    pass


def _variant(kernel: Any, arguments: tuple[Any, ...], settings: dict[str, Any]) -> tuple[Any, ...]:
    """Launches that agree in it launch the same variant. Constants and how it is launched count as they are."""
    changing = {parameter.name for parameter in kernel.params if not parameter.is_constexpr}
    named = {**dict(zip(kernel.arg_names, arguments, strict=False)), **settings}
    return (kernel, *((name, _kind(value) if name in changing else value) for name, value in named.items()))


def _kind(argument: Any) -> Any:
    """The properties of an argument that a variant may depend on."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, tuple(argument.block_shape)
    if isinstance(argument, int):
        return type(argument), argument == 1, argument % 16 == 0, argument.bit_length() < 32
    return float if isinstance(argument, float) else argument


class _Zeros(TorchFunctionMode):
    """New memory is 0: what a kernel that was not launched leaves there may be the place of something."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function in _EMPTY else result


def _num_variants() -> Counter[str]:
    """Compiled variants of our kernels, by name."""
    modules = [module for name, module in sys.modules.items() if name.startswith(_OWN)]
    kernels = {kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, JITFunction)}
    return Counter({f"{kernel.module}.{kernel.fn.__name__}": sum(len(cache[0]) for cache in
                                                                 kernel.device_caches.values())
                    for kernel in kernels})
