"""Rows: what OpenAI's own types accept and we serve is accepted, everything else is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

from npu_runner.batch.rows.chat import ChatBody
from npu_runner.batch.rows.openai_format import parse_row, read_json, refuse_half_characters
from npu_runner.batch.rows.shape import name_of
from npu_runner.errors import RequestError
from npu_runner.request.sampling_params import SamplingParams
from tests.batch.scripted import completion_row, row

OPENAI_BODY = TypeAdapter(CompletionCreateParamsNonStreaming)
# Ours, after vLLM; OpenAI's types know nothing of them.
EXTRAS = {"top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "bad_words", "ignore_eos",
          "chat_template_kwargs", "include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens",
          "add_generation_prompt", "continue_final_message", "structured_outputs", "guided_json", "guided_regex",
          "guided_choice", "guided_grammar", "max_thinking_tokens", "prompt_logprobs",
          "mm_processor_kwargs", "repetition_detection", "no_repeat_ngram_size", "no_repeat_ngram_window",
          "no_repeat_ngram_exempt_ids", "allowed_token_ids"}

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "auto"}}
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
PARTS = st.lists(st.one_of(st.just(IMAGE), TEXT.map(lambda text: {"type": "text", "text": text})), max_size=3)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": st.none(), "tool_calls": st.just([CALL])},
            optional={"refusal": st.none(), "audio": st.none(), "function_call": st.none(), "name": TEXT},
        ),
        st.fixed_dictionaries({"role": st.just("tool"), "content": TEXT, "tool_call_id": TEXT}),
        st.fixed_dictionaries({"role": st.sampled_from(["system", "developer", "assistant"]), "content": TEXT}),
        st.fixed_dictionaries({"role": st.just("user"), "content": st.one_of(TEXT, PARTS)}),
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {"model": TEXT, "messages": MESSAGES},
    optional={
        "max_tokens": st.integers(1, 99),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "n": st.integers(1, 4),
        "stop": st.one_of(st.text("ab", min_size=1), st.lists(st.text("ab", min_size=1), max_size=4)),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.integers(-100, 100), max_size=2),
        "logprobs": st.just(True),
        "metadata": st.dictionaries(st.text("abc", max_size=3), TEXT, max_size=2),
        "user": TEXT,
        "stream": st.just(False),
        "tools": st.one_of(st.none(), st.just([TOOL])),
        "tool_choice": st.sampled_from(["none", "auto"]),
        "parallel_tool_calls": st.booleans(),
        "reasoning_effort": st.sampled_from(["none", "minimal", "low", "medium", "high", "xhigh", "max", None]),
        "response_format": st.sampled_from([
            {"type": "text"}, {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}}]),
    },
)


@given(BODIES)
def test_served_bodies_are_openai_bodies_and_keep_their_values(body: dict[str, Any]) -> None:
    # "tools": null is not in OpenAI's types, but clients send it, and so is "function_call": null in an answer.
    messages = [{name: value for name, value in message.items() if name != "function_call"}
                for message in body["messages"]]
    OPENAI_BODY.validate_python({name: value for name, value in body.items() if value is not None}
                                | {"messages": messages})
    parsed = parse_row({**row("a"), "body": json.loads(json.dumps(body))})
    assert isinstance(parsed, ChatBody)
    params = parsed.to_params({}, fallback_seed=7)
    assert [message["role"] for message in parsed.messages] == [m["role"] for m in body["messages"]]
    for name in ("max_tokens", "temperature", "top_p", "n", "presence_penalty", "frequency_penalty"):
        if name in body:
            assert getattr(params, name) == body[name]
    assert params.seed == body.get("seed", 7)
    assert params.logit_bias == {int(key): value for key, value in body.get("logit_bias", {}).items()}
    assert params.logprobs == (0 if "logprobs" in body else None)
    stop = body.get("stop", [])
    assert list(params.stop) == ([stop] if isinstance(stop, str) else stop)


def test_every_field_of_ours_is_openais_or_a_named_extra() -> None:
    ours = set(ChatBody.model_fields) - EXTRAS
    assert ours <= set(CompletionCreateParamsNonStreaming.__annotations__) | _inherited_fields()


def _inherited_fields() -> set[str]:
    return {name for base in CompletionCreateParamsNonStreaming.__orig_bases__ for name in base.__annotations__}


def test_every_field_of_openais_is_served_or_refused_by_name() -> None:
    for name in _inherited_fields() - set(ChatBody.model_fields):
        with pytest.raises(RequestError) as caught:
            parse_row(row("a", **{name: "something"}))
        assert caught.value.param == name
        assert caught.value.code in ("unsupported_parameter", "unknown_parameter")
        assert caught.value.code == "unsupported_parameter", f"{name} is OpenAI's: say that it is not served"


BAD_BODIES = [
    ({"messages": "hi"}, "invalid_type", "messages"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "function", "content": "hi", "name": "f"}]}, "unsupported_value", "messages[0].role"),
    ({"messages": [{"role": "assistant", "content": None}]}, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "assistant", "refusal": "no"}]}, "unsupported_value", "messages[0].refusal"),
    ({"messages": [{"role": "tool", "content": None}]}, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_type", "messages[0].content"),
    ({"messages": [{"role": "user", "content": "hi", "name": 5}]}, "invalid_type", "messages[0].name"),
    ({"messages": [{"role": "user", "content": "hi", "nom": "x"}]}, "unknown_parameter", "messages[0].nom"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "unknown_part", "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x.png"}]}]},
        "invalid_type",
        "messages[0].content[0].image_url",
    ),
    (
        {"messages": [{"role": "user", "content": [{**IMAGE, "image_url": {"url": "x", "detail": "tiny"}}]}]},
        "invalid_value",
        "messages[0].content[0].image_url.detail",
    ),
    ({"max_tokens": 0}, "invalid_sampling_parameter", "max_tokens"),
    ({"max_tokens": -1}, "invalid_sampling_parameter", "max_tokens"),
    ({"max_completion_tokens": 0}, "invalid_sampling_parameter", "max_completion_tokens"),
    ({"max_tokens": "10"}, "invalid_type", "max_tokens"),
    ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
    ({"max_tokens": True}, "invalid_type", "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "invalid_value", "max_completion_tokens"),
    ({"temperature": -1}, "invalid_sampling_parameter", "temperature"),
    ({"temperature": float("nan")}, "invalid_sampling_parameter", "temperature"),
    ({"n": 0}, "invalid_sampling_parameter", "n"),
    ({"stop": [""]}, "invalid_sampling_parameter", "stop"),
    ({"stop": 3}, "invalid_type", "stop"),
    ({"seed": 2**70}, "invalid_sampling_parameter", "seed"),
    ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"1": 101}}, "invalid_sampling_parameter", "logit_bias"),
    ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_sampling_parameter", "top_logprobs"),
    ({"metadata": ["a"]}, "invalid_type", "metadata"),
    ({"tools": {"type": "function"}}, "invalid_type", "tools"),
    ({"tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {}}}, "missing_required_parameter", "tool_choice.function.name"),
    ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
    ({"reasoning_effort": "enormous"}, "invalid_value", "reasoning_effort"),
    ({"continue_final_message": 1}, "invalid_type", "continue_final_message"),
    ({"stream": True}, "unsupported_parameter", "stream"),
    ({"stream": 0}, "unsupported_parameter", "stream"),
    ({"response_format": {"type": "xml"}}, "invalid_value", "response_format"),
    ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "missing_required_parameter",
     "response_format.json_schema.schema"),
    ({"guided_choice": "a"}, "invalid_type", "guided_choice"),
    ({"audio": {"voice": "alloy"}}, "unsupported_parameter", "audio"),
    ({"colour": "red"}, "unknown_parameter", "colour"),
    ({"skip_special_tokens": 1}, "invalid_type", "skip_special_tokens"),
    ({"include_stop_str_in_output": "yes"}, "invalid_type", "include_stop_str_in_output"),
    ({"colour": "red", "max_tokens": "x"}, "unknown_parameter", "colour"),
]


@pytest.mark.parametrize(("change", "code", "param"), BAD_BODIES, ids=lambda value: str(value)[:40])
def test_a_wrong_body_is_refused_and_the_field_named(change: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_row(row("a", **change)).to_params({}, 0)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert param.split(".")[-1].split("[")[0] in caught.value.message


@pytest.mark.parametrize("value", [-2, -1, 21])
def test_a_row_and_python_name_each_its_own_range_of_log_probabilities(value: int) -> None:
    """Python alone has -1, the whole vocabulary."""
    asked = {"top_logprobs": row("a", logprobs=True, top_logprobs=value), "prompt_logprobs": row(
        "a", prompt_logprobs=value), "logprobs": completion_row("a", logprobs=value)}
    for name, line in asked.items():
        with pytest.raises(RequestError, match=f"^{name}: {value} is outside 0 to 20; LLM alone") as caught:
            parse_row(line).to_params({}, 0)
        assert (caught.value.code, caught.value.param) == ("invalid_sampling_parameter", name)
    for name in ("logprobs", "prompt_logprobs"):
        if value == -1:
            assert getattr(SamplingParams(**{name: value}), name) == -1
        else:
            with pytest.raises(RequestError, match=f"^{name}: {value} is outside -1 to 20"):
                SamplingParams(**{name: value})


BAD_ROWS = [
    ({"method": "GET"}, "invalid_value", "method"),
    ({"url": "/v1/responses"}, "invalid_value", "url"),
    ({"custom_id": 5}, "invalid_type", "custom_id"),
    ({"custom_id": ""}, "invalid_value", "custom_id"),
    ({"body": []}, "invalid_type", "body"),
    ({"priority": 1}, "unknown_parameter", "priority"),
]


@pytest.mark.parametrize(("change", "code", "param"), BAD_ROWS, ids=str)
def test_a_wrong_row_is_refused_and_the_field_named(change: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_row({**row("a"), **change})
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(("changed", "words"), [
    ({"body": {"messages": [], "frequency_penalti": 1}}, "frequency_penalti: unknown field; did you mean frequency_p"),
    ({"body": {"messages": [{"role": "user", "content": "x", "contnet": "x"}]}},
     "messages[0].contnet: unknown field; did you mean content?"),
    ({"body": {"messages": [], "response_format": {"type": "json_schema", "json_schema": {"name": "s", "shema": {}}}}},
     "response_format.json_schema.shema: unknown field; did you mean schema, "),
    ({"body": {"messages": [], "prompt": "x"}}, "prompt: unknown field; /v1/completions has it"),
    ({"messages": []}, "messages: unknown field; it goes into body"),
    ({"metod": "POST"}, "metod: unknown field; did you mean method?"),
    ({"body": {"messages": [], "zzzz" * 1_000_000: 1}}, "zzzz" * 15 + ": unknown field"),
], ids=["penalty", "in a message", "in a format", "another endpoint's", "no envelope", "envelope", "huge"])  # fmt: skip
def test_an_unknown_field_is_told_where_it_belongs(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_row({**row("a"), **changed})
    assert caught.value.code == "unknown_parameter"
    assert caught.value.message.startswith(words)
    assert len(caught.value.message) < 250


@pytest.mark.parametrize("name", ["custom_id", "method", "url", "body"])
def test_a_missing_field_is_named(name: str) -> None:
    fields = row("a")
    del fields[name]
    with pytest.raises(RequestError) as caught:
        parse_row(fields)
    assert (caught.value.code, caught.value.param) == ("missing_required_parameter", name)


UNREADABLE = [
    (b'{"custom_id": ', "not_json"),
    (b"[" * 100_000, "nested_too_deep"),
    (b"1" * 5_000, "not_an_object"),
    (b"null", "not_an_object"),
    (b'"text"', "not_an_object"),
    (b'{"custom_id": "\xff"}', "not_utf8"),
    ('{"custom_id": "a"}'.encode("utf-16"), "not_utf8"),
]


@pytest.mark.parametrize(("line", "code"), UNREADABLE, ids=lambda value: str(value)[:20])
def test_an_unreadable_line_is_an_error_of_its_own(line: bytes, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_json(line)
    assert caught.value.code == code


def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_not() -> None:
    half, whole = json.dumps(row("a", "\ud83d")).encode(), json.dumps(row("a", "\N{GRINNING FACE}")).encode()
    refuse_half_characters(whole, read_json(whole))
    with pytest.raises(RequestError) as caught:
        refuse_half_characters(half, read_json(half))
    assert caught.value.code == "not_unicode"
    assert name_of(rb'{"custom_id": "\ud83d"}') is None


@pytest.mark.parametrize("metadata", [
    {"expected": ["a"], "kind": {"b": None}}, {"m": float("nan"), "n": float("inf")}, {"\ud800": "\ud800"},
    {str(number): number for number in range(5000)}, {"a": "x" * 100_000}, {"n": "LONG"},
], ids=lambda value: str(value)[:20])  # fmt: skip
def test_no_row_fails_for_its_metadata(metadata: dict[str, Any]) -> None:
    line = json.dumps(row("a", metadata=metadata)).replace('"LONG"', "9" * 5000).encode()
    prepared = read_json(line)
    refuse_half_characters(line, prepared)
    assert (parse_row(prepared).metadata or {}).keys() == metadata.keys()


def test_a_whole_number_of_any_length_is_refused_by_the_name_of_its_field() -> None:
    """Python reads 4,300 digits."""
    for digits in (4300, 4301, 100_000):
        line = json.dumps(row("a", seed=1)).replace('"seed": 1', f'"seed": -{"9" * digits}').encode()
        assert name_of(line) == "a"
        with pytest.raises(RequestError) as caught:
            parse_row(read_json(line)).to_params({}, 1)
        assert caught.value.param == "seed"
    assert read_json(b'{"a": [' + b"1" * 4300 + b", " + b"1" * 4301 + b"]}") == {"a": [int("1" * 4300), math.inf]}


def test_the_row_goes_over_the_checkpoints_defaults_field_by_field() -> None:
    defaults = {"temperature": 0.7, "top_k": 20, "max_tokens": 99}
    body = parse_row({**row("a"), "body": {"messages": [{"role": "user", "content": "x"}], "top_k": -1}})
    assert body.to_params(defaults, 1) == SamplingParams(temperature=0.7, top_k=0, max_tokens=99, seed=1)
