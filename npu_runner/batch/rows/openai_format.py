"""Reads rows of OpenAI's batch format: the fields that every row has, and the name of a wrong one.

The endpoint knows the fields of a body. Knows nothing of files, images, tokens or the engine.
"""

from __future__ import annotations

import difflib
import json
from typing import Any, Literal

from pydantic import Field, ValidationError

from npu_runner.batch.rows.endpoint import AnswerRules, RowBody, Strict
from npu_runner.batch.rows.endpoints import ENDPOINTS
from npu_runner.batch.rows.shape import check_shape, parse_json
from npu_runner.errors import RequestError
from npu_runner.request.limits import LIMITS, check_count, shown


class _Envelope(Strict):
    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def read_json(line: bytes) -> dict[str, Any]:
    """The row as a JSON object. Raises RequestError for any other row, and for one too large to be parsed."""
    check_shape(line)
    try:
        row = parse_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(f"the row is not UTF-8: byte {error.start} cannot be read", "not_utf8") from error
    except ValueError as error:
        raise RequestError(f"the row is not JSON: {error}", "not_json") from error
    if not isinstance(row, dict):
        raise RequestError(f"the row is a JSON {type(row).__name__}, not an object", "not_an_object")
    return row


def refuse_half_characters(line: bytes, row: dict[str, Any]) -> None:
    """Raises RequestError for half a surrogate pair, which JSON can spell: no tokenizer accepts it and no file can hold
    it. Metadata may have one, because it goes to neither."""
    if b"\\ud" not in line and b"\\uD" not in line:
        return
    body = row.get("body")
    if isinstance(body, dict):
        row = {**row, "body": {name: value for name, value in body.items() if name != "metadata"}}
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise RequestError(f"the row spells half a surrogate pair ({half}): no character", "not_unicode") from error


def parse_row(row: dict[str, Any]) -> RowBody:
    """The body of a row from `read_json`, validated. Raises RequestError naming the first wrong field, unknown ones
    before others."""
    custom_id = row.get("custom_id")
    if isinstance(custom_id, str):
        check_count("custom_id", "characters", custom_id, LIMITS.max_custom_id_chars, "custom_id_too_long")
    kind: type[Strict] = _Envelope
    try:
        envelope = _Envelope.model_validate(row)
        kind = endpoint = _endpoint_of(envelope.url)
        endpoint.check_counts(envelope.body)
        endpoint.refuse_unserved(envelope.body)
        return endpoint.model_validate(envelope.body)
    except ValidationError as error:
        raise _first_error(error, kind) from error


def _endpoint_of(url: str) -> type[RowBody]:
    if url not in ENDPOINTS:
        message = f"url: {shown(url)} is not one of {', '.join(ENDPOINTS)}"
        raise RequestError(message, "invalid_value", "url")
    return ENDPOINTS[url].body


def _first_error(error: ValidationError, model: type[Strict]) -> RequestError:
    errors = error.errors(include_url=False, include_context=False)
    first = next((item for item in errors if item["type"] == "extra_forbidden"), errors[0])
    path = _path(first["loc"])
    kind = first["type"]
    if kind == "extra_forbidden":
        return RequestError(f"{path}: unknown field{_hint(first['loc'], model)}", "unknown_parameter", path)
    if kind == "missing":
        return RequestError(f"{path}: missing", "missing_required_parameter", path)
    reason = "Input should be an object" if kind == "model_type" else first["msg"].removeprefix("Value error, ")
    code = "invalid_type" if kind.endswith("_type") else kind if kind.startswith("unknown_") else "invalid_value"
    return RequestError(f"{path}: {reason}, but it is {shown(first['input'])}", code, path)


def _hint(location: tuple[int | str, ...], model: type[Strict]) -> str:
    """A remedy for a field that is unknown there."""
    name = str(location[-1])[:60]
    elsewhere = [url for url, endpoint in ENDPOINTS.items() if name in _names_of(endpoint.body)]
    if len(location) == 1 and elsewhere:
        return "; it goes into body" if model is _Envelope else f"; {elsewhere[0]} has it"
    parts = [kind for kind in Strict.__subclasses__() if not issubclass(kind, (RowBody, AnswerRules, _Envelope))]
    known = _names_of(model) if len(location) == 1 else {name for part in parts for name in _names_of(part)}
    near = difflib.get_close_matches(name, sorted(known), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""


def _names_of(model: type[Strict]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def _path(location: tuple[int | str, ...]) -> str:
    """As OpenAI names parameters: messages[0].content, relative to the body."""
    names = [item if isinstance(item, int) else item[:60] for item in location if not str(item).startswith("<")]
    return "".join(f"[{item}]" if isinstance(item, int) else f".{item}" for item in names).lstrip(".")
