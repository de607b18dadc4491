"""A result row as lines of a table: a line of cells for each of its answers. Knows nothing of types or formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_runner.batch.rows import endpoints
from npu_runner.batch.rows.openai_response import error_of, has_failed, name_of_answer

Answer = dict[str, Any]
Cells = dict[str, Any]
FIELD, METADATA = "answer.", "metadata."
"""The names of columns begin so that are fields of answers, and metadata of rows. No other name has a dot."""
MORE_METADATA = "metadata"
VECTOR, SCORE, LABEL, PROBS = "vector", "score", "label", "probs"
LOGPROB, PROMPT_COUNT = "mean_logprob", "prompt_tokens"
TEXT_COLUMNS = ("text", "reasoning", "tool_calls", "finish_reason", "stop_reason")
COUNT_COLUMNS = ("completion_tokens", "reasoning_tokens")
ERROR_COLUMNS = ("error_code", "error_message")


def cells_of(answer: Answer) -> list[Cells]:
    """The cells of each answer of a row; of a failed row one line. A column that is not there is empty. Raises one of
    FAULTS for a row that is no answer of an endpoint."""
    name = name_of_answer(answer)
    if has_failed(answer):
        error = error_of(answer)
        return [{"custom_id": name, "error_code": error.get("code"), "error_message": error.get("message")}]
    return [{"custom_id": name, **cells} for cells in endpoints.cells_of(answer["response"]["body"])]


def is_error(cells: Mapping[str, Any]) -> bool:
    """The line of a failed row."""
    return "error_code" in cells
