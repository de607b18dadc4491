"""LLM takes iterators of any length and reads them as it works; results come in order, or as they finish."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.errors import ConfigError, RequestError
from npu_runner.llm import prompt_service
from npu_runner.serving.options import PreprocessingOptions
from npu_runner.serving.replicas.inline_replica import rows_ahead
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.full_set import only_full

GREEDY = SamplingParams(temperature=0, max_tokens=4)
MAX_NUM_SEQS = 4
EXAMPLES = [draw_example(seed) for seed in TEST_SEEDS[:4]]
CONVERSATIONS = [example.conversation() for example in EXAMPLES]
NO_IMAGE = [{"role": "user", "content": [{"type": "image", "image": b"junk"}, {"type": "text", "text": "Which?"}]}]


@pytest.fixture(scope="module")
def llm(platform_name: str) -> Iterator[LLM]:
    with LLM(SHAPES_VL, platform=platform_name, max_num_seqs=MAX_NUM_SEQS, max_model_len=1024, enforce_eager=True,
             preprocessing_workers=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(platform_name: str) -> list[list[int]]:
    """One after the other, nothing prepared elsewhere or ahead."""
    with LLM(SHAPES_VL, platform=platform_name, max_num_seqs=MAX_NUM_SEQS, max_model_len=1024, enforce_eager=True,
             preprocessing_workers=0) as llm:
        return [llm.chat(conversation, GREEDY)[0].token_ids for conversation in CONVERSATIONS]


class Counted:
    """So many items without end, and how many of them were taken."""

    def __init__(self, items: list[Any], length: int):
        self._items = itertools.islice(itertools.cycle(items), length)
        self.num_taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self._items)
        self.num_taken += 1
        return item


def tokens_in_order(results: Any) -> list[list[int]]:
    found = dict(results)
    return [found[index].token_ids for index in range(len(found))]


def test_lists_and_iterators_of_any_kind_answer_alike(llm: LLM, expected: list[list[int]]) -> None:
    assert [output.token_ids for output in llm.chat(CONVERSATIONS, GREEDY)] == expected
    assert [output.token_ids for output in llm.chat(tuple(CONVERSATIONS), itertools.repeat(GREEDY))] == expected
    assert [output.token_ids for output in llm.chat(iter(CONVERSATIONS), [GREEDY] * len(expected))] == expected
    assert tokens_in_order(llm.chat(CONVERSATIONS, GREEDY, stream_results=True)) == expected
    assert tokens_in_order(llm.chat(iter(CONVERSATIONS), GREEDY, stream_results=True)) == expected
    ((index, alone),) = llm.chat(CONVERSATIONS[0], GREEDY, stream_results=True)
    assert (index, alone.token_ids) == (0, expected[0])
    assert llm.chat([], GREEDY) == llm.generate(iter(()), GREEDY) == list(llm.generate([], stream_results=True)) == []


def test_raw_prompts_stream_as_well(llm: LLM) -> None:
    prompts: list[Any] = ["which", [5, 6, 7], {"prompt": "what colour"}, llm.engine.processor.from_text("red"),
                          {"prompt": "<|image_pad|> which", "images": [EXAMPLES[0].images[0]]}, "red " * 1200]
    one_by_one = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts[:-1]]
    assert [output.token_ids for output in llm.generate(prompts[:-1], GREEDY)] == one_by_one
    assert tokens_in_order(llm.generate(iter(prompts[:-1]), GREEDY, stream_results=True)) == one_by_one
    with pytest.raises(RequestError, match=r"prompt 5: .*max_model_len"):
        llm.generate(prompts, GREEDY)


def test_results_come_as_they_finish(llm: LLM) -> None:
    params = [GREEDY.replace(max_tokens=count, ignore_eos=True) for count in (40, 2, 20, 4)]
    stream = llm.generate(["which"] * 4, params, stream_results=True)
    assert [(index, len(output.token_ids)) for index, output in stream] == [(1, 2), (3, 4), (2, 20), (0, 40)]


@pytest.mark.parametrize("has_images", [True, *only_full("texts alone; images among them stay", False)])
def test_an_iterator_is_read_as_the_work_goes_on(llm: LLM, has_images: bool) -> None:
    items = CONVERSATIONS if has_images else [[{"role": "user", "content": "which"}]]
    source = Counted(items, 100_000)
    most_ahead = MAX_NUM_SEQS + sum(rows_ahead(MAX_NUM_SEQS)) + 2
    stream = llm.chat(source, GREEDY, stream_results=True)
    assert source.num_taken == 0, "nothing is read before somebody asks"
    for num_finished, _ in enumerate(itertools.islice(stream, 60), 1):
        # Requests that finish in the same step are handed out one by one.
        assert source.num_taken <= num_finished + MAX_NUM_SEQS + most_ahead
    assert source.num_taken >= 60


def test_few_large_requests_are_read_ahead(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_service, "_FEW_AHEAD_BYTES", 1)
    source = Counted(CONVERSATIONS, 100_000)
    for num_finished, _ in enumerate(itertools.islice(llm.chat(source, GREEDY, stream_results=True), 20), 1):
        assert source.num_taken <= num_finished + 3 * MAX_NUM_SEQS


def test_a_slow_iterator_does_not_keep_what_is_there_waiting(llm: LLM) -> None:
    finished: list[int] = []
    seen_by_source: list[int] = []

    def source() -> Iterator[Any]:
        for _ in range(50):
            seen_by_source.append(len(finished))
            clock.advance(0.02)
            yield [{"role": "user", "content": "which"}]

    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("npu_runner.llm.prompt_service.time", clock)
        for index, _ in llm.chat(source(), GREEDY.replace(max_tokens=2), stream_results=True):
            finished.append(index)
    assert len(finished) == 50
    assert seen_by_source[20] > 0, "the first answers are there long before the iterator has filled what may wait"


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self._now = 0.0

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def monotonic(self) -> float:
        return self._now


def test_what_an_iterator_raises_reaches_the_caller_and_the_next_call_is_as_ever(
    llm: LLM, expected: list[list[int]]
) -> None:
    def source() -> Iterator[Any]:
        yield from CONVERSATIONS
        raise OSError("the table is gone")

    with pytest.raises(OSError, match="the table is gone"):
        list(llm.chat(source(), GREEDY, stream_results=True))
    assert [output.token_ids for output in llm.chat(CONVERSATIONS, GREEDY)] == expected


def test_a_bad_conversation_is_named_and_the_next_call_is_as_ever(llm: LLM, expected: list[list[int]]) -> None:
    for conversations in ([*CONVERSATIONS, NO_IMAGE], iter([*CONVERSATIONS, NO_IMAGE])):
        with pytest.raises(RequestError, match=r"prompt 4: messages\[0\].content\[0\]: not an image") as caught:
            llm.chat(conversations, GREEDY)
        assert (caught.value.code, caught.value.param) == ("image_not_recognised", "messages[0].content[0]")
        assert not llm.engine.has_unfinished_requests()
    assert [output.token_ids for output in llm.chat(CONVERSATIONS, GREEDY)] == expected


def test_what_shows_without_an_image_read_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.stats()
    fine: list[Any] = [[{"role": "user", "content": "which"}]] * 200  # more than may wait
    for bad, params in (([{"role": "user", "content": []}], GREEDY), ("x", GREEDY), (7, GREEDY),
                        (CONVERSATIONS[0], GREEDY.replace(stop_token_ids=[10**6]))):
        with pytest.raises(RequestError, match="prompt 200: "):
            llm.chat([*fine, bad], [GREEDY] * 200 + [params])
    for prompt in ({"images": []}, {"prompt": "x", "images": 7}):
        with pytest.raises(RequestError, match="prompt 200: "):
            llm.generate([*["x"] * 200, prompt], GREEDY)
    assert llm.stats().num_prefill_steps == before.num_prefill_steps


def test_errors_may_be_results_in_their_place(llm: LLM, expected: list[list[int]]) -> None:
    bad = [NO_IMAGE, [{"role": "user", "content": []}], [{"role": "user", "content": "red " * 3000}], 7]
    mixed = [item for pair in itertools.zip_longest(CONVERSATIONS, bad) for item in pair if item is not None]
    results = llm.chat(mixed, GREEDY, return_errors=True)
    failed = {index: output.error_code for index, output in enumerate(results) if output.finish_reason == "error"}
    assert failed == {1: "image_not_recognised", 3: "invalid_type", 5: "prompt_too_long", 7: "invalid_type"}
    assert all(results[index].error and results[index].text == "" for index in failed)
    assert [output.token_ids for output in results if output.finish_reason != "error"] == expected
    assert tokens_in_order(llm.chat(iter(mixed), GREEDY, return_errors=True, stream_results=True)) == [
        output.token_ids for output in results
    ]
    (refused,) = llm.generate("x", GREEDY.replace(stop_token_ids=[10**6]), return_errors=True)
    assert refused.error_code == "invalid_sampling_parameter"


def test_settings_have_to_be_as_many_as_the_prompts(llm: LLM) -> None:
    for params in ([GREEDY] * 2, [GREEDY] * 4):
        with pytest.raises(RequestError, match=f"{len(params)} sampling_params for 3 prompts"):
            llm.generate(["a"] * 3, params)
    for prompts in (["a"] * 3, iter(["a"] * 3)):
        with pytest.raises(RequestError, match="2 sampling_params for more prompts"):
            llm.generate(prompts, iter([GREEDY] * 2))
    assert len(llm.generate(["a"] * 3, iter([GREEDY] * 3))) == 3
    assert len(llm.generate(["a"] * 3, itertools.cycle([GREEDY, GREEDY.replace(max_tokens=2)]))) == 3


def test_what_is_no_list_of_prompts_is_named(llm: LLM) -> None:
    for nothing in (None, 7):
        with pytest.raises(RequestError, match="a list or an iterator is needed"):
            llm.chat(nothing, GREEDY)  # type: ignore[arg-type,call-overload]
    for text in ("hello", {"role": "user", "content": "x"}):
        with pytest.raises(RequestError, match="prompt 0: messages: a list is needed"):
            llm.chat(text, GREEDY)  # type: ignore[arg-type,call-overload]


def test_the_next_call_ends_a_stream_that_was_not_read_to_its_end(llm: LLM, expected: list[list[int]]) -> None:
    stream = llm.chat(itertools.cycle(CONVERSATIONS), GREEDY, stream_results=True)
    index, first = next(stream)
    assert first.token_ids == expected[index]
    assert [output.token_ids for output in llm.chat(CONVERSATIONS, GREEDY)] == expected
    with pytest.raises(RequestError, match="ended when the LLM was called again"):
        next(stream)
    assert [output.token_ids for output in llm.chat(CONVERSATIONS, GREEDY)] == expected
    assert llm.stats().kv_blocks_used == 0
    for _ in llm.chat(itertools.cycle(CONVERSATIONS), GREEDY, stream_results=True):
        break
    assert tokens_in_order(llm.chat(CONVERSATIONS, GREEDY, stream_results=True)) == expected


def test_draws_without_a_seed_do_not_depend_on_how_results_come(platform_name: str) -> None:
    free = SamplingParams(temperature=3, max_tokens=8, ignore_eos=True)
    found = []
    for stream in (False, True):
        with LLM(SHAPES_VL, platform=platform_name, max_num_seqs=2, max_model_len=256, enforce_eager=True) as llm:
            llm.generate(["x"], free)
            results = llm.generate(iter(["x"] * 5), free, stream_results=True) if stream else enumerate(
                llm.generate(["x"] * 5, free))
            found.append(tokens_in_order(results))
    assert found[0] == found[1]
    assert len({str(tokens) for tokens in found[0]}) == 5


def test_a_setting_that_is_none_is_told_its_neighbours() -> None:
    with pytest.raises(ConfigError, match=r"'preprocessing_worker'; did you mean preprocessing_workers"):
        LLM(SHAPES_VL, preprocessing_worker=2)
    for name, value in (("preprocessing_workers", -1), ("preprocessing_timeout", 0.0), ("max_media_bytes", 0),
                        ("max_prompt_media_bytes", 0), ("worker_memory_bytes", 1 << 20)):
        with pytest.raises(ConfigError, match=f"{name}: "):
            PreprocessingOptions(**{name: value})
