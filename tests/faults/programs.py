"""Programs that have an LLM and fork, pool, run event loops or end in the middle.

`python -m tests.faults.programs NAME ARGUMENTS` prints lines of JSON; what they have to say is in test_programs.py.
Imported again by processes that are spawned: nothing happens here before a function is called. Holds no tests.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_runner import LLM

_FORKED_SECONDS = 60
SETTINGS: dict[str, Any] = {"platform": "cpu", "max_num_seqs": 4, "max_model_len": 512, "kv_cache_bytes": 8 << 20,
                            "preprocessing_workers": 1}


def loaded(num_replicas: int = 1) -> LLM:
    from npu_runner import LLM
    from npu_runner.assets import SHAPES_VL

    return LLM(SHAPES_VL, data_parallel_size=num_replicas, **SETTINGS)


def conversations() -> list[Any]:
    from scripts.shapes.drawing import TEST_SEEDS, draw_example

    return [draw_example(seed).conversation() for seed in TEST_SEEDS[:3]]


def answers(llm: LLM) -> list[str]:
    """Of texts and images: the second are prepared by workers."""
    from npu_runner import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=8)
    return [output.text for output in [*llm.generate(["which", "what"], greedy), *llm.chat(conversations(), greedy)]]


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def children() -> list[int]:
    """Of this process, without those that have ended."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return sorted(found)


# -- pools and forks ---------------------------------------------------------------------------------------------------


def answers_of_its_own(_: int) -> list[str]:
    with loaded() as llm:
        return answers(llm)


def pools() -> None:
    """Of each kind, beside an LLM: processes that compute, and one that loads an LLM of its own."""
    with loaded() as llm:
        expected = answers(llm)
        for method in ("fork", "spawn", "forkserver"):
            with multiprocessing.get_context(method).Pool(2) as pool:
                computed = pool.map(abs, [-1, 2, -3])
                own = method != "fork" and pool.map(answers_of_its_own, [0])[0] == expected
            say(method=method, computed=computed, own=own, after=answers(llm) == expected)


def forked(num_replicas: str) -> None:
    """A child of a process that has an LLM asks it, closes it, and ends; its parent asks on."""
    with loaded(int(num_replicas)) as llm:
        expected, members = answers(llm), children()
        for what in (answers, type(llm).close, type(llm).stats, lambda llm: None):
            say(child=_in_a_child(lambda what=what: what(llm), expected),  # type: ignore[misc]
                members=set(members) <= set(children()), after=answers(llm) == expected)


def _in_a_child(call: Callable[[], Any], expected: list[str]) -> str:
    """What came of it there: the name of an error, `answered`, or `hangs`."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = call()
            said = "answered" if found == expected or not isinstance(found, list) else "answers otherwise"
        except BaseException as error:  # noqa: BLE001 - the border of the process
            said = f"{type(error).__module__}.{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        sys.exit(0)  # as a child does that was forked by multiprocessing: what has to be finalised is
    os.close(writing)
    deadline = time.monotonic() + _FORKED_SECONDS
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return "hangs"
        time.sleep(0.01)
    with os.fdopen(reading) as pipe:
        return pipe.read()


# -- event loops -------------------------------------------------------------------------------------------------------


def event_loop(num_replicas: str) -> None:
    """A call in an executor's thread, while which the loop goes on, and one in the loop's own thread."""

    async def main(llm: LLM, expected: list[str]) -> None:
        num_turns, calling = 0, asyncio.ensure_future(asyncio.to_thread(answers, llm))
        while not calling.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        say(in_a_thread=await calling == expected, goes_on=num_turns > 1, in_the_loop=answers(llm) == expected)

    with loaded(int(num_replicas)) as llm:
        asyncio.run(main(llm, answers(llm)))


# -- ends --------------------------------------------------------------------------------------------------------------


def exit_in_an_iterator(num_replicas: str) -> None:
    """The iterator that a call reads ends the program."""
    from npu_runner import SamplingParams

    def ending() -> Iterator[Any]:
        yield from conversations()
        sys.exit(7)

    llm = loaded(int(num_replicas))
    answers(llm)
    llm.chat(ending(), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))


def exit_in_a_stream(num_replicas: str) -> None:
    """The loop over a stream ends the program, with requests under way; the LLM is not closed."""
    from npu_runner import SamplingParams

    llm = loaded(int(num_replicas))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for _ in llm.chat(conversations() * 5, params, stream_results=True):
        sys.exit(7)


def exit_without_closing(num_replicas: str) -> None:
    answers(loaded(int(num_replicas)))
    sys.exit(7)


def exit_under_a_thread(num_replicas: str) -> None:
    """The main thread ends while another one, that nobody waits for, is in a call."""
    from npu_runner import SamplingParams

    llm, begun = loaded(int(num_replicas)), threading.Event()

    def endless() -> Iterator[str]:
        while True:
            yield "which"
            begun.set()

    def call() -> None:
        for _ in llm.generate(endless(), SamplingParams(temperature=0, max_tokens=4), stream_results=True):
            pass

    threading.Thread(target=call, daemon=True).start()
    begun.wait()
    sys.exit(7)


# -- one after the other -----------------------------------------------------------------------------------------------


def settled_threads() -> int:
    """The fewest within a second: the system still lists a thread for a moment when it has been joined."""
    counts = []
    for _ in range(20):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.05)
    return min(counts)


def one_after_the_other(num_llms: str, num_replicas: str) -> None:
    for _ in range(int(num_llms)):
        with loaded(int(num_replicas)) as llm:
            found = answers(llm)
        del llm
        rss_kib = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10
        say(answers=found, children=children(), fds=len(os.listdir("/proc/self/fd")),
            threads=settled_threads(), rss_kib=rss_kib)


if __name__ == "__main__":
    from tests.faults import programs  # by its name, so that processes that are spawned find its functions

    getattr(programs, sys.argv[1])(*sys.argv[2:])
