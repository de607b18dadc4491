"""An exception at every line between a caller and the engine: the next call answers as a fresh LLM does, nothing hangs.

What is between them is found by running it: each line of lines.FRONT that the caller's thread runs, once, in the middle
of the times that it runs.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from npu_runner import LLM
from npu_runner.assets import SHAPES_VL
from npu_runner.errors import NpuRunnerError
from npu_runner.ray_data import ERROR_COLUMN, LLMPredictor
from tests.faults.interrupts import DRAWN, IMAGE_SETTINGS, PROMPTS, Answers, answers_to_images, processes_left
from tests.faults.lines import Injected, Line, lines_of, raising_at

FEW = DRAWN.replace(max_tokens=4)
SETTINGS = {**IMAGE_SETTINGS, "preprocessing_workers": 1}
_HANGS_SECONDS = 120
Call = Callable[[Any], Any]


@contextmanager
def not_hanging(what: str) -> Iterator[None]:
    """Whatever it is that waits is ended, and named."""

    def give_up(number: int, frame: Any) -> None:
        raise AssertionError(f"{what}: hangs at {frame.f_code.co_filename}:{frame.f_lineno}")

    before = signal.signal(signal.SIGALRM, give_up)
    of_the_test, _ = signal.setitimer(signal.ITIMER_REAL, _HANGS_SECONDS)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, of_the_test)


def lines_by_call(target: Any, calls: tuple[Call, ...]) -> dict[Line, tuple[Call, int]]:
    """Each line with the first of the calls that runs it, and the middle one of the times that it does."""
    found: dict[Line, tuple[Call, int]] = {}
    for call in calls:
        for line, count in lines_of(lambda call=call: call(target)).items():  # type: ignore[misc]
            found.setdefault(line, (call, (count + 1) // 2))
    return found


def assert_recovers_from_every_line(target: Any, calls: tuple[Call, ...], expected: dict[Call, Any], *,
                                    every: int = 1) -> None:
    """`every`: one line in so many."""
    num_raised = 0
    places = list(lines_by_call(target, calls).items())[::every]
    for (file, number), (call, at_hit) in places:
        # A line of a loop that waits may run less often in this call than in the one that was counted.
        for hit in dict.fromkeys((at_hit, 1)):
            what = f"{file}:{number}, hit {hit} in {call.__name__}"
            has_ended = False
            with not_hanging(what):
                try:
                    with raising_at((file, number), hit):
                        found = call(target)
                    assert found == expected[call], f"{what}: not as ever, and nothing was raised"
                except Injected:
                    num_raised += 1
                    has_ended = True
                except NpuRunnerError as error:
                    has_ended, named = True, str(error)
                    assert named, what
            with not_hanging(f"the call after {what}"):
                assert call(target) == expected[call], f"the call after {what}"
            if has_ended:
                break
    assert num_raised > len(places) * 0.9, "the exceptions do not come through"


def listed(llm: LLM) -> Answers:
    return [[output.token_ids] for output in llm.generate(PROMPTS, FEW)]


def streamed(llm: LLM) -> Answers:
    found = dict(llm.generate(iter(PROMPTS), FEW, stream_results=True))
    return [[found[index].token_ids] for index in range(len(found))]


CALLS: tuple[Call, ...] = (listed, streamed, answers_to_images)
"""A line is interrupted in the first of them that runs it."""


@pytest.fixture(scope="module")
def expected() -> dict[Call, Any]:
    """What a fresh LLM answers to each call."""
    found: dict[Call, Any] = {}
    for call in CALLS:
        with LLM(SHAPES_VL, **SETTINGS) as llm:
            found[call] = call(llm)
    return found


def test_an_exception_at_some_lines_of_a_call(expected: dict[Call, Any]) -> None:
    with LLM(SHAPES_VL, **SETTINGS) as llm:
        assert_recovers_from_every_line(llm, (streamed,), expected, every=16)
        assert llm.stats().kv_blocks_used == 0


@pytest.mark.slow
@pytest.mark.full("some hundred calls are interrupted, workers start again; a sixteenth of one replica's lines stay")
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_exception_at_every_line_of_a_call(num_replicas: int, async_scheduling: bool,
                                              expected: dict[Call, Any]) -> None:
    settings = {**SETTINGS, "data_parallel_size": num_replicas, "async_scheduling": async_scheduling}
    with LLM(SHAPES_VL, **settings) as llm:
        assert_recovers_from_every_line(llm, CALLS, expected)


def predicted(predictor: LLMPredictor) -> Answers:
    out = predictor({"prompt": PROMPTS, "sampling_params": [{"max_tokens": 8}, None, {"top_p": 7.0}, None]})
    assert [bool(error) for error in out[ERROR_COLUMN]] == [False, False, True, False]
    return [[list(tokens)] for tokens in out["generated_tokens"]]


@pytest.mark.slow
@pytest.mark.full("some fifty calls are interrupted; the lines of LLM below stay")
def test_an_exception_at_every_line_of_ray_datas_class() -> None:
    predictor = LLMPredictor(str(SHAPES_VL), sampling_params={"temperature": 0, "max_tokens": 4}, **SETTINGS)
    expected = {predicted: predicted(predictor)}
    assert_recovers_from_every_line(predictor, (predicted,), expected)
    predictor._llm.close()


def loaded(num_replicas: int) -> LLM:
    return LLM(SHAPES_VL, data_parallel_size=num_replicas, **SETTINGS)


@pytest.mark.slow
@pytest.mark.full("loads an LLM for every line of its start and of its end; what closes twice stays")
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_exception_at_every_line_of_start_and_end(num_replicas: int, expected: dict[Call, Any]) -> None:
    """No process is left, by a start that ended so, nor once what did not close is closed again."""
    before = processes_left()
    with loaded(num_replicas) as llm:
        assert answers_to_images(llm) == expected[answers_to_images]
        of_end = lines_of(llm.close)
    made: list[LLM] = []
    of_start = lines_of(lambda: made.append(loaded(num_replicas)))
    made.pop().close()
    assert min(len(of_start), len(of_end)) > 3
    for line in of_start:
        with not_hanging(f"a start, {line}"), suppress(Injected), raising_at(line, 1):
            made.append(loaded(num_replicas))
        assert not made, f"a start goes on behind {line}"
        assert processes_left() == before, f"a start that ended at {line} leaves processes"
    for line in of_end:
        llm = loaded(num_replicas)
        assert answers_to_images(llm) == expected[answers_to_images]
        with not_hanging(f"an end, {line}"):
            with suppress(Injected), raising_at(line, 1):
                llm.close()
            llm.close()
        assert processes_left() == before, f"an end that was interrupted at {line} leaves processes"
