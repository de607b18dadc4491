"""Answers: OpenAI's own types must read them, and their bytes must follow from the request and the answer alone."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from npu_runner.batch.rows.chat import ChatForm
from npu_runner.batch.rows.openai_response import JobStamp, answer_row, error_row, why_unanswered
from npu_runner.errors import RequestError, ServerError
from npu_runner.request.limits import LIMITS
from npu_runner.request.logprobs import CompactLogprobs, Logprob, PositionLogprobs
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from tests import full_set
from tests.batch.random_completions import COMPLETIONS

STAMP = JobStamp(created=1_700_000_000, system_fingerprint="fp_1", model_name="shapes-vl")
OUTPUTS = st.builds(
    RequestOutput,
    request_id=st.just("a"),
    completions=st.lists(COMPLETIONS, min_size=1, max_size=3),
    num_prompt_tokens=st.integers(0, 99),
    num_cached_tokens=st.integers(0, 99),
)


@given(OUTPUTS)
def test_every_answer_is_a_chat_completion(output: RequestOutput) -> None:
    data = answer_row(output, custom_id="row \N{SNOWMAN}", form=ChatForm(model="mine"), stamp=STAMP)
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
    first = answer_row(output, custom_id="a", form=ChatForm(), stamp=STAMP)
    warmer = RequestOutput("a", output.completions, output.num_prompt_tokens, output.num_prompt_tokens)
    assert first == answer_row(warmer, custom_id="a", form=ChatForm(), stamp=STAMP), "a warm cache shows"
    assert json.loads(first)["id"] != json.loads(answer_row(output, custom_id="b", form=ChatForm(), stamp=STAMP))["id"]


CALL = '<tool_call>{"name": "f", "arguments": {"a": "☃"}}</tool_call>'
WITH_TOOLS = ChatForm(tool_call_parser="hermes", tools=({"type": "function", "function": {"name": "f"}},))


def chat_completion(form: ChatForm, *completions: CompletionOutput, **stamp: bool) -> ChatCompletion:
    data = answer_row(RequestOutput("a", list(completions)), custom_id="a", form=form, stamp=replace(STAMP, **stamp))
    body = json.loads(data)["response"]["body"]
    return ChatCompletion.model_validate_json(json.dumps(body), strict=True)


def test_calls_in_an_answer_are_openais_and_their_ids_follow_from_the_row() -> None:
    outputs = [CompletionOutput(0, f"Yes.{CALL}\n{CALL}", [1], "stop"), CompletionOutput(1, CALL, [1], "stop")]
    first, second = chat_completion(WITH_TOOLS, *outputs).choices
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "tool_calls")
    assert ((first.message.content or "").strip(), second.message.content) == ("Yes.", None)
    calls = [*(first.message.tool_calls or []), *(second.message.tool_calls or [])]
    assert [call.function.name for call in calls if call.type == "function"] == ["f"] * 3
    assert {call.function.arguments for call in calls if call.type == "function"} == {'{"a": "☃"}'}
    assert len({call.id for call in calls}) == 3
    assert chat_completion(WITH_TOOLS, *outputs).choices == [first, second]


def test_an_answer_that_was_cut_off_ends_by_length_whatever_it_calls() -> None:
    (whole,) = chat_completion(WITH_TOOLS, CompletionOutput(0, f"{CALL}and", [1], "length")).choices
    assert (whole.finish_reason, len(whole.message.tool_calls or [])) == ("length", 1)
    (begun,) = chat_completion(WITH_TOOLS, CompletionOutput(0, CALL[:30], [1], "length")).choices
    assert (begun.finish_reason, begun.message.content, begun.message.tool_calls) == ("length", CALL[:30], None)


def test_without_tools_or_parser_a_call_is_text() -> None:
    (choice,) = chat_completion(ChatForm(), CompletionOutput(0, CALL, [1], "stop")).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", CALL, None)


def test_calls_and_reasoning_stand_side_by_side() -> None:
    output = CompletionOutput(0, CALL, [1], "stop", reasoning_content="hm", num_reasoning_tokens=1)
    (choice,) = chat_completion(WITH_TOOLS, output, splits_reasoning=True).choices
    assert (choice.message.content, choice.message.model_extra) == (None, {"reasoning_content": "hm"})
    assert len(choice.message.tool_calls or []) == 1


def describe(token_id: int) -> tuple[str, bytes]:
    """A token in three is part of a character, one a control character, one has quotes."""
    kinds = [f' w"o{token_id}\\é'.encode(), f"\n\x07{token_id}".encode(), b"\xe6\x97"]
    raw = kinds[token_id % 3]
    return raw.decode(errors="replace"), raw


def by_openai_format(positions: Sequence[PositionLogprobs]) -> list[dict[str, object]]:
    """The array `content` as plain data."""

    def entry(token: Logprob) -> dict[str, object]:
        value = token.logprob if token.logprob >= -9999 and token.logprob != math.inf else -9999.0
        return {"token": token.token, "logprob": value, "bytes": list(token.token_bytes)}

    return [entry(each.sampled) | {"top_logprobs": [entry(token) for token in each.top]} for each in positions]


VALUES = st.one_of(st.floats(max_value=0, width=32), st.sampled_from([math.nan, math.inf, -math.inf, -1e4, -1e-40]))


@given(st.integers(0, 3), st.data())
def test_log_probabilities_are_written_in_openais_form(num_top: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.lists(VALUES, min_size=1 + num_top, max_size=1 + num_top), max_size=3))
    floats = np.array(values, dtype=np.float32).reshape(-1, 1 + num_top)
    ids = np.arange(floats.size, dtype=np.int32).reshape(floats.shape) % 4
    compact = CompactLogprobs(ids, floats, np.ones(len(ids), dtype=np.int32), describe)
    completions = [CompletionOutput(index, "x", [1], "stop", logprobs=compact) for index in range(2)]
    row = answer_row(RequestOutput("a", completions), custom_id="a", form=ChatForm(), stamp=STAMP)
    for choice in json.loads(row)["response"]["body"]["choices"]:
        assert choice["logprobs"] == {"content": by_openai_format(compact), "refusal": None}
    whole = json.dumps(json.loads(row), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    assert row == whole.encode() + b"\n"


def test_the_largest_row_of_log_probabilities_takes_little_more_memory_than_its_bytes() -> None:
    """At the limit on a request, n 128 and top 20: below 100 MiB, where 21 are the row itself. A sixth of it in the
    fast set."""
    n, num_top = 128, 20
    num_positions = LIMITS.max_logprobs_per_request // n // (1 + num_top) // (6 if full_set.is_fast else 1)
    rng = np.random.default_rng(0)
    shape = num_positions, 1 + num_top
    completions = [
        CompletionOutput(index, "x", [1] * num_positions, "length", logprobs=CompactLogprobs(
            rng.integers(0, 5_000, shape, dtype=np.int32), -rng.exponential(5, shape).astype(np.float32),
            np.ones(num_positions, dtype=np.int32), describe))
        for index in range(n)
    ]
    tracemalloc.start()
    try:
        row = answer_row(RequestOutput("a", completions), custom_id="a", form=ChatForm(), stamp=STAMP)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(row) < peak < min(100 << 20, 2 * len(row))
    choices = json.loads(row)["response"]["body"]["choices"]
    assert len(choices) == n
    for index in (0, 1, n - 1):
        assert choices[index]["logprobs"]["content"] == by_openai_format(completions[index].logprobs or [])


def test_cached_tokens_are_reported_when_asked_for() -> None:
    output = RequestOutput("a", [CompletionOutput(0, "x", [1], "stop")], 9, 4)
    stamp = JobStamp(created=1, system_fingerprint="fp", model_name="m", with_cached_tokens=True)
    body = json.loads(answer_row(output, custom_id="a", form=ChatForm(), stamp=stamp))["response"]["body"]
    completion = ChatCompletion.model_validate(body, strict=True)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 4


def test_a_completion_that_was_given_up_makes_the_row_an_error_of_ours() -> None:
    good, lost = CompletionOutput(0, "x", [1], "stop"), CompletionOutput(1, "", [], "error", error="not a number")
    assert why_unanswered(RequestOutput("a", [good])) is None
    error = why_unanswered(RequestOutput("a", [good, lost]))
    assert isinstance(error, ServerError)
    assert (error.code, error.message) == ("generation_failed", "not a number")


def test_an_error_row_names_code_status_and_line_and_survives_half_characters() -> None:
    error = RequestError(code="not_json", message="near \ud83d", param="p")
    result = json.loads(error_row(error, custom_id=None, line=12))
    assert result["custom_id"] is None
    assert result["response"]["status_code"] == 400
    assert result["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert result["error"] == {"code": "not_json", "message": "near ?", "param": "p", "line": 12}
    ours = json.loads(error_row(ServerError(code="c", message="m"), custom_id="a", line=1))
    assert (ours["response"]["status_code"], ours["response"]["body"]["error"]["type"]) == (500, "server_error")
