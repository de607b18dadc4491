"""Threads with a stack of a stated size. Knows nothing of grammars.

The grammar library recurses: how deep a rule may lead is a matter of the stack. What a process gives its threads, and
its main thread most of all, depends on `ulimit -s`, so neither checks nor builds rely on it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

CHECK_STACK_BYTES = 64 << 20
"""For checking a rule: less than for building it, so that what was checked can be built."""
GRAMMAR_STACK_BYTES = 128 << 20
"""For building the matcher of a rule that was checked. Address space: memory is taken where it is written."""
NUM_THREADS = min(4, os.cpu_count() or 1)
"""For checks, and for builds: both let go of the interpreter's lock."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_LOCK = threading.Lock()


@contextmanager
def thread_stacks(num_bytes: int) -> Iterator[None]:
    """Threads that start within have a stack of `num_bytes`. The size is the process's: one caller at a time."""
    with _LOCK:
        before = threading.stack_size(num_bytes)
        try:
            yield
        finally:
            threading.stack_size(before)


def call_with_stack(num_bytes: int, function: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """What `function` returns or raises, called in another thread with a stack of `num_bytes`."""
    threads = _threads(os.getpid(), num_bytes)
    with thread_stacks(num_bytes):  # one is started where all are busy, up to a few
        future = threads.submit(function, *args, **kwargs)
    return future.result()


@functools.cache
def _threads(process: int, num_bytes: int) -> ThreadPoolExecutor:
    """Kept, since to map and unmap such a stack costs as much as a small check. A fork has no threads of its parent."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="rule")
