"""What a result row is in a table: a line of cells for each of its answers. Knows nothing of types or formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from npu_runner.batch.rows.openai_response import name_of_answer, vector_of
from npu_runner.tables.answer_files import Answer, has_failed

Cells = dict[str, Any]
FIELD, METADATA = "answer.", "metadata."
"""What names of columns begin with that are fields of answers, and metadata of rows. No other name has a dot."""
TEXT_COLUMNS = ("text", "reasoning", "tool_calls", "finish_reason", "stop_reason")
ERROR_COLUMNS = ("error_code", "error_message")
PROMPT_COUNT = "prompt_tokens"
COUNT_COLUMNS = ("completion_tokens", "reasoning_tokens")
VECTOR, LOGPROB = "vector", "mean_logprob"


def cells_of(answer: Answer) -> Iterator[Cells]:
    """The cells of each answer of a row; of a failed row one line. A column that is not there is empty.

    Tokens are counted for the whole row: they stand with its first answer, so that sums over a table are right.
    """
    name = name_of_answer(answer)
    if has_failed(answer):
        yield {"custom_id": name, **_error_of(answer)}
        return
    body = answer["response"]["body"]
    counts = _counts_of(body.get("usage") or {})
    for number, item in enumerate(body["choices"] if "choices" in body else body["data"]):
        cells = _of_choice(item, counts) if "choices" in body else {VECTOR: vector_of(item["embedding"])}
        yield {"custom_id": name, "index": item["index"], **cells, **(counts if number == 0 else {})}


def num_cells(answer: Answer) -> int:
    """How many lines `cells_of` gives."""
    if has_failed(answer):
        return 1
    body = answer["response"]["body"]
    return len(body["choices"] if "choices" in body else body["data"])


def _error_of(answer: Answer) -> Cells:
    """OpenAI's own error files may have the error in the body alone."""
    error = answer["error"] or answer["response"]["body"]["error"]
    return {"error_code": _as_text(error.get("code")), "error_message": _as_text(error.get("message"))}


def _of_choice(choice: Mapping[str, Any], counts: Cells) -> Cells:
    message = choice.get("message")
    calls = None if message is None else message.get("tool_calls")
    return {
        "text": choice["text"] if message is None else message["content"],
        "reasoning": None if message is None else message.get("reasoning_content"),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
        "finish_reason": choice["finish_reason"],
        "stop_reason": _as_text(choice.get("stop_reason")),
        LOGPROB: _mean_logprob(choice.get("logprobs"), counts),
    }


def _mean_logprob(logprobs: Any, counts: Cells) -> float | None:
    """Of the tokens that were drawn. An echoed prompt begins with a token without one, and is left out."""
    if not logprobs:
        return None
    if "token_logprobs" in logprobs:
        values = logprobs["token_logprobs"]
        values = values[counts[PROMPT_COUNT]:] if values and values[0] is None else values
    else:
        values = [token["logprob"] for token in logprobs.get("content") or ()]
    return sum(values) / len(values) if values else None


def _counts_of(usage: Mapping[str, Any]) -> Cells:
    details = usage.get("completion_tokens_details") or {}
    return {PROMPT_COUNT: usage.get("prompt_tokens"), "completion_tokens": usage.get("completion_tokens"),
            "reasoning_tokens": details.get("reasoning_tokens")}


def _as_text(value: Any) -> str | None:
    return None if value is None else str(value)
