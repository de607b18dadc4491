"""Reads rows of OpenAI's batch format: which fields there are, which we serve, and what a wrong one is called.

Knows nothing of files, pictures, tokens or the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator

from npu_runner.batch.rows.shape import check_shape
from npu_runner.errors import RequestError
from npu_runner.limits import LIMITS, check_count, plain_template_kwargs, shown
from npu_runner.sampling_params import SamplingParams

ENDPOINT = "/v1/chat/completions"

# OpenAI's fields that we know and do not serve, with the values that ask for nothing and are let through.
_UNSERVED_FIELDS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream": (False,),
    "stream_options": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_INSTEAD = {"reasoning_effort": "; where the model's chat template reads one, it goes into chat_template_kwargs"}
_UNSERVED_ROLES = ("tool", "function")
# What a field can have too much of, when it is of the type that it should be.
_COUNTED: tuple[tuple[str, type[Sized], str, int], ...] = (
    ("model", str, "characters", LIMITS.max_name_chars),
    ("user", str, "characters", LIMITS.max_name_chars),
    ("messages", list, "messages", LIMITS.max_messages),
    ("stop_token_ids", list, "entries", LIMITS.max_stop_token_ids),
    ("stop", list, "entries", LIMITS.max_stop_strings),
    ("bad_words", list, "entries", LIMITS.max_bad_words),
    ("logit_bias", dict, "entries", LIMITS.max_logit_bias),
    ("metadata", dict, "entries", LIMITS.max_metadata_entries),
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Strict):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


class ImageUrl(_Strict):
    """Where a picture is: a data: URL, file:// or a path. The checkpoint decides on detail, so "low" is refused."""

    url: str = Field(min_length=1)
    detail: Literal["auto", "high"] | None = None


class ImagePart(_Strict):
    """A picture in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


def _tag_of_content(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, list) else None


def _tag_of_part(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if kind in ("text", "image_url") else None


_Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")],
    Discriminator(
        _tag_of_part,
        custom_error_type="unknown_part",
        custom_error_message='a part is an object whose type is "text" or "image_url"',
    ),
]
_Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[_Part], Tag("<parts>")],
    Discriminator(
        _tag_of_content,
        custom_error_type="content_type",
        custom_error_message="content is a string or a list of parts",
    ),
]


class Message(_Strict):
    """One turn. That pictures belong to users, and users have to ask something, is the processor's to say."""

    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class ChatBody(_Strict):
    """The chat completion request, as far as it is served. None means: not asked for."""

    model: str | None = None
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Annotated[str, Tag("<text>")] | Annotated[list[str], Tag("<parts>")] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("metadata")
    @classmethod
    def _values_are_plain(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for key, item in (value or {}).items():
            if not isinstance(item, (str, int, float, bool, type(None))):
                raise ValueError(f"the value of {key[:40]!r} is not a string, number, boolean or null")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 12):
                raise ValueError(f"the key {key[:40]!r} is not a token id")
        return value

    @property
    def expected(self) -> str | None:
        """The right answer, where the row's metadata knows it."""
        value = (self.metadata or {}).get("expected")
        return None if value is None else str(value)

    def to_sampling_params(self, defaults: Mapping[str, Any], fallback_seed: int) -> SamplingParams:
        """What the row asks for, over `defaults` (the checkpoint's) for fields it leaves out.

        `fallback_seed` stands in for a missing seed, so that a resumed job draws what an undisturbed one would have.
        """
        names = SamplingParams.__dataclass_fields__
        asked = {
            name: value
            for name, value in self.model_dump(exclude={"messages", "metadata", "logprobs", "logit_bias"}).items()
            if name in names and value is not None
        }
        asked["max_tokens"] = self._one_limit(defaults.get("max_tokens"))
        asked["logprobs"] = self._num_logprobs()
        if self.logit_bias:
            asked["logit_bias"] = {int(key): value for key, value in self.logit_bias.items()}
        asked.setdefault("seed", fallback_seed)
        return SamplingParams(**{**defaults, **asked})

    def _one_limit(self, default: int | None) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = f"max_tokens is {old} and max_completion_tokens is {new}; give one of them"
            raise RequestError(message, "invalid_value", "max_completion_tokens")
        asked = old if old is not None else new
        if asked is None and default is not None:
            return max(default, self.min_tokens or 0)  # the checkpoint's default gives way to what the row asks for
        return asked

    def _num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "invalid_value", "top_logprobs")
        return None

    def to_conversation(self) -> list[dict[str, Any]]:
        """Plain messages, pictures not loaded yet."""
        return [message.model_dump(exclude_none=True) for message in self.messages]


