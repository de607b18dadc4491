"""Rows of /v1/completions: OpenAI's types say what a request and an answer are, LLM.generate what stands in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.completion_create_params import CompletionCreateParamsBase, CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.batch.rows.completions import CompletionBody, CompletionForm
from npu_runner.batch.rows.endpoint import RequestBody
from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.batch.rows.openai_response import JobStamp, answer_row
from npu_runner.cli import main as cli
from npu_runner.errors import RequestError
from npu_runner.request.logprobs import Logprob, PositionLogprobs
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from tests.batch.random_completions import COMPLETIONS
from tests.batch.scripted import ScriptedProcessor, completion_row, prepared, read_rows, row, write_rows

OPENAI_BODY = TypeAdapter(CompletionCreateParamsNonStreaming)
STAMP = JobStamp(created=1_700_000_000, system_fingerprint="fp_1", model_name="shapes-vl", splits_reasoning=True)
# Ours, after vLLM, and metadata, which OpenAI has for chats alone.
EXTRAS = {"top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "bad_words", "ignore_eos", "metadata",
          "include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens", "response_format",
          "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "prompt_logprobs",
          "repetition_detection", "no_repeat_ngram_size", "no_repeat_ngram_window", "no_repeat_ngram_exempt_ids",
          "allowed_token_ids"}
SMALL = ["--platform", "cpu", "--max-model-len", "1024", "--kv-cache-bytes", "64M", "--progress", "off"]

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
PROMPTS = st.one_of(TEXT, st.lists(st.integers(0, 99), min_size=1, max_size=4))
BODIES = st.fixed_dictionaries(
    {"model": TEXT, "prompt": st.one_of(PROMPTS, PROMPTS.map(lambda prompt: [prompt]))},
    optional={
        "best_of": st.just(1),
        "echo": st.booleans(),
        "max_tokens": st.integers(1, 99),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "n": st.integers(1, 4),
        "stop": st.one_of(st.text("ab", min_size=1), st.lists(st.text("ab", min_size=1), max_size=4)),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.integers(-100, 100), max_size=2),
        "suffix": st.none(),
        "user": TEXT,
        "stream": st.just(False),
    },
)


def parsed(body: dict[str, Any]) -> RequestBody:
    return parse_row({**completion_row("a"), "body": body})


@given(BODIES)
def test_served_bodies_are_openai_bodies_and_keep_their_values(body: dict[str, Any]) -> None:
    OPENAI_BODY.validate_python(body)
    ours = parsed(json.loads(json.dumps(body)))
    assert isinstance(ours, CompletionBody)
    (prompt,) = [body["prompt"]] if isinstance(body["prompt"], str) or isinstance(body["prompt"][0], int) \
        else body["prompt"]
    assert ours.prompt == prompt
    params = ours.to_params({}, fallback_seed=7)
    for name in ("temperature", "top_p", "n", "presence_penalty", "frequency_penalty"):
        if name in body:
            assert getattr(params, name) == body[name]
    assert (params.seed, params.max_tokens) == (body.get("seed", 7), body.get("max_tokens", 16))


def test_every_field_is_openais_or_a_named_extra_and_every_one_of_openais_is_known() -> None:
    openais = set(CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert set(CompletionBody.model_fields) - EXTRAS <= openais
    for name in openais - set(CompletionBody.model_fields):
        with pytest.raises(RequestError) as caught:
            parse_row(completion_row("a", **{name: "something"}))
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


def test_the_endpoints_default_of_max_tokens_goes_before_the_checkpoints() -> None:
    assert parsed({"prompt": "a"}).to_params({"max_tokens": 500}, 0).max_tokens == 16
    assert parsed({"prompt": "a", "min_tokens": 20}).to_params({}, 0).max_tokens == 20


BAD_BODIES = [
    ({"prompt": None}, "invalid_type", "prompt"),
    ({"prompt": []}, "invalid_type", "prompt"),
    ({"prompt": 5}, "invalid_type", "prompt"),
    ({"prompt": [1, "a"]}, "invalid_type", "prompt"),
    ({"prompt": [1.0]}, "invalid_type", "prompt"),
    ({"prompt": [True]}, "invalid_type", "prompt"),
    ({"prompt": ["a", "b"]}, "unsupported_value", "prompt"),
    ({"prompt": [[1], [2]]}, "unsupported_value", "prompt"),
    ({"prompt": [["a"]]}, "invalid_type", "prompt"),
    ({"suffix": "end"}, "unsupported_parameter", "suffix"),
    ({"best_of": 2}, "unsupported_parameter", "best_of"),
    ({"multi_modal_data": {"video": "a.mp4"}}, "unsupported_parameter", "multi_modal_data"),
    ({"mm_processor_kwargs": {"fps": 1}}, "unsupported_parameter", "mm_processor_kwargs"),
    ({"stream": True}, "unsupported_parameter", "stream"),
    ({"logprobs": 21}, "invalid_sampling_parameter", "logprobs"),
    ({"logprobs": True}, "invalid_type", "logprobs"),
    ({"logprobs": 0, "echo": True, "prompt_logprobs": 1}, "invalid_value", "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "invalid_sampling_parameter", "prompt_logprobs"),
    ({"max_tokens": 0}, "invalid_sampling_parameter", "max_tokens"),
    ({"messages": []}, "unknown_parameter", "messages"),
    ({"chat_template_kwargs": {}}, "unknown_parameter", "chat_template_kwargs"),
]


@pytest.mark.parametrize(("change", "code", "param"), BAD_BODIES, ids=lambda value: str(value)[:40])
def test_a_wrong_body_is_refused_and_the_field_named(change: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed({"prompt": "x", **change}).to_params({}, 0)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert param in caught.value.message


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(RequestError) as caught:
        parsed({"temperature": 0})
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", "prompt")


@given(st.lists(COMPLETIONS, min_size=1, max_size=3), st.text(st.characters(codec="utf-8"), max_size=4))
def test_every_answer_is_a_completion_of_openais(completions: list[CompletionOutput], echo: str) -> None:
    output = RequestOutput("a", completions, 5)
    data = answer_row(output, custom_id="a", form=CompletionForm(model="mine", echo=echo), stamp=STAMP)
    body = json.loads(data)["response"]["body"]
    answer = Completion.model_validate_json(json.dumps(body), strict=True)
    assert answer.model_extra == {}
    assert (answer.object, answer.model) == ("text_completion", "mine")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(item.token_ids) for item in completions)
    for choice, ours in zip(answer.choices, completions, strict=True):
        assert (choice.text, choice.finish_reason) == (echo + ours.text, ours.finish_reason)
        assert (choice.logprobs is None) == (ours.logprobs is None)
        if choice.logprobs is None or ours.logprobs is None:
            continue
        lists = (choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs,
                 choice.logprobs.text_offset)
        assert [len(values or []) for values in lists] == [len(ours.logprobs)] * 4
        for name, top, position in zip(lists[0] or [], lists[2] or [], ours.logprobs, strict=True):
            assert name in top
            assert len(top) <= 1 + len(position.top)


def position(data: bytes, *top: tuple[bytes, float]) -> PositionLogprobs:
    tokens = [Logprob(0, raw.decode(errors="replace"), value, raw) for raw, value in ((data, -1.0), *top)]
    return PositionLogprobs(tokens[0], tuple(tokens[1:]))


def test_parts_of_characters_are_told_apart_and_offsets_count_characters() -> None:
    pieces = [b"a", b"\xe6\x97", b"\xa5", b" b"]
    logprobs = [position(piece, (b"\xe6\x97", -2.0), (b"\xe6", -3.0)) for piece in pieces]
    output = RequestOutput("a", [CompletionOutput(0, "a\u65e5 b", [1] * 4, "stop", logprobs=logprobs)])
    found = json.loads(answer_row(output, custom_id="a", form=CompletionForm(), stamp=STAMP))
    written = found["response"]["body"]["choices"][0]["logprobs"]
    assert written["tokens"] == ["a", "bytes:\\xe6\\x97", "bytes:\\xa5", " b"]
    assert written["text_offset"] == [0, 1, 1, 2]
    assert written["top_logprobs"][0] == {"a": -1.0, "bytes:\\xe6\\x97": -2.0, "bytes:\\xe6": -3.0}


def test_an_echo_is_the_prompt_as_text() -> None:
    for prompt in ("hello", [104, 101, 108, 108, 111]):
        result = prepared(json.dumps(completion_row("a", prompt, echo=True)).encode(), ScriptedProcessor())
        assert result.error is None
        assert result.form == CompletionForm(echo="hello")
    silent = prepared(json.dumps(completion_row("a")).encode(), ScriptedProcessor())
    assert silent.error is None
    assert silent.form == CompletionForm()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(SHAPES_VL, platform="cpu", max_model_len=1024, kv_cache_bytes=64 << 20) as llm:
        yield llm


def test_a_job_of_both_endpoints_answers_as_generate_and_chat_do(tmp_path: Path, llm: LLM) -> None:
    prompt = "<|im_start|>user\nWhat is a circle?<|im_end|>\n<|im_start|>assistant\n"
    ids = llm.engine.processor.from_text(prompt).token_ids
    write_rows(tmp_path / "in.jsonl", [
        completion_row("text", prompt, logprobs=2),
        completion_row("ids", ids, n=2, max_tokens=30),
        completion_row("echo", prompt, echo=True, max_tokens=5),
        row("chat", "What is a circle?", max_tokens=16),
        completion_row("bad", [10**6]),
    ])  # fmt: skip
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert cli.main(["batch", *arguments, "--report", str(tmp_path / "page.html"), *SMALL]) == 3
    found = {item["custom_id"]: item for item in read_rows(tmp_path / "out.jsonl")}
    bodies = {name: item["response"]["body"] for name, item in found.items()}
    assert (found["bad"]["error"]["code"], found["bad"]["error"]["param"]) == ("invalid_type", "prompt")

    greedy = SamplingParams(temperature=0, max_tokens=16)
    (expected,) = llm.generate([prompt], greedy.replace(logprobs=2))
    (choice,) = Completion.model_validate(bodies["text"], strict=True).choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
    assert choice.logprobs is not None
    assert expected.logprobs is not None
    assert choice.logprobs.token_logprobs == [item.sampled.logprob for item in expected.logprobs]
    for token, offset in zip(choice.logprobs.tokens or [], choice.logprobs.text_offset or [], strict=True):
        assert choice.text[offset:].startswith(token) or offset == len(choice.text)

    (two,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=30, n=2))
    assert [choice["text"] for choice in bodies["ids"]["choices"]] == [item.text for item in two.completions]
    assert bodies["echo"]["choices"][0]["text"] == prompt + llm.generate([prompt], greedy.replace(max_tokens=5))[0].text
    assert bodies["chat"]["choices"][0]["message"]["content"] == expected.text
    assert bodies["text"]["usage"]["prompt_tokens"] == len(ids) == bodies["chat"]["usage"]["prompt_tokens"]
    assert "What is a circle?" in (tmp_path / "page.html").read_text()
