"""Limits of the grammar library: threads with a stack of a given size, and the work of its parser on one rule.

The grammar library recurses, so the stack limits the depth of a rule. The default stack of a process depends on `ulimit
-s`; neither checks nor builds rely on it. Our own bounds (schema_bounds.py, lark_bounds.py) come before the parser's
limits. A rule beyond both fails its row by name. Knows no rule.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from llguidance import LLParserLimits

CHECK_STACK_BYTES = 64 << 20
"""For checking a rule: less than for building it, so that what was checked can be built."""
GRAMMAR_STACK_BYTES = 128 << 20
"""For building the matcher of a rule that was checked. Address space: memory is taken where it is written."""
NUM_THREADS = min(4, os.cpu_count() or 1)
"""For checks, and for builds: both let go of the interpreter's lock."""
_MAX_ITEMS_IN_ROW = 32_768
"""An optional property takes 4, an object among alternatives 11; the library's own 2,000 end at 500 properties."""
_STEP_MAX_ITEMS = 200_000
"""For one mask, 20,000 a millisecond."""
_MAX_LEXER_STATES = 100_000
"""1 to 2 kB each."""

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
    """Call `function` in another thread with a stack of `num_bytes`, and return or raise its result."""
    threads = _threads(os.getpid(), num_bytes)
    with thread_stacks(num_bytes):  # one is started where all are busy, up to a few
        future = threads.submit(function, *args, **kwargs)
    return future.result()


@functools.cache
def _threads(process: int, num_bytes: int) -> ThreadPoolExecutor:
    """Kept, since to map and unmap such a stack costs as much as a small check. A fork has no threads of its parent."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="rule")


def parser_limits() -> LLParserLimits:
    """For `LLMatcher(..., limits=parser_limits())`. Errors are one line: they repeat no grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=_MAX_ITEMS_IN_ROW, step_max_items=_STEP_MAX_ITEMS,
                          max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
