"""The thread that starts all children of this process: it lives as long as the process does.

Linux tells a child of its parent's end when the thread that started it ends, and callers' threads come and go. Knows
nothing of what is started.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

Result = TypeVar("Result")

LOOK_S = 0.5
"""Python sees a signal that came just before a wait only once the wait is over; so no wait lasts longer than this."""

_lock = threading.Lock()
_of_process: tuple[int, queue.SimpleQueue[Callable[[], None]]] | None = None


def in_start_thread(start: Callable[[], Result], *, unclaimed: Callable[[Result], object]) -> Result:
    """What `start` returns or raises, called in that thread with the CPU affinity of the caller's.

    Interrupted while it waits (Ctrl-C), it raises that, and `unclaimed` is given what is still started.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            if cores is not None:
                os.sched_setaffinity(0, cores)
            future.set_result(start())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            future.set_exception(error)

    _queue().put(work)
    try:
        while not future.done():
            wait([future], timeout=LOOK_S)
        return future.result()
    except BaseException:
        future.add_done_callback(lambda done: None if done.exception() else unclaimed(done.result()))
        raise


def _queue() -> queue.SimpleQueue[Callable[[], None]]:
    """Of the thread of this process; one that was forked has none yet."""
    global _of_process
    with _lock:
        if _of_process is None or _of_process[0] != os.getpid():
            found: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
            # A daemon: at the interpreter's end it must not go before children that are asked to end in good order.
            threading.Thread(target=_work, args=(found,), name="start-children", daemon=True).start()
            _of_process = os.getpid(), found
        return _of_process[1]


def _work(todo: queue.SimpleQueue[Any]) -> None:
    while True:
        todo.get()()


def _forget_lock() -> None:
    """In a forked process: another thread may have held it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)
