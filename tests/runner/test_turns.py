"""Whose turn it is among the calls of an LLM, from generators alone: nothing is loaded. 0.2 s."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from npu_runner.errors import RequestError
from npu_runner.llm.turns import Call, Turns


def begun(turns: Turns, *, is_open: bool, work: Callable[[], Any] = lambda: None) -> Iterator[int]:
    """A call that gives three results and does `work` before each."""
    call = Call(is_open)

    def results() -> Iterator[int]:
        turns.start(call)
        for number in range(3):
            work()
            yield number
            if not turns.is_current(call):
                raise RequestError("ended", "results_ended")

    found = results()
    call.follow(found)
    return found


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that does it, and what has come of it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except RequestError as error:
            found.append(error.code)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_the_next_call_of_a_thread_ends_its_unread_stream() -> None:
    turns = Turns()
    first = begun(turns, is_open=True)
    assert next(first) == 0
    assert list(begun(turns, is_open=True)) == [0, 1, 2]
    with pytest.raises(RequestError, match="ended"):
        next(first)


def test_a_call_inside_another_is_refused_and_that_one_goes_on() -> None:
    turns, codes = Turns(), []

    def nested() -> None:
        with pytest.raises(RequestError) as caught:
            list(begun(turns, is_open=False))
        codes.append(caught.value.code)

    assert list(begun(turns, is_open=False, work=nested)) == [0, 1, 2]
    assert codes == ["nested_call"] * 3


@pytest.mark.parametrize("is_open", [False, True])
def test_another_threads_call_waits_for_lists_and_is_refused_beside_what_is_open(is_open: bool) -> None:
    turns = Turns()
    first = begun(turns, is_open=is_open)
    next(first)
    thread, found = in_thread(lambda: list(begun(turns, is_open=False)))
    thread.join(0.1)
    assert found == (["llm_busy"] if is_open else [])
    assert list(first) == [1, 2]
    thread.join()
    assert found == (["llm_busy"] if is_open else [[0, 1, 2]])


@pytest.mark.parametrize("how", ["dropped", "closed", "failed", "its thread has ended", "none is the current one"])
def test_what_has_ended_keeps_nobody_waiting(how: str) -> None:
    turns = Turns()
    begin = {"failed": lambda: 1 // 0}.get(how, lambda: None)
    first: Any = begun(turns, is_open=True, work=begin)
    if how == "failed":
        with pytest.raises(ZeroDivisionError):
            next(first)
    elif how == "its thread has ended":
        in_thread(lambda: next(first))[0].join()
    else:
        next(first)
    if how == "dropped":
        del first
    elif how == "closed":
        first.close()
    elif how == "none is the current one":
        turns.end()
    thread, found = in_thread(lambda: list(begun(turns, is_open=False)))
    thread.join()
    assert found == [[0, 1, 2]]


def test_a_fork_of_the_process_is_refused_whatever_its_threads_held() -> None:
    turns = Turns()
    stream = begun(turns, is_open=True)
    next(stream)
    with turns._lock:  # as another thread may hold it
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # ends it where it waits for the lock
            codes = []
            for results in (stream, begun(turns, is_open=False)):
                try:
                    next(results)
                except RequestError as error:
                    codes.append(error.code)
            os._exit(0 if codes == ["results_ended", "forked_llm"] and not turns.are_here else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert list(stream) == [1, 2], "the parent's goes on"
