"""LLM.generate over many texts: tokens ahead of the engine change no answer, and a row that fails touches no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=3)
# More than are encoded together, and short ones beside long ones.
TEXTS = [f"What colour is shape {number}?" * (number % 7 + 1) for number in range(300)]
REFUSED = {20: "a\ud800", 290: "<|image_pad|>", 299: "long " * 3000}


@pytest.fixture(scope="module")
def llm(platform_name: str) -> Iterator[LLM]:
    with LLM(SHAPES_VL, platform=platform_name, max_num_seqs=16, max_model_len=512, enforce_eager=True,
             preprocessing_workers=0) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[int, tuple[list[int], list[int]]]:
    """Prompt and answer of some texts, each in a call of its own, given as the tokenizer's ids."""
    answers = {}
    for index in (0, 6, 19, 21, 150, 255, 256, 291, 298):
        token_ids = llm.processor.tokenizer.encode(TEXTS[index]).ids
        answers[index] = token_ids, llm.generate([token_ids], GREEDY)[0].token_ids
    return answers


def test_answers_are_those_of_single_calls(llm: LLM, alone: dict[int, tuple[list[int], list[int]]]) -> None:
    texts = [REFUSED.get(index, text) for index, text in enumerate(TEXTS)]
    found = llm.generate(texts, GREEDY, return_errors=True)
    assert {index for index, output in enumerate(found) if output.error} == set(REFUSED)
    codes = ["invalid_unicode", "image_count_mismatch", "prompt_too_long"]
    assert [found[index].error_code for index in REFUSED] == codes
    for index, expected in alone.items():
        assert (found[index].prompt_token_ids, found[index].token_ids) == expected
    with pytest.raises(RequestError, match="prompt 20: "):
        llm.generate(texts, GREEDY)


def test_a_dropped_or_interrupted_call_leaves_no_tokens_behind(
        llm: LLM, alone: dict[int, tuple[list[int], list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    results = llm.generate([f"other {text}" for text in TEXTS], GREEDY, stream_results=True)
    next(results)
    results.close()
    step, calls = llm.engine.step, iter(range(100))

    def interrupted() -> list:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([f"more {text}" for text in TEXTS], GREEDY)
    found = llm.generate(TEXTS[::-1], GREEDY)
    for index, expected in alone.items():
        output = found[len(TEXTS) - 1 - index]
        assert (output.prompt_token_ids, output.token_ids) == expected
