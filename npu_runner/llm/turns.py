"""Turns: one call of an `LLM` at a time, from any thread. Knows nothing of what calls do.

A call is open as long as the interpreter says so of its generator: an interrupt could leave a flag behind.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from npu_runner.errors import RequestError

_POLL_SECONDS = 0.02
_NESTED = ("this LLM was called inside an iterator of prompts that another call of it is reading; make a list of them "
           "first, or use a second LLM")
_BUSY = ("thread {} is in a call of this LLM that reads an iterator or gives a stream, which may take for ever; wait "
         "until it has ended, close its stream, or give it lists: calls with lists wait for each other")
_FORKED = ("process {} has loaded this LLM, and this process is a fork of it: the threads that answer are there alone; "
           "load an LLM in this process, or start it by spawn")


class Call:
    """A call of an LLM, whose results come out of a generator.

    is_open: it ends when its stream has been read, or its iterator of prompts ends. The code that does so may wait for
    another call, so no call waits for this one.
    """

    def __init__(self, is_open: bool):
        self.is_open = is_open
        self.thread = threading.current_thread()
        """That which read its results last."""
        self._results: weakref.ref[GeneratorType[Any, Any, Any]] | None = None

    def follow(self, results: Iterator[Any]) -> None:
        """These are its results. Held weakly: a stream that is dropped has ended."""
        assert isinstance(results, GeneratorType), "the interpreter tells of generators only whether they run"
        self._results = weakref.ref(results)

    @property
    def is_running(self) -> bool:
        """It is at work at this moment, in some thread."""
        results = None if self._results is None else self._results()
        return results is not None and results.gi_running

    @property
    def is_over(self) -> bool:
        """Its results have ended, or the thread that read them has."""
        results = None if self._results is None else self._results()
        return results is None or results.gi_frame is None or not (results.gi_running or self.thread.is_alive())


class Turns:
    """The calls of one LLM."""

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._current: Call | None = None

    @property
    def are_here(self) -> bool:
        """False in a fork of the process that loaded the LLM."""
        return os.getpid() == self._process_id

    def is_current(self, call: Call) -> bool:
        """Whether no later call, no `close` and no fork has ended it. Asked by whichever thread reads its results."""
        call.thread = threading.current_thread()
        return call is self._current and self.are_here

    def start(self, call: Call) -> None:
        """Make it the current one; in the call's own generator. A stream of this thread that was not read to its end
        has ended then; a call of another thread is waited for.

        Raises RequestError inside another call of this thread, beside an open call of another thread, and in a fork of
        the process that loaded the LLM.
        """
        if not self.are_here:  # before the lock, which another thread may have held when this process began
            raise RequestError(_FORKED.format(self._process_id), "forked_llm")
        call.thread = threading.current_thread()
        while not self._has_taken(call):
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """No call is the current one."""
        self._current = None

    def _has_taken(self, call: Call) -> bool:
        with self._lock:
            other = self._current
            if other is not None and not other.is_over:
                if other.thread is call.thread:
                    if other.is_running:
                        raise RequestError(_NESTED, "nested_call")
                elif other.is_open:
                    raise RequestError(_BUSY.format(other.thread.name), "llm_busy")
                else:
                    return False
            self._current = call
            return True
