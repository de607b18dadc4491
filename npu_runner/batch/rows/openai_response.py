"""Writes rows of OpenAI's batch result format, and reads their names, errors and texts. Knows nothing of files, images
or how an answer came about.

A row's bytes follow from the request, the answer and the job's manifest alone: no clock, no counter, no chance.
So a resumed job writes the ids that an undisturbed one would have written.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_runner.batch.rows.endpoint import AnswerForm, AnswerRow
from npu_runner.batch.rows.logprobs_json import LogprobsJson, encoded, opened, to_json, write_prompt_logprobs
from npu_runner.batch.rows.shape import check_shape, parse_json, row_key
from npu_runner.errors import RequestError, ServerError
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PageFacts

_CALLERS_FAULTS = ("invalid_structured_outputs", "unsupported_parameter")
"""Codes of completions that were given up by the fault of their request."""
_SERVED_FINISH_REASONS = ("stop", "length")
PAGE = "page"
"""A member of an answer: the facts of the page of a document that the row shows, or a list of several. Else it is not
there."""
UNPARSED = "unparsed"
"""A member of an answer's body, true where a rule asked for JSON and a completion is none; else it is not there."""


@dataclass(frozen=True, kw_only=True)
class JobStamp:
    """The values that all answers of a job share; the manifest holds them."""

    created: int
    """Unix time at which the job was first started."""
    system_fingerprint: str
    model_name: str
    """It stands in for rows that name no model."""
    splits_reasoning: bool = False
    """The reasoning of an answer is a field of its own, and counted."""
    with_cached_tokens: bool = False
    """Report prefix-cache hits per row. They depend on what ran before, so rows no longer follow from the request."""


def why_unanswered(output: RequestOutput, form: AnswerForm | None = None) -> RequestError | None:
    """The error of a request of which the engine gave a completion up; None if all of them are answers. `form` names
    the prompt of that completion, if there are several."""
    lost = next((item for item in output.completions if item.finish_reason not in _SERVED_FINISH_REASONS), None)
    if lost is None:
        return None
    code = lost.error_code or ("generation_aborted" if lost.finish_reason == "abort" else "generation_failed")
    message = lost.error or f"completion {lost.index} ended with finish_reason {lost.finish_reason}"
    kind = RequestError if code in _CALLERS_FAULTS else ServerError
    return placed(kind(message, code), form, lost.index)


def placed(error: RequestError, form: AnswerForm | None, index: int | None) -> RequestError:
    """The error of prompt `index` of a row, with the field that this stands in, if there are several."""
    if form is None or index is None or index >= len(form.places):
        return error
    where = form.places[index]
    return type(error)(f"{where}: {error.message}", error.code, where)


def answer_row(output: RequestOutput, *, custom_id: str, form: AnswerForm, stamp: JobStamp,
               is_unparsed: bool = False, pages: Sequence[PageFacts] = (), more: Mapping[str, Any] = {}) -> bytes:
    """The result row of a request that was answered. `form`: how its endpoint writes a completion. `is_unparsed`: a
    rule asked for JSON, and a completion is none. `pages`: the pages that it shows. `more`: members beside its name."""
    digest = row_digest(custom_id)
    head = {"id": form.id_prefix and f"{form.id_prefix}{digest}", "object": form.object,
            "created": stamp.created if form.has_created else None, "model": form.model or stamp.model_name}
    end: dict[str, Any] = {"usage": _usage(output, form, stamp)}
    if form.has_text:
        end["system_fingerprint"] = stamp.system_fingerprint
    if is_unparsed:
        end[UNPARSED] = True
    # Written piece by piece: with log probabilities a row is many megabytes, of which this holds one copy.
    row = AnswerRow(out=io.BytesIO(), digest=digest, logprobs_json=LogprobsJson(),
                    splits_reasoning=stamp.splits_reasoning, prompt_logprobs=output.prompt_logprobs)
    names: dict[str, Any] = {"id": f"batch_req_{digest}", "custom_id": custom_id, **more}
    if pages:
        names[PAGE] = pages[0].to_json() if len(pages) == 1 else [page.to_json() for page in pages]
    row.write(opened(names, "response"))
    row.write(opened({"status_code": 200, "request_id": f"req_{digest}"}, "body"))
    row.write(opened({name: value for name, value in head.items() if value is not None}, form.list_name) + "[")
    for number, completion in enumerate(form.in_order(output.completions)):
        row.write("," if number else "")
        form.write_choice(completion, row)
    row.write("],")
    if form.prompt_logprobs_in_body and output.prompt_logprobs is not None:
        write_prompt_logprobs(output.prompt_logprobs, row.out)
        row.write(",")
    row.write(to_json(end).removeprefix("{") + '},"error":null}\n')
    return row.out.getvalue()


