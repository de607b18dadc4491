"""Threads whose stack is said: pthread itself tells how large it is."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from npu_runner.grammars.stack import (
    CHECK_STACK_BYTES,
    GRAMMAR_STACK_BYTES,
    NUM_THREADS,
    call_with_stack,
    thread_stacks,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks glibc for a thread's stack")


def stack_bytes() -> int:
    """Of the thread that calls."""
    libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(128), ctypes.c_size_t()
    libc.pthread_self.restype = ctypes.c_void_p
    assert libc.pthread_getattr_np(ctypes.c_void_p(libc.pthread_self()), attributes) == 0
    assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
    libc.pthread_attr_destroy(attributes)
    return size.value


def test_a_call_has_the_stack_that_is_asked_for_and_other_threads_what_they_had() -> None:
    before = threading.stack_size()
    with ThreadPoolExecutor(1) as other:
        usual = other.submit(stack_bytes).result()
    for num_bytes in (CHECK_STACK_BYTES, GRAMMAR_STACK_BYTES):
        assert call_with_stack(num_bytes, stack_bytes) == num_bytes
    with ThreadPoolExecutor(1) as other:
        assert other.submit(stack_bytes).result() == usual
    assert threading.stack_size() == before
    assert CHECK_STACK_BYTES < GRAMMAR_STACK_BYTES


def test_what_a_call_raises_is_raised_and_the_size_is_given_back() -> None:
    before = threading.stack_size()
    with pytest.raises(ZeroDivisionError):
        call_with_stack(CHECK_STACK_BYTES, lambda: 1 // 0)
    with pytest.raises(KeyError), thread_stacks(CHECK_STACK_BYTES):
        raise KeyError
    assert threading.stack_size() == before


def test_the_thread_is_kept_and_a_fork_has_its_own() -> None:
    # a thread gives its result before it is free again, so the next call may start one more, up to the few there are
    seen = {call_with_stack(CHECK_STACK_BYTES, threading.get_native_id) for _ in range(50)}
    assert len(seen) <= NUM_THREADS
    child = os.fork()
    if child == 0:  # only what needs no lock that another thread may have held
        is_right = call_with_stack(CHECK_STACK_BYTES, stack_bytes) == CHECK_STACK_BYTES
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
