"""The endpoints, and readers of their answers: the texts and cells of a response's body, and the flaws of a result row.

A new endpoint is added here alone. An answer is whole if it is not cut off, is no repetition and is not unparsed. Knows
nothing of files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from npu_runner.batch.rows.chat import ChatBody, ChatForm
from npu_runner.batch.rows.completions import CompletionBody, CompletionForm
from npu_runner.batch.rows.endpoint import AnswerForm, RowBody, asks_for_json
from npu_runner.batch.rows.flaw import WHOLE, Flaw
from npu_runner.batch.rows.openai_response import FAULTS, UNPARSED, has_failed, is_json
from npu_runner.batch.rows.pooled import ClassifyBody, ClassifyForm, EmbeddingBody, EmbeddingForm
from npu_runner.batch.rows.scores import RerankBody, RerankForm, ScoreBody, ScoreForm
from npu_runner.request.outputs import REPETITION_DETECTED

Items = list[dict[str, Any]]
_INT64 = range(-(2**63), 2**63)


class Endpoint(NamedTuple):
    """`body` reads a request. `form` writes its answer and reads it again."""

    body: type[RowBody]
    form: type[AnswerForm]


ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(ChatBody, ChatForm),
    "/v1/completions": Endpoint(CompletionBody, CompletionForm),
    "/v1/embeddings": Endpoint(EmbeddingBody, EmbeddingForm),
    "/v1/score": Endpoint(ScoreBody, ScoreForm),
    "/v1/rerank": Endpoint(RerankBody, RerankForm),
    "/v1/classify": Endpoint(ClassifyBody, ClassifyForm),
}


def answers_of(body: Mapping[str, Any]) -> tuple[type[AnswerForm], Items]:
    """The form of a response's body, and its items. Raises ValueError where no endpoint has such a body."""
    for _, form in ENDPOINTS.values():
        items = body.get(form.list_name)
        if isinstance(items, list) and all(isinstance(item, dict) and form.item_name in item for item in items):
            return form, items
    raise ValueError("no endpoint answers so")


def texts_of(body: Mapping[str, Any]) -> list[str]:
    """The words that show each item of a response's body to a reader."""
    form, items = answers_of(body)
    return [form.text_of(item) for item in items]


def answer_of(body: Mapping[str, Any]) -> str | None:
    """The text or label that the row's `expected` is compared with; None where the endpoint compares none."""
    form, items = answers_of(body)
    return form.text_of(items[0]) if form.is_compared and items else None


def cells_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A response's body as lines of a table, one for each item. Raises one of FAULTS for any other body.

    Tokens are counted for the whole row. They stand in its first line, so that sums over a table are right.
    """
    form, items = answers_of(body)
    usage = body.get("usage") or {}
    details = usage.get("completion_tokens_details") or {}
    counts = {"prompt_tokens": _whole(usage.get("prompt_tokens")),
              "completion_tokens": _whole(usage.get("completion_tokens")),
              "reasoning_tokens": _whole(details.get("reasoning_tokens"))}
    return [{"index": _whole(item["index"]), **form.cells_of(item, counts["prompt_tokens"]),
             **(counts if number == 0 else {})} for number, item in enumerate(items)]


def is_understood(answer: Mapping[str, Any]) -> bool:
    """Whether a result row is a failure, or an answer of an endpoint."""
    try:
        if not has_failed(answer):
            cells_of(answer["response"]["body"])
    except FAULTS:
        return False
    return True


def _whole(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value not in _INT64):
        raise TypeError(f"{value!r:.40} is not a whole number of 64 bits")
    return value


def flaws_of(answer: Mapping[str, Any]) -> Flaw:
    """The flaws of a result row, as its line tells them."""
    if has_failed(answer):
        return Flaw.ERRORS
    with contextlib.suppress(*FAULTS):  # this version does not know such an answer
        body = answer["response"]["body"]
        # A choice at its limit of tokens is cut off, unless the limit stopped a repetition.
        are_repetitions = {choice.get("stop_reason") == REPETITION_DETECTED for choice in body.get("choices", ())
                           if choice["finish_reason"] == "length"}
        return Flaw(Flaw.CUT_OFF * (False in are_repetitions) | Flaw.REPETITION * (True in are_repetitions)
                    | Flaw.UNPARSED * (UNPARSED in body))
    return WHOLE


def flaws_of_row(request: Mapping[str, Any], answer: Mapping[str, Any], *, has_rule_of_job: bool) -> Flaw:
    """The same, of an answer that an earlier version may have written: its line does not say that it is unparsed, but
    the request and the text do. An echo of token ids cannot be told from the text.

    `has_rule_of_job`: the job has a schema for rows without a rule of their own.
    """
    flaws, question = flaws_of(answer), request.get("body")
    if flaws & (Flaw.ERRORS | Flaw.UNPARSED) or not isinstance(question, dict):
        return flaws
    with contextlib.suppress(*FAULTS):  # as in flaws_of
        body = answer["response"]["body"]
        if not body.get("choices") or not asks_for_json(question, has_rule_of_job=has_rule_of_job):
            return flaws
        echo = question["prompt"] if question.get("echo") else ""
        if isinstance(echo, str) and not all(is_json(text.removeprefix(echo)) for text in texts_of(body)):
            return flaws | Flaw.UNPARSED
    return flaws