class BatchRow(_Strict):
    """One line of the input file."""

    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: Literal["/v1/chat/completions"]
    body: ChatBody


def read_json(line: bytes) -> dict[str, Any]:
    """The row as a JSON object. Raises RequestError for anything else, and for one too large to be parsed."""
    check_shape(line)
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(f"the row is not UTF-8: byte {error.start} cannot be read", "not_utf8") from error
    except ValueError as error:
        raise RequestError(f"the row is not JSON: {error}", "not_json") from error
    if not isinstance(row, dict):
        raise RequestError(f"the row is a JSON {type(row).__name__}, not an object", "not_an_object")
    return row


def refuse_half_characters(line: bytes, row: dict[str, Any]) -> None:
    """JSON can spell half a surrogate pair, which is no text: no tokenizer takes it and no file can hold it."""
    if b"\\ud" not in line and b"\\uD" not in line:
        return
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise RequestError(f"the row spells half a surrogate pair ({half}): no character", "not_unicode") from error


def parse_row(row: dict[str, Any]) -> BatchRow:
    """Validate a row from `read_json`. Raises RequestError naming the first wrong field, unknown ones before others."""
    _check_counts(row)
    _refuse_unserved(row)
    try:
        return BatchRow.model_validate(row)
    except ValidationError as error:
        raise _first_error(error) from error


def _check_counts(row: dict[str, Any]) -> None:
    """Validation makes an object of every entry, and an error of every wrong one: how many there are comes first."""
    custom_id, body = row.get("custom_id"), row.get("body")
    if isinstance(custom_id, str):
        check_count("custom_id", "characters", custom_id, LIMITS.max_custom_id_chars, "custom_id_too_long")
    if not isinstance(body, dict):
        return
    for name, kind, what, limit in _COUNTED:
        if isinstance(value := body.get(name), kind):
            check_count(name, what, len(value), limit)
    if isinstance(metadata := body.get("metadata"), dict):
        num_chars = sum(len(key) + (len(value) if isinstance(value, str) else 0) for key, value in metadata.items())
        check_count("metadata", "characters", num_chars, LIMITS.max_metadata_chars)
    if isinstance(kwargs := body.get("chat_template_kwargs"), dict):
        plain_template_kwargs(kwargs)
    if isinstance(messages := body.get("messages"), list):
        contents = [message.get("content") for message in messages if isinstance(message, dict)]
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        check_count("messages", "parts", num_parts, LIMITS.max_parts)


def _refuse_unserved(row: dict[str, Any]) -> None:
    """Drop known fields that ask for nothing; refuse those that ask for what this runner does not do."""
    body = row.get("body")
    if not isinstance(body, dict):
        return
    for name, harmless in _UNSERVED_FIELDS.items():
        value = body.get(name)
        if value is None or any(value is item or (type(value) is type(item) and value == item) for item in harmless):
            body.pop(name, None)
        else:
            hint = _INSTEAD.get(name, "")
            raise RequestError(f"{name}={shown(value)} is not supported{hint}", "unsupported_parameter", name)
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") in _UNSERVED_ROLES:
            where = f"messages[{index}].role"
            raise RequestError(f"messages of role {message['role']} are not supported", "unsupported_value", where)


def _first_error(error: ValidationError) -> RequestError:
    errors = error.errors(include_url=False, include_context=False)
    first = next((item for item in errors if item["type"] == "extra_forbidden"), errors[0])
    path = _path(first["loc"])
    kind = first["type"]
    if kind == "extra_forbidden":
        return RequestError(f"{path}: unknown field", "unknown_parameter", path)
    if kind == "missing":
        return RequestError(f"{path}: missing", "missing_required_parameter", path)
    what = "Input should be an object" if kind == "model_type" else first["msg"].removeprefix("Value error, ")
    code = "invalid_type" if kind.endswith("_type") else kind if kind.startswith("unknown_") else "invalid_value"
    return RequestError(f"{path}: {what}, but it is {shown(first['input'])}", code, path)


def _path(location: tuple[int | str, ...]) -> str:
    """As OpenAI names parameters: messages[0].content, relative to the body."""
    names = [item if isinstance(item, int) else item[:60] for item in location if not str(item).startswith("<")]
    path = "".join(f"[{item}]" if isinstance(item, int) else f".{item}" for item in names).lstrip(".")
    return path.removeprefix("body.")
