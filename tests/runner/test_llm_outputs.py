"""What a request gets back through the engine: log probabilities, seeds, stop strings, every finish reason."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.errors import RequestError
from npu_runner.llm.requests import _log_default_limit
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from tests.oracle import reference
from tests.oracle.running import SMALL, greedy, runner_of

PROMPTS = ["which", "what colour is the picture?", "a b c d e f g", "colour " * 40]
EOS = "<|im_end|>"


@torch.inference_mode()
def expected_logprobs(path: Path, llm: LLM, prompt: str, tokens: list[int]) -> torch.Tensor:
    ids = [*llm.engine.processor.from_text(prompt).token_ids, *tokens]
    logits = reference.load_model(path)(torch.tensor([ids])).logits[0]
    return logits[-len(tokens) - 1 : -1].log_softmax(-1)


# Penalties, bias and temperature move what is drawn, not the log probabilities, which are the model's own.
@pytest.mark.parametrize("changes", [
    {"temperature": 0.0},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "seed": 3},
    {"temperature": 0.0, "repetition_penalty": 1.8, "presence_penalty": 1.0, "logit_bias": {70: 5.0}},
], ids=["greedy", "drawn", "penalised"])  # fmt: skip
def test_logprobs_are_the_log_softmax_of_the_models_logits(changes: Any, path: Path, llm: LLM) -> None:
    counts = [0, 1, 5, 20]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, logprobs=count, **changes) for count in counts]
    for prompt, count, output in zip(PROMPTS, counts, llm.generate(PROMPTS, params), strict=True):
        expected = expected_logprobs(path, llm, prompt, output.token_ids)
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids) == 8
        for token, position, row in zip(output.token_ids, output.logprobs, expected, strict=True):
            assert position.sampled.token_id == token
            assert position.sampled.logprob == pytest.approx(row[token].item(), abs=1e-4)
            best = row.topk(count)
            assert [top.token_id for top in position.top] == best.indices.tolist()
            assert [top.logprob for top in position.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_without_asking_there_are_no_logprobs(llm: LLM) -> None:
    silent, loud = llm.generate(PROMPTS[:2], [greedy(4), SamplingParams(temperature=0, max_tokens=4, logprobs=2)])
    assert silent.logprobs is None
    assert loud.logprobs is not None


def texts_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.completions]


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(llm: LLM) -> None:
    drawn = SamplingParams(temperature=1.5, seed=11, n=3, max_tokens=10, ignore_eos=True)
    (alone,) = llm.generate([PROMPTS[1]], drawn)
    assert [completion.index for completion in alone.completions] == [0, 1, 2]
    assert len({tuple(tokens) for tokens in texts_of(alone)}) == 3, "each completion is drawn by itself"
    others = [drawn.replace(seed=5), SamplingParams(temperature=0.7, max_tokens=3), greedy(9)]
    crowd = llm.generate([PROMPTS[0], PROMPTS[2], PROMPTS[3], PROMPTS[1]], [*others, drawn])
    assert texts_of(crowd[-1]) == texts_of(alone)
    one_by_one = [llm.generate([PROMPTS[1]], drawn.replace(n=1, seed=11 + i))[0].token_ids for i in range(3)]
    assert one_by_one == texts_of(alone)
    assert texts_of(llm.generate([PROMPTS[1]], drawn.replace(seed=12))[0])[:2] == texts_of(alone)[1:]


def plain_tokens(llm: LLM) -> dict[int, float]:
    """A bias that leaves only tokens of ASCII letters, so that every text and every cut in it is printable."""
    tokenizer = llm.engine.processor.tokenizer
    words = {i: tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())}
    return {i: 60.0 for i, word in words.items() if word.isascii() and word.replace(" ", "").isalpha()}


def test_stop_strings_end_the_text_wherever_token_boundaries_fall(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=12, ignore_eos=True,
                          logit_bias=plain_tokens(llm))  # fmt: skip
    (whole,) = llm.generate([PROMPTS[1]], free)
    tokenizer = llm.engine.processor.tokenizer
    pieces = [tokenizer.decode([token]) for token in whole.token_ids]
    assert "".join(pieces) == whole.text
    assert any(len(piece) > 1 for piece in pieces)
    stops = [whole.text[i : i + length] for length in (1, 2, 3, 5) for i in range(len(whole.text) - length + 1)]
    outputs = llm.generate([PROMPTS[1]] * len(stops), [free.replace(stop=(stop, "never")) for stop in stops])
    ends_inside_a_token = 0
    for stop, output in zip(stops, outputs, strict=True):
        end = whole.text.index(stop)
        num_tokens = next(n for n in range(1, 13) if stop in "".join(pieces[:n]))
        assert (output.finish_reason, output.completions[0].stop_reason) == ("stop", stop)
        assert output.text == whole.text[:end]
        assert output.token_ids == whole.token_ids[:num_tokens]
        ends_inside_a_token += "".join(pieces[:num_tokens]) != whole.text[: end + len(stop)]
    assert ends_inside_a_token > 0
    (late,) = llm.generate([PROMPTS[1]], free.replace(stop=(whole.text[0],), min_tokens=6))
    assert len(late.token_ids) >= 6, "a stop string waits for min_tokens"


def only(output: RequestOutput) -> CompletionOutput:
    (completion,) = output.completions
    return completion


def test_length_stop_and_stop_tokens(llm: LLM) -> None:
    tokenizer = llm.engine.processor.tokenizer
    eos, other = tokenizer.token_to_id(EOS), tokenizer.token_to_id("x")
    short = SamplingParams(temperature=0, max_tokens=5)
    outputs = llm.generate([PROMPTS[0]] * 5, [
        short.replace(ignore_eos=True),
        short.replace(logit_bias={eos: 100.0}),
        short.replace(logit_bias={eos: 100.0}, ignore_eos=True),
        short.replace(logit_bias={eos: 100.0}, min_tokens=3),
        short.replace(logit_bias={other: 100.0}, stop_token_ids=(other,)),
    ])
    found = [(only(o).finish_reason, only(o).stop_reason, len(o.token_ids)) for o in outputs]
    assert found == [("length", None, 5), ("stop", None, 1), ("length", None, 5), ("stop", None, 4), ("stop", other, 1)]
    assert outputs[1].text == outputs[3].text[:0] == ""


def test_without_max_tokens_each_call_has_its_own(path: Path, platform_name: str,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    """16 for a raw prompt, as vLLM's SamplingParams() and OpenAI's /v1/completions have; what is left for a chat."""
    unsaid = SamplingParams(temperature=0, ignore_eos=True)
    _log_default_limit.cache_clear()
    with LLM(path, platform=platform_name, **{**SMALL, "max_model_len": 64}) as llm:
        def lengths(*params: SamplingParams) -> list[int]:
            results = llm.generate([PROMPTS[0]] * len(params), params)
            assert all(output.finish_reason == "length" for output in results)
            return [len(output.token_ids) for output in results]

        said = unsaid.replace(max_tokens=16)
        whole = unsaid.replace(max_tokens=llm.config.max_model_len)
        (output,) = llm.generate([PROMPTS[0]], whole)
        assert output.num_prompt_tokens + len(output.token_ids) == 64
        (output,) = llm.chat([{"role": "user", "content": PROMPTS[0]}], unsaid)
        assert (output.finish_reason, output.num_prompt_tokens + len(output.token_ids)) == ("length", 64)
        assert lengths(said) == [16]
        assert not caplog.records, "whoever names a limit hears nothing of it"
        assert lengths(unsaid, said, unsaid.replace(min_tokens=18)) == [16, 16, 18]
        assert lengths(unsaid) == [16]
        assert ["name no max_tokens" in record.getMessage() for record in caplog.records] == [True], "once a process"
        assert llm.get_default_sampling_params().max_tokens == 16
        assert llm.get_default_sampling_params(for_chat=True).max_tokens is None
        with pytest.raises(RequestError, match="prompt 0: the text has more than 64 tokens"):
            llm.generate([PROMPTS[3] * 2], greedy())


def run_to_end(llm: LLM) -> dict[str, RequestOutput]:
    finished = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            finished[output.request_id] = output
    return finished


def test_an_aborted_request_ends_at_once_and_harms_nobody(llm: LLM) -> None:
    (undisturbed,) = llm.generate([PROMPTS[0]], greedy(10))
    engine = llm.engine
    for name in ("stays", "running", "waiting"):
        if name == "waiting":
            for _ in range(4):
                engine.step()
        engine.add_request(name, engine.processor.from_text(PROMPTS[0]), greedy(10).replace(n=1 + (name != "stays")))
    engine.abort_request("running")
    engine.abort_request("waiting")
    engine.abort_request("waiting")
    engine.abort_request("never heard of")
    finished = run_to_end(llm)
    assert finished["stays"].token_ids == undisturbed.token_ids
    for name, num_tokens in (("running", range(1, 10)), ("waiting", range(1))):
        assert [completion.finish_reason for completion in finished[name].completions] == ["abort", "abort"]
        for completion in finished[name].completions:
            assert len(completion.token_ids) in num_tokens
            assert completion.token_ids == undisturbed.token_ids[: len(completion.token_ids)]
    assert llm.stats().kv_blocks_used == 0


def test_numbers_that_are_none_end_their_own_request_with_an_error(path: Path, platform_name: str) -> None:
    # A cache so small that every block is used again soon, and never as a known prefix.
    settings = {**SMALL, "max_model_len": 128, "block_size": 4, "kv_cache_bytes": 80 * 2 * 3 * 4 * 2 * 16 * 4}
    with LLM(path, platform=platform_name, enable_prefix_caching=False, **settings) as llm:
        before = [output.token_ids for output in llm.generate(PROMPTS, greedy())]
        poison = llm.engine.processor.tokenizer.token_to_id("Z")
        with torch.inference_mode():
            runner_of(llm).model.model.embed_tokens.weight[poison] = math.nan
        outputs = llm.generate([*PROMPTS[:2], "Z " * 30, *PROMPTS[2:]], greedy())
        bad = only(outputs.pop(2))
        assert (bad.finish_reason, bad.token_ids) == ("error", [])
        assert "not a number" in (bad.error or "")
        assert [output.token_ids for output in outputs] == before
        # Its blocks go to others, who must not see what it left there.
        prompts = [prompt + " " for prompt in PROMPTS * 3]
        assert all(output.finish_reason == "length" for output in llm.generate(prompts, greedy()))
        assert [output.token_ids for output in llm.generate(PROMPTS, greedy())] == before


def test_completions_of_a_request_share_its_prompt(llm: LLM) -> None:
    prompt = PromptInputs([5] * 900)
    llm.engine.add_request("warm", prompt, greedy(1))
    tracemalloc.start()
    try:
        for number in range(20):
            llm.engine.add_request(str(number), prompt, greedy(1).replace(n=128))
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        llm.engine.reset()
    # A copy of the ids would be 7,200 bytes for each.
    assert num_bytes / (20 * 128) < 5000
    assert not llm.engine.has_unfinished_requests()
