"""Calls of one LLM that come at once: inside another call's iterator, from other threads, behind an unread stream.

Each is answered as it would be alone or refused by name, none hangs, and the call that was there first goes on as ever.
One replica and two. Knows nothing of how an LLM keeps its calls apart.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.errors import RequestError
from npu_runner.llm import Results
from npu_runner.request.outputs import RequestOutput
from tests.full_set import only_full

TEXTS = [f"which {number}" for number in range(6)]
OTHER_TEXTS = [f"what colour is {number}" for number in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS: dict[str, Any] = {"platform": "cpu", "max_num_seqs": 4, "max_model_len": 256, "kv_cache_bytes": 8 << 20,
                            "preprocessing_workers": 0}
# A call that takes so long hangs: each of them is a few steps of a tiny model.
_HANGS_SECONDS = 60.0
# Time for another thread to come as far as it can; nothing depends on how far that is.
_A_MOMENT = 0.2

Tokens = list[list[int]]


def tokens(results: Any) -> Tokens:
    found = dict(results) if isinstance(results, Iterator) else dict(enumerate(results))
    return [found[index].token_ids for index in range(len(found))]


class Call(threading.Thread):
    """A call in a thread of its own. `result`: its tokens, or the code of the RequestError that refused it."""

    def __init__(self, call: Callable[[], Any]):
        super().__init__(daemon=True)
        self._call = call
        self._found: Tokens | str | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = tokens(self._call())
        except RequestError as error:
            self._found = error.code
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            self._found = error

    def result(self) -> Tokens | str:
        self.join(_HANGS_SECONDS)
        assert not self.is_alive(), "the call hangs"
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None
        return self._found


class Loaded:
    """LLMs by their number of replicas; one in which a call failed or hangs is left for another."""

    def __init__(self) -> None:
        self._llms: dict[int, LLM] = {}

    def get(self, num_replicas: int) -> LLM:
        if num_replicas not in self._llms:
            self._llms[num_replicas] = LLM(SHAPES_VL, data_parallel_size=num_replicas, **SETTINGS)
        return self._llms[num_replicas]

    def leave(self, num_replicas: int) -> None:
        llm = self._llms.pop(num_replicas)
        threading.Thread(target=llm.close, daemon=True).start()  # a call that hangs in it may hold this up, too

    def close(self) -> None:
        for llm in self._llms.values():
            llm.close()


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    loaded = Loaded()
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """What each text is answered by an LLM that has never been called."""
    with LLM(SHAPES_VL, **SETTINGS) as llm:
        texts = [*TEXTS, *OTHER_TEXTS]
        return dict(zip(texts, tokens(llm.generate(texts, GREEDY)), strict=True))


class Asked:
    """An LLM and what it has to answer."""

    def __init__(self, llm: LLM, expected: dict[str, list[int]]):
        self.llm = llm
        self.answers, self.other_answers = ([expected[text] for text in texts] for texts in (TEXTS, OTHER_TEXTS))
        self.is_as_ever = False

    def stream(self, texts: Iterable[str] = TEXTS) -> Results:
        return self.llm.generate(iter(texts), GREEDY, stream_results=True)

    def other(self) -> list[RequestOutput]:
        return self.llm.generate(OTHER_TEXTS, GREEDY)

    def assert_answered_or_refused(self, found: Tokens | str) -> None:
        """The code of a refusal is not that of a stream that was ended: nothing has ended this call."""
        assert found == self.other_answers if isinstance(found, list) else found != "results_ended", found

    def assert_as_ever(self) -> None:
        """The end of each test: a call, and one in another thread."""
        assert tokens(self.other()) == self.other_answers
        assert Call(self.stream).result() == self.answers
        self.is_as_ever = True


@pytest.fixture(params=[1, *only_full("two replicas, whose calls are kept apart in the same place", 2)],
                ids=["one replica", "two replicas"])
def asked(request: pytest.FixtureRequest, loaded: Loaded, expected: dict[str, list[int]]) -> Iterator[Asked]:
    found = Asked(loaded.get(request.param), expected)
    yield found
    if not found.is_as_ever:
        loaded.leave(request.param)


def test_a_call_inside_another_calls_iterator(asked: Asked) -> None:
    """As in a pipeline of two steps over one model."""
    inner: list[Tokens | str] = []
    num_before = asked.llm.num_requests

    def two_steps() -> Iterator[str]:
        for text in TEXTS:
            try:
                inner.append(tokens(asked.other()))
            except RequestError as error:
                inner.append(error.code)
            yield text

    assert Call(lambda: asked.stream(two_steps())).result() == asked.answers
    assert len(inner) == len(TEXTS)
    for found in inner:
        asked.assert_answered_or_refused(found)
    num_answered = len(OTHER_TEXTS) * sum(isinstance(found, list) for found in inner)
    assert asked.llm.num_requests == num_before + len(TEXTS) + num_answered, "a refused call has queued something"
    asked.assert_as_ever()


def test_an_iterator_that_does_not_catch_the_refusal_ends_its_own_call(asked: Asked) -> None:
    """What it raises reaches the caller by name, and nothing is left of either call."""

    def two_steps() -> Iterator[str]:
        yield TEXTS[0]
        asked.other()
        yield TEXTS[1]

    found = Call(lambda: asked.stream(two_steps())).result()
    assert found == asked.answers[:2] if isinstance(found, list) else found != "results_ended"
    asked.assert_as_ever()


def test_calls_of_several_threads(asked: Asked) -> None:
    calls = [Call(asked.other if number % 2 else asked.stream) for number in range(6)]
    found = [call.result() for call in calls]
    for number, result in enumerate(found):
        if number % 2:
            asked.assert_answered_or_refused(result)
        else:
            assert result == asked.answers if isinstance(result, list) else result != "results_ended"
    assert any(isinstance(result, list) for result in found), "all of them are refused"
    asked.assert_as_ever()


def test_a_call_while_another_threads_call_reads_its_iterator(asked: Asked) -> None:
    other: list[Call] = []

    def slow() -> Iterator[str]:
        yield TEXTS[0]
        other.append(Call(asked.other))
        other[0].join(_A_MOMENT)
        yield from TEXTS[1:]

    assert Call(lambda: asked.stream(slow())).result() == asked.answers
    asked.assert_answered_or_refused(other[0].result())
    asked.assert_as_ever()


def test_an_iterator_that_waits_for_another_threads_call(asked: Asked) -> None:
    """Who waits its turn here waits for ever, so this call has to be refused, or served beside the other."""
    other: list[Tokens | str] = []

    def two_steps() -> Iterator[str]:
        yield TEXTS[0]
        other.append(Call(asked.other).result())
        yield from TEXTS[1:]

    assert Call(lambda: asked.stream(two_steps())).result() == asked.answers
    asked.assert_answered_or_refused(other[0])
    asked.assert_as_ever()


def test_an_unread_stream_is_not_ended_by_another_threads_call(asked: Asked) -> None:
    stream = asked.stream()
    first = next(stream)
    other = Call(asked.other)
    other.join(_A_MOMENT)
    assert tokens(iter([first, *stream])) == asked.answers
    asked.assert_answered_or_refused(other.result())
    asked.assert_as_ever()


def test_an_unread_stream_of_a_thread_that_has_ended_keeps_nobody_waiting(asked: Asked) -> None:
    streams: list[Results] = []

    def begin() -> list[RequestOutput]:
        streams.append(asked.stream())
        return [next(streams[0])[1]]

    assert isinstance(Call(begin).result(), list)
    asked.assert_answered_or_refused(Call(asked.other).result())
    streams.clear()  # nobody can read it any more
    asked.assert_as_ever()


def test_a_stream_may_be_read_by_another_thread_than_made_it(asked: Asked) -> None:
    stream = asked.stream()
    first = next(stream)
    assert Call(lambda: iter([first, *stream])).result() == asked.answers
    asked.assert_as_ever()
