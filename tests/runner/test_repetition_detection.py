"""An answer that repeats itself ends: as vLLM's rule says, whatever runs beside it, and at the same token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from npu_runner import LLM, RepetitionDetectionParams, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.core.sequence import Sequence
from npu_runner.engine.generation import Generation
from npu_runner.errors import RequestError
from npu_runner.request.outputs import REPETITION_DETECTED, CompletionOutput, RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.repetition_detector import RepetitionDetector
from tests.full_set import only_full

SMALL: dict[str, Any] = {"platform": "cpu", "dtype": "float32", "max_model_len": 192, "max_num_seqs": 4,
                         "kv_cache_bytes": 8 << 20, "preprocessing_workers": 0}  # fmt: skip
DETECTION = {"max_pattern_size": 20, "min_count": 3}
PROMPTS = ["circle", "a red square", "red red red red red"]
FREE = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
GUARDED = FREE.replace(repetition_detection=DETECTION)


def repeats(tokens: list[int], *, most: int, least: int, count: int) -> bool:
    """The definition: the tail is one pattern of `least` to `most` tokens, `count` times."""
    return any(len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
               for size in range(least, most + 1))  # fmt: skip


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_the_rule_is_vllms(num_tokens: int) -> None:
    rng = random.Random(num_tokens)
    found = 0
    for _ in range(3000):
        least, count = rng.randint(0, 3), rng.randint(2, 4)
        most = least + rng.randint(0, 5) or 1
        tokens = rng.choices(range(num_tokens), k=rng.randint(0, 24))
        expected = repeats(tokens, most=most, least=max(1, least), count=count)
        params = RepetitionDetectionParams(max_pattern_size=most, min_pattern_size=least, min_count=count)
        assert params.is_repetition(tokens) == expected, (tokens, params)
        detector = RepetitionDetector(params)
        assert [detector.append(token) for token in tokens] == [
            repeats(tokens[:num], most=most, least=max(1, least), count=count)
            for num in range(1, len(tokens) + 1)], (tokens, params)
        found += expected
    assert found > 300


class ReadTokens(list[int]):
    """Counts the tokens that are read from it."""

    num_read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found


def test_a_token_is_compared_with_as_many_as_the_longest_pattern_has() -> None:
    """An answer that nearly repeats itself at all sizes costs no more than any other."""
    params = SamplingParams(detokenize=False, repetition_detection={
        "max_pattern_size": 64, "min_pattern_size": 24, "min_count": 60})  # fmt: skip
    sequence = Sequence(0, 0, "0", 0, PromptInputs([1]), params, 0)
    generation = Generation(sequence, Tokenizer(WordLevel()), frozenset())
    tokens = sequence.output_token_ids = ReadTokens()
    for place in range(6000):
        tokens.num_read = 0
        assert generation.append(6 if place % 1399 == 1 else 5, None, 0) is None
        assert tokens.num_read <= 64, f"{tokens.num_read} tokens read for token {place}"
    assert generation._detector is not None
    sizes = [array.size for array in vars(generation._detector).values() if isinstance(array, np.ndarray)]
    assert max(sizes) <= 64, "each is passed over once for a token"


def first_end(tokens: list[int], *, least: int = 1, min_tokens: int = 0) -> int | None:
    """After so many tokens the answer ends."""
    return next((num for num in range(max(1, min_tokens), len(tokens))
                 if repeats(tokens[:num], most=20, least=least, count=3)), None)  # fmt: skip


def assert_ended(completion: CompletionOutput, free: list[int], **rule: int) -> bool:
    """It is the answer without the rule, up to where the rule ends it; returns whether it does."""
    end = first_end(free, **rule)
    assert completion.token_ids == free[:end]
    assert completion.finish_reason == "length"
    assert completion.stop_reason == (None if end is None else REPETITION_DETECTED)
    assert (completion.is_repetition, completion.is_cut_off) == (end is not None, end is None)
    return end is not None


@pytest.fixture(scope="module", params=[True, *only_full("one step under way; two stay, as by default", False)],
                ids=["two steps", "one step"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(SHAPES_VL), async_scheduling=request.param, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def free(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, FREE)]


def test_it_ends_at_the_first_token_that_completes_a_repetition(llm: LLM, free: list[list[int]]) -> None:
    ended = [assert_ended(output.completions[0], tokens)
             for output, tokens in zip(llm.generate(PROMPTS, GUARDED), free, strict=True)]
    assert any(ended), "another model: none of its answers repeats itself"


def test_min_tokens_and_longer_patterns_let_it_go_on(llm: LLM, free: list[list[int]]) -> None:
    for fields in ({"min_tokens": 31}, {"least": 3}):
        detection = {**DETECTION, "min_pattern_size": fields.get("least", 0)}
        params = GUARDED.replace(repetition_detection=detection, min_tokens=fields.get("min_tokens", 0))
        for output, tokens in zip(llm.generate(PROMPTS, params), free, strict=True):
            assert_ended(output.completions[0], tokens, **fields)


def test_each_of_several_answers_ends_by_itself_and_beside_rows_without_the_rule(llm: LLM) -> None:
    drawn = FREE.replace(temperature=0.6, seed=3, n=4)
    asked = [drawn, drawn.replace(repetition_detection=DETECTION)]
    expected, found = llm.generate([PROMPTS[0]] * 2, asked)
    ended = [assert_ended(one, other.token_ids)
             for one, other in zip(found.completions, expected.completions, strict=True)]
    assert len(set(ended)) == 2, "some end, and some do not"
    streamed: dict[int, RequestOutput] = dict(llm.generate(iter([PROMPTS[0]] * 2), asked, stream_results=True))
    assert [each.token_ids for each in streamed[1].completions] == [each.token_ids for each in found.completions]


def test_the_limit_comes_first_at_the_same_token(llm: LLM, free: list[list[int]]) -> None:
    index, end = next((index, end) for index, tokens in enumerate(free) if (end := first_end(tokens)) is not None)
    (limit,) = llm.generate([PROMPTS[index]], GUARDED.replace(max_tokens=end))
    assert (limit.finish_reason, limit.completions[0].stop_reason) == ("length", None)
    assert len(limit.token_ids) == end


def test_an_interrupt_changes_no_end(llm: LLM, free: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences restart with the tokens that are booked, and are looked at anew."""
    engine, calls = llm.engine, chain([None] * 9, [KeyboardInterrupt], repeat(None))
    collect = engine._collect

    def interrupted() -> None:
        collect()
        if (error := next(calls)) is not None:
            raise error

    monkeypatch.setattr(engine, "_collect", interrupted)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), engine.processor.from_text(prompt), GUARDED)
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        try:
            found.update({output.request_id: output for output in engine.step()})
        except KeyboardInterrupt:
            continue
    for number, tokens in enumerate(free):
        assert_ended(found[str(number)].completions[0], tokens)


@pytest.mark.parametrize(("fields", "words"), [
    ({"max_pattern_size": 3, "min_count": 1}, "repetition_detection.min_count: 1 is less than 2"),
    ({"max_pattern_size": 3}, "repetition_detection.min_count: 0 is less than 2"),
    ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2},
     "min_pattern_size: 4 is more than max_pattern_size 3"),
    ({"max_pattern_size": -1, "min_count": 2}, "max_pattern_size: -1 is negative"),
    ({"max_pattern_size": 513, "min_count": 2}, "max_pattern_size: 513 tokens, at most 512 are allowed"),
    ({"max_pattern_size": "3", "min_count": 2}, "max_pattern_size: '3' is not an integer"),
    ({"max_size": 3}, "repetition_detection.max_size: unknown field; max_pattern_size, min_pattern_size, min_count"),
    ([3, 1, 2], "repetition_detection: an object is needed, not list"),
])  # fmt: skip
def test_wrong_fields_are_named(fields: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams(repetition_detection=fields)


def test_nothing_is_looked_for_in_patterns_of_no_tokens() -> None:
    assert SamplingParams(repetition_detection={"max_pattern_size": 0}).repetition_detection is None
