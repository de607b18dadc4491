"""Bad words become token ids where prompts are prepared, as transformers spells them; ids the model lacks are named."""

from __future__ import annotations

import json
import shutil

import pytest

from npu_runner.assets import SHAPES_VL
from npu_runner.errors import RequestError
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.sampling_params import SamplingParams

WORDS = ["red", "circle", "a b", "\u4f60", "redred"]


@pytest.fixture(scope="module")
def processor() -> ChatProcessor:
    return ChatProcessor(str(SHAPES_VL))


def test_both_spellings_of_a_word_are_transformers(processor: ChatProcessor) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHAPES_VL)
    spellings = [space + word for word in WORDS for space in ("", " ")]
    expected = {tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings}
    params = processor.resolve_params(SamplingParams(bad_words=WORDS))
    assert list(params.bad_words_token_ids) == sorted(expected)
    assert params.bad_words == tuple(WORDS)
    assert processor.resolve_params(params) is params, "twice is once"


def test_words_and_ids_are_banned_together(processor: ChatProcessor) -> None:
    words = processor.resolve_params(SamplingParams(bad_words=["red"])).bad_words_token_ids
    both = processor.resolve_params(SamplingParams(bad_words=["red"], bad_words_token_ids=[[3, 4], [2]]))
    assert set(both.bad_words_token_ids) == {*words, (3, 4), (2,)}
    assert processor.resolve_params(both) is both, "twice is once"


def test_without_bad_words_nothing_is_changed(processor: ChatProcessor) -> None:
    params = SamplingParams(temperature=0, stop=["x"])
    assert processor.resolve_params(params) is params


@pytest.fixture(scope="module")
def one_id_more(tmp_path_factory: pytest.TempPathFactory) -> ChatProcessor:
    """A tokenizer with one id more than the model, as trained checkpoints have it now and then."""
    folder = tmp_path_factory.mktemp("more") / "model"
    shutil.copytree(SHAPES_VL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab_size = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    tokenizer["added_tokens"].append({
        "id": vocab_size, "content": "<|extra|>", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": False,
    })  # fmt: skip
    tokenizer["model"]["vocab"]["<|extra|>"] = vocab_size
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    made = ChatProcessor(str(folder))
    assert made.tokenizer.token_to_id("<|extra|>") == made.vocab_size == vocab_size
    return made


@pytest.mark.parametrize("field", ["bad_words", "bad_words_token_ids", "logit_bias", "stop_token_ids"])
def test_an_id_that_the_model_lacks_is_refused_by_name(one_id_more: ChatProcessor, field: str) -> None:
    assert one_id_more.vocab_size is not None
    last = one_id_more.vocab_size - 1
    asked = {
        "bad_words": SamplingParams(bad_words=["red", "<|extra|>"]),
        "bad_words_token_ids": SamplingParams(bad_words_token_ids=[[last], [1, last + 1]]),
        "logit_bias": SamplingParams(logit_bias={last: 1, last + 1: 1}),
        "stop_token_ids": SamplingParams(stop_token_ids=[last + 1]),
    }[field]
    with pytest.raises(RequestError, match=f"token id {last + 1} is asked for, the model has 0 to {last}") as caught:
        one_id_more.resolve_params(asked)
    assert (caught.value.code, caught.value.param) == ("invalid_sampling_parameter", field)
    one_id_more.resolve_params(SamplingParams(logit_bias={last: 1}, stop_token_ids=[last], bad_words=["red"]))
