"""Answers: OpenAI's own types must read them, and their bytes must follow from the request and the answer alone."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from npu_runner.batch.rows.openai_response import JobStamp, RowError, answer_row, error_row, why_unanswered
from npu_runner.outputs import CompletionOutput, PositionLogprobs, RequestOutput, TokenLogprob

STAMP = JobStamp(created=1_700_000_000, system_fingerprint="fp_1", model_name="shapes-vl")
TOKENS = st.builds(
    TokenLogprob,
    token_id=st.integers(0, 99),
    token=st.text(max_size=3),
    logprob=st.one_of(st.floats(max_value=0), st.just(math.nan)),
    token_bytes=st.binary(max_size=4),
)
POSITIONS = st.builds(PositionLogprobs, sampled=TOKENS, top=st.lists(TOKENS, max_size=2).map(tuple))
COMPLETIONS = st.builds(
    CompletionOutput,
    index=st.integers(0, 3),
    text=st.text(),
    token_ids=st.lists(st.integers(0, 99)),
    finish_reason=st.sampled_from(["stop", "length"]),
    logprobs=st.one_of(st.none(), st.lists(POSITIONS, max_size=3)),
)
OUTPUTS = st.builds(
    RequestOutput,
    request_id=st.just("a"),
    completions=st.lists(COMPLETIONS, min_size=1, max_size=3),
    num_prompt_tokens=st.integers(0, 99),
    num_cached_tokens=st.integers(0, 99),
)


@given(OUTPUTS)
def test_every_answer_is_a_chat_completion(output: RequestOutput) -> None:
    data = answer_row(output, custom_id="row \N{SNOWMAN}", model="mine", stamp=STAMP)
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    result = json.loads(data)
    assert (result["custom_id"], result["error"], result["response"]["status_code"]) == ("row \N{SNOWMAN}", None, 200)
    body = result["response"]["body"]
    # strict: from JSON, with no conversions and every field OpenAI's type requires
    completion = ChatCompletion.model_validate_json(json.dumps(body), strict=True)
    assert completion.model_extra == {}
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == output.num_prompt_tokens
    assert completion.usage.completion_tokens == sum(len(item.token_ids) for item in output.completions)
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    for choice, ours in zip(completion.choices, output.completions, strict=True):
        assert (choice.message.content, choice.finish_reason, choice.index) == (
            ours.text,
            ours.finish_reason,
            ours.index,
        )
        assert (choice.logprobs is None) == (ours.logprobs is None)
        theirs = choice.logprobs.content or [] if choice.logprobs else []
        for position, our_position in zip(theirs, ours.logprobs or [], strict=True):
            assert position.bytes is not None
            assert bytes(position.bytes) == our_position.sampled.token_bytes
            assert len(position.top_logprobs) == len(our_position.top)


@given(OUTPUTS)
def test_bytes_follow_from_request_and_answer(output: RequestOutput) -> None:
    first = answer_row(output, custom_id="a", model=None, stamp=STAMP)
    warmer = RequestOutput("a", output.completions, output.num_prompt_tokens, output.num_prompt_tokens)
    assert first == answer_row(warmer, custom_id="a", model=None, stamp=STAMP), "the prefix cache shows in the answer"
    assert json.loads(first)["id"] != json.loads(answer_row(output, custom_id="b", model=None, stamp=STAMP))["id"]


def test_cached_tokens_are_reported_when_asked_for() -> None:
    output = RequestOutput("a", [CompletionOutput(0, "x", [1], "stop")], 9, 4)
    stamp = JobStamp(created=1, system_fingerprint="fp", model_name="m", with_cached_tokens=True)
    body = json.loads(answer_row(output, custom_id="a", model=None, stamp=stamp))["response"]["body"]
    completion = ChatCompletion.model_validate(body, strict=True)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 4


def test_a_completion_that_was_given_up_makes_the_row_an_error_of_ours() -> None:
    good, lost = CompletionOutput(0, "x", [1], "stop"), CompletionOutput(1, "", [], "error", error="not a number")
    assert why_unanswered(RequestOutput("a", [good])) is None
    error = why_unanswered(RequestOutput("a", [good, lost]))
    assert error == RowError(code="generation_failed", message="not a number", status_code=500)


def test_an_error_row_names_code_status_and_line_and_survives_half_characters() -> None:
    error = RowError(code="not_json", message="near \ud83d", param="p")
    result = json.loads(error_row(error, custom_id=None, line=12))
    assert result["custom_id"] is None
    assert result["response"]["status_code"] == 400
    assert result["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert result["error"] == {"code": "not_json", "message": "near ?", "param": "p", "line": 12}
    ours = json.loads(error_row(RowError(code="c", message="m", status_code=500), custom_id="a", line=1))
    assert (ours["response"]["status_code"], ours["response"]["body"]["error"]["type"]) == (500, "server_error")