FAULTS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError)
"""The errors of reading a line that is no result row, or none of a known form."""


def has_failed(answer: Mapping[str, Any]) -> bool:
    """Whether a result row is a failure: it has an `error`, or a status code other than 200, or no
    response at all."""
    response = answer.get("response")
    return (answer.get("error") is not None or not isinstance(response, dict)
            or response.get("status_code", 200) != 200)


def error_of(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The error of a failed row. OpenAI's own error files have it in the body alone. Empty where the row names none."""
    response = answer.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    of_body = body.get("error") if isinstance(body, dict) else None
    return next((error for error in (answer.get("error"), of_body) if isinstance(error, dict)), {})


def key_of_answer(answer: Mapping[str, Any]) -> bytes:
    """The 16 bytes by which a result row is known. Raises one of FAULTS for any other object."""
    custom_id = answer["custom_id"]
    line = 0 if custom_id is not None else answer["error"]["line"]
    if not isinstance(custom_id, (str, type(None))) or type(line) is not int:
        raise TypeError("a row is known by a text or by the number of its line")
    return row_key(custom_id, line)


def object_in(text: str, *, is_strict: bool = False) -> dict[str, Any] | None:
    """The JSON object of an answer's text; None: the text is none. `is_strict`: nor is one with NaN or infinity."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        check_shape(text.encode("utf-8", "replace"))
        value = parse_json(text, parse_constant=_refuse_constant if is_strict else None)
    except (ValueError, RecursionError, RequestError):  # cut off, not JSON behind its beginning, or too large to parse
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def name_of_answer(answer: Mapping[str, Any]) -> str:
    """The name of a row in a report: one without a usable custom_id is known by its line."""
    custom_id: str | None = answer["custom_id"]
    return f"line {answer['error']['line']}" if custom_id is None else custom_id


def is_json(text: str) -> bool:
    try:
        parse_json(text)
    except (ValueError, RecursionError):
        return False
    return True


def is_as_expected(answer: str, expected: str) -> bool:
    """Equal but for case, white space around and a full stop at the end."""
    return answer.strip().removesuffix(".").casefold() == expected.strip().removesuffix(".").casefold()


def error_row(error: RequestError, *, custom_id: str | None, line: int, more: Mapping[str, Any] = {}) -> bytes:
    """The result row of a request without an answer. `line`: where it stands in the input, from 1. `more`: as of
    `answer_row`."""
    digest = row_digest(custom_id if custom_id is not None else f"\0line {line}")
    kind = "invalid_request_error" if error.status_code == 400 else "server_error"
    details = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    response = {"status_code": error.status_code, "request_id": f"req_{digest}", "body": {"error": details}}
    summary = {"code": error.code, "message": error.message, "param": error.param, "line": line}
    row = {"id": f"batch_req_{digest}", "custom_id": custom_id, **more, "response": response, "error": summary}
    return encoded(to_json(row) + "\n")


def row_digest(custom_id: str) -> str:
    """32 hexadecimal digits that stand for a custom_id in the ids of its answer."""
    return hashlib.blake2b(custom_id.encode("utf-8"), digest_size=16).hexdigest()


def _usage(output: RequestOutput, form: AnswerForm, stamp: JobStamp) -> dict[str, Any]:
    completion_tokens = sum(len(completion.token_ids) for completion in output.completions)
    usage: dict[str, Any] = {
        "prompt_tokens": output.num_prompt_tokens,
        **({"completion_tokens": completion_tokens} if form.has_text else {}),
        "total_tokens": output.num_prompt_tokens + completion_tokens,
    }
    if stamp.splits_reasoning and form.counts_reasoning:
        reasoning_tokens = sum(completion.num_reasoning_tokens for completion in output.completions)
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    if stamp.with_cached_tokens:
        usage["prompt_tokens_details"] = {"cached_tokens": output.num_cached_tokens}
    return usage
