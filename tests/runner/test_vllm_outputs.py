"""What a result has under vLLM's names is what transformers says of the same prompt, and nothing is kept for it."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.engine.generation import LogprobsRecord
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.outputs import EmbeddingRequestOutput
from npu_runner.runner.base import StepLogprobs
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.oracle import reference
from tests.oracle.running import SMALL, greedy

PROMPT = "what colour is the picture?"
# A control token that a person typed is text in the prompt, as it was written.
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is <|im_end|> for?"}]


def test_a_result_has_its_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    for prompt, text in ((PROMPT, PROMPT), (ids, None), ({"prompt": PROMPT}, PROMPT), (np.array(ids), None)):
        (output,) = llm.generate(prompt, greedy(2))
        assert (output.prompt, output.prompt_token_ids, output.finished) == (text, ids, True)
        assert output.num_prompt_tokens == len(ids)
    (output,) = llm.generate([{"prompt": PROMPT, "images": [b"x"]}], greedy(2), return_errors=True)
    assert (output.error_code, output.prompt, output.prompt_token_ids) == ("model_has_no_vision", None, None)
    assert output.metrics is None


def test_of_a_conversation_the_prompt_is_what_the_template_wrote(llm: LLM) -> None:
    expected = llm.get_tokenizer().apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    (output,) = llm.chat(CHAT, greedy(2))
    assert output.prompt == expected


def test_an_image_stands_once_in_the_text_and_as_often_as_it_has_tokens_in_the_ids() -> None:
    example, processor = draw_example(TEST_SEEDS[0]), ChatProcessor(str(SHAPES_VL))
    prompt = processor(example.conversation())
    assert prompt.text is not None
    assert prompt.text.count("<|image_pad|>") == len(example.images)
    image_token = processor.tokenizer.token_to_id("<|image_pad|>")
    assert prompt.token_ids.count(image_token) == sum(image.num_tokens for image in prompt.images)


@torch.inference_mode()
def log_softmax(path: Path, ids: list[int], count: int) -> torch.Tensor:
    logits = reference.load_model(path)(torch.tensor([ids])).logits[0]
    return logits[-count - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_log_probabilities_are_vllms_dicts_of_transformers_numbers(count: int, path: Path, llm: LLM) -> None:
    drawn = SamplingParams(temperature=2.0, seed=3, max_tokens=8, ignore_eos=True, logprobs=count)
    (output,) = llm.generate(PROMPT, drawn)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    assert output.prompt_token_ids is not None
    rows = log_softmax(path, output.prompt_token_ids + completion.token_ids, 8)
    tokenizer = llm.get_tokenizer()
    for position, token, row in zip(completion.logprobs, completion.token_ids, rows, strict=True):
        assert list(position) == list(dict.fromkeys([token, *row.topk(count).indices.tolist()]))
        for token_id, found in position.items():
            assert found.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
            assert found.rank == int((row > row[token_id]).sum()) + 1
            assert found.decoded_token == tokenizer.decode([token_id])
        assert position.sampled is position[token]  # ours, for one release more
    assert completion.cumulative_logprob == pytest.approx(
        sum(row[token].item() for token, row in zip(completion.token_ids, rows, strict=True)), abs=1e-3)
    first = completion.logprobs[0][completion.token_ids[0]]
    shown = f"Logprob(logprob={first.logprob}, rank={first.rank}, decoded_token={first.decoded_token!r})"
    assert repr(completion.logprobs).startswith(f"[{{{completion.token_ids[0]}: {shown}")
    assert completion.finished()


def test_those_of_a_prompt_are_dicts_too(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, greedy(1).replace(prompt_logprobs=2))
    assert output.prompt_logprobs is not None
    assert output.prompt_token_ids is not None
    assert output.prompt_logprobs[0] is None
    for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert position is not None
        assert next(iter(position)) == token
        assert position.token is position[token]
        assert sorted(found.rank for found in position.values() if found.rank is not None)[:2] == [1, 2]
    assert repr(output.prompt_logprobs).startswith("[None, {")


def test_without_asking_there_is_no_sum(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, greedy(2))
    assert output.outputs[0].cumulative_logprob is None
    assert output.outputs[0].logprobs is None


def test_metrics_are_in_the_order_of_events(llm: LLM) -> None:
    begun = time.time()
    outputs = llm.generate([PROMPT] * 3, [greedy(2), greedy(9), greedy(5).replace(n=2)])
    for output, num_tokens in zip(outputs, (2, 9, 10), strict=True):
        metrics = output.metrics
        assert metrics is not None
        assert begun <= metrics.arrival_time <= time.time()
        assert metrics.queued_ts <= metrics.first_token_ts <= metrics.last_token_ts
        assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
        assert metrics.num_generation_tokens == num_tokens
    assert outputs[0].metrics.last_token_ts <= outputs[1].metrics.last_token_ts


def test_positions_of_twenty_take_no_more_than_their_numbers() -> None:
    """Before there were ranks a position took 168 bytes, of which a thousand rows of a thousand make 168 MB."""
    num_rows, num_tokens, num_top = 20, 1000, 20
    step = StepLogprobs([0], np.ones((1, 2 + 2 * num_top), dtype=np.int32))
    tracemalloc.start()
    try:
        kept = []
        for _ in range(num_rows):
            record = LogprobsRecord(num_top)
            for _ in range(num_tokens):
                record.append(step, 0)
            kept.append(record.finish([1] * num_tokens, lambda token: (str(token), b"")))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes / (num_rows * num_tokens) < 168 * 1.04
    assert kept[0][5][1].rank == 1


def test_a_vector_has_its_prompt_too(path: Path, platform_name: str) -> None:
    with LLM(path, platform=platform_name, runner="pooling", **SMALL) as llm:
        found: list[EmbeddingRequestOutput] = llm.embed([PROMPT])
    assert (found[0].prompt, found[0].finished) == (PROMPT, True)
    assert found[0].prompt_token_ids is not None
    assert found[0].metrics is not None
