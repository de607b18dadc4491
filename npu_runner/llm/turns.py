"""Lets one call of an `LLM` run at a time, from any thread. Knows nothing of what calls do.

The interpreter says whether a call's generator runs or has ended: a flag of ours could be left behind by an interrupt.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
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
    """A call of an LLM, whose results a generator gives.

    `is_open`: its caller reads a stream, or gives an iterator of prompts. That code may itself wait for another call,
    so no call waits for this one.
    """

    def __init__(self, is_open: bool):
        self.is_open = is_open
        self.thread = threading.current_thread()
        """The thread that read its results last."""
        self._results: weakref.ref[GeneratorType[Any, Any, Any]] | None = None

    def follow(self, results: Any) -> None:
        """Set its generator. It is held weakly: a stream that is dropped has ended."""
        self._results = weakref.ref(results)

    @property
    def running(self) -> bool | None:
        """Whether a thread is inside it at this moment. None: its results have ended, or the thread that read them
        has."""
        results = None if self._results is None else self._results()
        if results is None or results.gi_frame is None:
            return None
        return results.gi_running or (False if self.thread.is_alive() else None)


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
        """Whether no later call, no `close` and no fork has ended it. Called by the thread that reads its results."""
        call.thread = threading.current_thread()
        return call is self._current and self.are_here

    def start(self, call: Call) -> None:
        """Make `call` the current one, in its own generator. This ends an unread stream of this thread. A call of
        another thread is waited for.

        Raises RequestError inside another call of this thread, beside an open call of another thread, and in a fork of
        the process that loaded the LLM.
        """
        if not self.are_here:  # before the lock, which another thread may have held at the fork
            raise RequestError(_FORKED.format(self._process_id), "forked_llm")
        call.thread = threading.current_thread()
        while not self._try_start(call):
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """End the current call."""
        self._current = None

    def _try_start(self, call: Call) -> bool:
        with self._lock:
            other = self._current
            if other is not None and (running := other.running) is not None:
                if other.thread is not call.thread:
                    if other.is_open:
                        raise RequestError(_BUSY.format(other.thread.name), "llm_busy")
                    return False
                if running:
                    raise RequestError(_NESTED, "nested_call")
            self._current = call
            return True
