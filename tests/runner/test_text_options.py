"""What of the tokens becomes text: special tokens and stops, kept or not. Oracle: the tokenizer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from npu_runner import LLM, SamplingParams

EOS, PAD = "<|im_end|>", "<|endoftext|>"
PROMPT = "what colour is the picture?"


def special_now_and_then(llm: LLM, **changes: Any) -> SamplingParams:
    """Draws that mix special tokens, which end nothing, into letters."""
    tokenizer = llm.engine.processor.tokenizer
    ids = [tokenizer.token_to_id(token) for token in (EOS, PAD, "a", "b", "c")]
    return SamplingParams(temperature=5.0, seed=2, max_tokens=24, ignore_eos=True,
                          logit_bias={token: 90.0 for token in ids}, **changes)


@pytest.mark.parametrize("skips", [True, False])
def test_special_tokens_are_text_only_where_they_are_not_skipped(skips: bool, llm: LLM, path: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    (output,) = llm.generate([PROMPT], special_now_and_then(llm, skip_special_tokens=skips))
    assert output.text == theirs.decode(output.token_ids, skip_special_tokens=skips)
    assert (EOS in output.text) is (PAD in output.text) is not skips


def test_a_stop_string_is_in_the_text_only_where_it_is_included(llm: LLM) -> None:
    free = special_now_and_then(llm)
    (whole,) = llm.generate([PROMPT], free)
    stop = whole.text[4:6]
    end = whole.text.index(stop)
    without, included = llm.generate(
        [PROMPT] * 2, [free.replace(stop=stop), free.replace(stop=stop, include_stop_str_in_output=True)])
    assert (without.text, included.text) == (whole.text[:end], whole.text[: end + len(stop)])
    assert without.token_ids == included.token_ids
    assert included.completions[0].stop_reason == stop


def test_a_stop_string_may_be_a_special_token_that_is_not_skipped(llm: LLM) -> None:
    shown = special_now_and_then(llm, skip_special_tokens=False, stop=[PAD])
    hidden = shown.replace(skip_special_tokens=True)
    stopped, unstopped = llm.generate([PROMPT] * 2, [shown, hidden])
    assert (stopped.finish_reason, unstopped.finish_reason) == ("stop", "length")
    assert PAD not in stopped.text


# vLLM's rule: the token that ends an answer is decoded only if stops are included; if special, only if not skipped.
@pytest.mark.parametrize(("included", "skips", "expected"), [
    (False, True, ""), (False, False, ""), (True, True, ""), (True, False, EOS),
])  # fmt: skip
def test_the_end_token_is_in_the_text_only_where_stops_and_special_tokens_are(
    included: bool, skips: bool, expected: str, llm: LLM
) -> None:
    eos = llm.engine.processor.tokenizer.token_to_id(EOS)
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={eos: 100.0}, skip_special_tokens=skips,
                            include_stop_str_in_output=included)
    (output,) = llm.generate([PROMPT], params)
    assert (output.text, output.finish_reason, output.token_ids) == (expected, "stop", [eos])


def test_a_stop_token_that_is_a_word_is_in_the_text_where_stops_are_included(llm: LLM) -> None:
    word = llm.engine.processor.tokenizer.token_to_id("x")
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={word: 100.0}, stop_token_ids=[word])
    without, included = llm.generate([PROMPT] * 2, [params, params.replace(include_stop_str_in_output=True)])
    assert (without.text, included.text) == ("", "x")
