"""LLM over several replicas answers as over one, whoever dies and however its calls end. Processes are real."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.errors import ConfigError, EngineDeadError, ReplicaDeadError, RequestError
from npu_runner.llm.prompt_server import pack_answer
from npu_runner.request.outputs import RequestOutput
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.full_set import only_full
from tests.replicas.jobs import REPLICA, family, kill, processes, wait_until_gone

GREEDY = SamplingParams(temperature=0, max_tokens=12)
FREE = SamplingParams(max_tokens=12, ignore_eos=True, n=2, temperature=1.3, logprobs=2)
CONVERSATIONS = [draw_example(seed).conversation() for seed in TEST_SEEDS[:4]]
TEXTS = [f"which {number}" for number in range(6)]
NO_IMAGE = [{"role": "user", "content": [{"type": "image", "image": b"junk"}, {"type": "text", "text": "Which?"}]}]
SETTINGS: dict[str, Any] = {"platform": "cpu", "max_num_seqs": 4, "max_model_len": 512, "kv_cache_bytes": 32 << 20,
                            "preprocessing_workers": 1}  # fmt: skip


def answers_of(llm: LLM) -> tuple[list[RequestOutput], list[RequestOutput]]:
    return llm.chat(CONVERSATIONS, GREEDY), llm.generate(iter(TEXTS), FREE)


@pytest.fixture(scope="module")
def expected() -> tuple[list[RequestOutput], list[RequestOutput]]:
    """What one replica answers, in this process."""
    with LLM(SHAPES_VL, **SETTINGS) as llm:
        return answers_of(llm)


@pytest.fixture(scope="module")
def several() -> Iterator[LLM]:
    with LLM(SHAPES_VL, data_parallel_size=2, **SETTINGS) as llm:
        yield llm


def tokens(outputs: Any) -> list[list[list[int]]]:
    found = dict(outputs) if not isinstance(outputs, list) else dict(enumerate(outputs))
    return [[completion.token_ids for completion in found[index].completions] for index in range(len(found))]


def without_logprobs(output: RequestOutput) -> RequestOutput:
    """Their last digits depend on who else is in the batch, and cached tokens on who was there before."""
    completions = [dataclasses.replace(completion, logprobs=None) for completion in output.completions]
    return dataclasses.replace(output, completions=completions, num_cached_tokens=0)


def test_two_replicas_answer_as_one_in_order_or_as_they_finish(
    several: LLM, expected: tuple[list[RequestOutput], list[RequestOutput]]
) -> None:
    chats, texts = answers_of(several)  # first: draws go by the number of the request
    assert [*map(without_logprobs, chats)] == [*map(without_logprobs, expected[0])]
    assert [*map(without_logprobs, texts)] == [*map(without_logprobs, expected[1])]
    for found, wanted in zip(texts, expected[1], strict=True):
        ours, theirs = found.logprobs, wanted.logprobs
        assert ours is not None
        assert theirs is not None
        assert [(item.sampled.token, item.sampled.token_bytes) for item in ours] == [
            (item.sampled.token, item.sampled.token_bytes) for item in theirs]
        assert [item.sampled.logprob for item in ours] == pytest.approx(
            [item.sampled.logprob for item in theirs], abs=1e-4)
    for source in (CONVERSATIONS, iter(CONVERSATIONS)):
        assert tokens(several.chat(source, GREEDY, stream_results=True)) == tokens(expected[0])
    assert all(state.num_finished for state in several._service._fleet.states)  # type: ignore[attr-defined]
    assert several.stats().num_decode_tokens > 0
    assert several.generate([], GREEDY) == []
    with pytest.raises(ConfigError, match="each replica has an engine"):
        several.engine.stats()


def test_log_probabilities_travel_without_the_tokenizer(
    expected: tuple[list[RequestOutput], list[RequestOutput]]
) -> None:
    output = expected[1][0]
    assert len(pack_answer(output)) < 4_000 < len(pickle.dumps(output))


def test_what_cannot_be_served_is_named_in_its_place(
    several: LLM, expected: tuple[list[RequestOutput], list[RequestOutput]]
) -> None:
    before = several.stats().num_prefill_tokens
    with pytest.raises(RequestError, match="prompt 4: messages"):
        several.chat([*CONVERSATIONS, [{"role": "user", "content": []}]], GREEDY)
    assert several.stats().num_prefill_tokens == before, "what shows without an image read is refused before all"
    with pytest.raises(RequestError, match=r"prompt 4: messages\[0\].content\[0\]: not an image") as caught:
        several.chat([*CONVERSATIONS, NO_IMAGE], GREEDY)
    assert caught.value.code == "image_not_recognised"
    bad = [NO_IMAGE, [{"role": "user", "content": []}], [{"role": "user", "content": "red " * 3000}], 7]
    mixed = [item for pair in itertools.zip_longest(CONVERSATIONS, bad) for item in pair if item is not None]
    results = several.chat(iter(mixed), GREEDY, return_errors=True)
    failed = {index: output.error_code for index, output in enumerate(results) if output.finish_reason == "error"}
    assert failed == {1: "image_not_recognised", 3: "invalid_type", 5: "prompt_too_long", 7: "invalid_type"}
    assert tokens([output for output in results if output.finish_reason != "error"]) == tokens(expected[0])


@pytest.mark.full("some hundred prompts; that one replica reads a bounded way ahead stays (runner/test_llm_streams.py)")
def test_an_iterator_is_read_a_bounded_way_ahead(several: LLM) -> None:
    counter = itertools.count()
    stream = several.generate(("which" for _ in counter), GREEDY.replace(max_tokens=1), stream_results=True)
    most_ahead = several._service._max_ahead  # type: ignore[attr-defined]
    for num_finished, _ in enumerate(itertools.islice(stream, 2 * most_ahead), 1):
        num_taken = int(repr(counter)[len("count(") : -1])
        assert num_taken <= num_finished + most_ahead
    assert num_taken > 2 * most_ahead


def interrupted_while_it_reads() -> Iterator[Any]:
    yield from CONVERSATIONS
    signal.raise_signal(signal.SIGINT)
    yield CONVERSATIONS[0]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", ["interrupt while it waits", "left", *only_full(
    "ends between two rows; one while it waits stays, and one that is left", "interrupt", "error")])
def test_after_any_end_of_a_call_the_next_one_is_as_ever(
    how: str, several: LLM, expected: tuple[list[RequestOutput], list[RequestOutput]]
) -> None:
    endless = GREEDY.replace(max_tokens=200, ignore_eos=True)
    if how == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            several.chat(interrupted_while_it_reads(), GREEDY)
    elif how == "interrupt while it waits":
        stream = several.generate(["which"] * 10, [GREEDY, *[endless] * 9], stream_results=True)
        next(stream)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    elif how == "error":
        with pytest.raises(RequestError):
            several.chat(iter([*CONVERSATIONS, NO_IMAGE, *CONVERSATIONS]), endless)
    else:
        stream = several.generate(itertools.cycle(["which"]), endless.replace(max_tokens=40), stream_results=True)
        next(stream)
    assert tokens(several.chat(CONVERSATIONS, GREEDY)) == tokens(expected[0])
    if how == "left":
        with pytest.raises(RequestError, match="ended when the LLM was called again"):
            next(stream)
    # A replica that has no part in this call may not have told yet that it gave back what it had of the one before.
    while any(state.held for state in several._service._fleet.states):  # type: ignore[attr-defined]
        time.sleep(0.01)
    while several.stats().num_running or several.stats().num_waiting:
        time.sleep(0.01)


def test_a_call_that_is_left_between_two_completions_of_a_prompt_kills_nobody(
    several: LLM, expected: tuple[list[RequestOutput], list[RequestOutput]]
) -> None:
    """Some of each prompt's completions have ended by themselves, others have a long way to go."""
    deaths = [state.num_deaths for state in several._service._fleet.states]  # type: ignore[attr-defined]
    params = SamplingParams(n=4, temperature=1.5, max_tokens=150)
    stream = several.generate((f"which {number}" for number in range(20)), params, stream_results=True)
    next(stream)
    assert tokens(several.chat(CONVERSATIONS, GREEDY)) == tokens(expected[0])
    assert [state.num_deaths for state in several._service._fleet.states] == deaths  # type: ignore[attr-defined]


