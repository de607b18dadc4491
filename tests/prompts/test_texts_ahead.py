"""Raw texts that are encoded together become the prompts that each becomes alone, and fail as each fails alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from preprocessing_checkpoints import CORPUS, QWEN_SPECIAL

from npu_runner.errors import RequestError
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from npu_runner.prompts.tasks import PromptTask, text_task
from npu_runner.serving.endpoint import encode_ahead, prepare_prompt

PIECES = ["".join(CORPUS), *QWEN_SPECIAL, "<think>", "e\u0301", "\ufb01", "\u2028", "🏳️", "\x00", "  ", "\r\n", "한국어",
          "<s>", "</s>"]


def random_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)

    def piece() -> str:
        chosen = rng.choice(PIECES)
        start = rng.randrange(len(chosen))
        return chosen[start : start + rng.randint(1, 12)] if rng.random() < 0.7 else chosen[:60]

    return ["".join(piece() for _ in range(rng.randint(1, 9))) for _ in range(count)]


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_tokens_are_those_of_transformers(
        family: str, qwen: ChatProcessor, llama: ChatProcessor, hf_qwen: Any, hf_llama: Any) -> None:
    processor, tokenizer = {"qwen": (qwen, hf_qwen.tokenizer), "llama": (llama, hf_llama)}[family]
    images = (processor._vision.image_token or "<no image>", "<|video_pad|>")
    texts = [text for text in random_texts(1, 400) if not any(image in text for image in images)]
    assert len(texts) > 300
    encode_ahead(processor, map(text_task, texts))
    assert set(processor._chat.control._ahead) == set(texts)
    for text in texts:
        made = prepare_prompt(processor, text_task(text)).prompt
        assert (made.token_ids, made.text) == (tokenizer(text)["input_ids"], text)


def outcome(processor: ChatProcessor, task: PromptTask) -> str:
    prepared = prepare_prompt(processor, task)
    return repr(prepared.prompt if prepared.error is None else (prepared.error.code, prepared.error.message))


def test_what_fails_alone_fails_so_among_others(qwen_folder: Path) -> None:
    def make() -> ChatProcessor:
        return ChatProcessor(str(qwen_folder), ProcessorSettings(max_model_len=50))

    items: list[Any] = ["", "x" * 3000, "a\ud800", "<|image_pad|>", [5] * 60, [5, 6], [-1], 7, "again", "again",
                        {"prompt": "of an object"}, {"prompt": "with an image", "images": [b"no image"]},
                        *random_texts(2, 30)]
    tasks = [text_task(item) for item in items]
    alone = [outcome(make(), task) for task in tasks]
    together = make()
    encode_ahead(together, tasks)
    assert [outcome(together, task) for task in tasks] == alone
    encode_ahead(together, tasks[:2] + tasks[3:])  # without the one that the tokenizer refuses
    assert together._chat.control._ahead
    assert [outcome(together, task) for task in tasks] == alone
    assert sum(each.startswith("(") for each in alone) >= 8


def test_long_texts_are_left_to_their_turn(qwen: ChatProcessor) -> None:
    encode_ahead(qwen, [text_task("x" * 5000), text_task("short")])
    assert set(qwen._chat.control._ahead) == {"short"}
    encode_ahead(qwen, [])
    assert not qwen._chat.control._ahead


def test_one_that_the_tokenizer_refuses_is_named(qwen: ChatProcessor) -> None:
    encode_ahead(qwen, map(text_task, ["fine", "a\ud800"]))
    assert qwen.from_text("fine").token_ids
    with pytest.raises(RequestError, match="not valid Unicode"):
        qwen.from_text("a\ud800")
