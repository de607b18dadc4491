"""The endpoints: the body that reads the rows of each, and the form that writes and reads its answers.

Every reader of answers (report, summary, table, merge) asks here, so an endpoint that is added is known to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from npu_runner.batch.rows.chat import ChatBody, ChatForm
from npu_runner.batch.rows.completions import CompletionBody, CompletionForm
from npu_runner.batch.rows.endpoint import AnswerForm, RowBody
from npu_runner.batch.rows.openai_response import FAULTS, has_failed
from npu_runner.batch.rows.pooled import ClassifyBody, ClassifyForm, EmbeddingBody, EmbeddingForm
from npu_runner.batch.rows.scores import RerankBody, RerankForm, ScoreBody, ScoreForm

Items = list[dict[str, Any]]
_INT64 = range(-(2**63), 2**63)


class Endpoint(NamedTuple):
    """How a request is read, and how its answer is written and read again."""

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