def test_a_replica_that_is_killed_costs_no_answer_and_another_one_takes_its_place(
    several: LLM, expected: tuple[list[RequestOutput], list[RequestOutput]], caplog: pytest.LogCaptureFixture
) -> None:
    before = processes(REPLICA, os.getpid())
    assert len(before) == 2
    stream = several.chat(CONVERSATIONS, GREEDY, stream_results=True)
    found = [next(stream)]
    kill(before[:1])
    assert tokens(itertools.chain(found, stream)) == tokens(expected[0])
    while len(processes(REPLICA, os.getpid())) < 2:  # it died after its last answer, perhaps
        several.generate("which", GREEDY)
    assert set(processes(REPLICA, os.getpid())) > set(before[1:])
    assert f"process {before[0]}) died: killed by SIGKILL" in caplog.text
    assert "started again (1 of 3)" in caplog.text


def test_close_leaves_nothing_behind_and_says_so(several: LLM) -> None:
    """The last one of those that share these replicas."""
    several.chat(CONVERSATIONS[0], GREEDY)
    members = [pid for replica in processes(REPLICA, os.getpid()) for pid in [replica, *family(replica)]]
    assert len(members) >= 2
    stream = several.generate(["which"] * 20, GREEDY, stream_results=True)
    next(stream)
    several.close()
    several.close()
    wait_until_gone(members)
    with pytest.raises(RequestError, match="or closed"):
        next(stream)
    with pytest.raises(EngineDeadError, match="closed"):
        several.generate("which", GREEDY)


@pytest.mark.parametrize(("settings", "message"), [
    ({"data_parallel_size": 0}, "data_parallel_size: 0 is no number of replicas"),
    ({"data_parallel_size": "four"}, "data_parallel_size: 'four' is no number of replicas, nor auto"),
    ({"data_parallel_size": "auto"}, "the cpu platform has cores only; give a number"),
    ({"data_parallel_size": 2, "max_replica_restarts": -1}, "max_replica_restarts: -1 is negative"),
    ({"data_parallel_sise": 2}, "did you mean data_parallel_size"),
])  # fmt: skip
def test_what_is_no_number_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(SHAPES_VL, **SETTINGS, **settings)


@pytest.mark.full("two replicas are loaded and killed; a job with nobody left stays")
@pytest.mark.slow
def test_with_no_replica_left_it_says_so() -> None:
    with LLM(SHAPES_VL, data_parallel_size=2, max_replica_restarts=0, **SETTINGS) as llm:
        stream = llm.generate(["which"] * 8, GREEDY.replace(max_tokens=200, ignore_eos=True), stream_results=True)
        members = processes(REPLICA, os.getpid())
        next(stream)
        kill(members)
        with pytest.raises(ReplicaDeadError, match="no replica is left"):
            list(stream)
        wait_until_gone(members)
        with pytest.raises(EngineDeadError):
            llm.generate("which", GREEDY)
