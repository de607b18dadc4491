"""Reads the bodies of /v1/chat/completions and writes their answers. Knows nothing of files, tokens or the engine."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from npu_runner.batch.rows.endpoint import AnswerForm, PromptProcessor, RequestBody, Strict
from npu_runner.batch.rows.logprobs_json import LogprobsJson, encoded, opened, to_json
from npu_runner.errors import RequestError
from npu_runner.limits import LIMITS, check_count, plain_template_kwargs
from npu_runner.multimodal.inputs import PromptInputs
from npu_runner.multimodal.media import MediaRules, resolve_media
from npu_runner.outputs import CompletionOutput
from npu_runner.sampling_params import SamplingParams

_UNSERVED_ROLES = ("tool", "function")


class TextPart(Strict):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """Where a picture is: a data: URL, file:// or a path. The checkpoint decides on detail, so "low" is refused."""

    url: str = Field(min_length=1)
    detail: Literal["auto", "high"] | None = None


class ImagePart(Strict):
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


class Message(Strict):
    """One turn. That pictures belong to users, and users have to ask something, is the processor's to say."""

    role: Literal["system", "developer", "user", "assistant"]
    content: _Content


class ChatBody(RequestBody):
    """The chat completion request, as far as it is served. None means: not asked for."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
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
    instead: ClassVar[Mapping[str, str]] = {
        "reasoning_effort": "; where the model's chat template reads one, it goes into chat_template_kwargs"
    }

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        super().check_counts(body)
        if isinstance(kwargs := body.get("chat_template_kwargs"), dict):
            plain_template_kwargs(kwargs)
        if isinstance(messages := body.get("messages"), list):
            check_count("messages", "messages", messages, LIMITS.max_messages)
            contents = [message.get("content") for message in messages if isinstance(message, dict)]
            num_parts = sum(len(content) for content in contents if isinstance(content, list))
            check_count("messages", "parts", num_parts, LIMITS.max_parts)

    @classmethod
    def refuse_unserved(cls, body: dict[str, Any]) -> None:
        super().refuse_unserved(body)
        messages = body.get("messages")
        for index, message in enumerate(messages if isinstance(messages, list) else []):
            if isinstance(message, dict) and message.get("role") in _UNSERVED_ROLES:
                where = f"messages[{index}].role"
                raise RequestError(f"messages of role {message['role']} are not supported", "unsupported_value", where)

    def most_tokens(self, default: int | None) -> int | None:
        """As for every endpoint, under the field's old name or its new one."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = f"max_tokens is {old} and max_completion_tokens is {new}; give one of them"
            raise RequestError(message, "invalid_value", "max_completion_tokens")
        return super().most_tokens(default) if new is None else new

    def num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "invalid_value", "top_logprobs")
        return None

    def to_conversation(self) -> list[dict[str, Any]]:
        """Plain messages, pictures not loaded yet."""
        return [message.model_dump(exclude_none=True) for message in self.messages]

    def prepare(
        self, processor: PromptProcessor, media: MediaRules, params: SamplingParams
    ) -> tuple[PromptInputs, AnswerForm]:
        conversation = resolve_media(self.to_conversation(), media)
        return processor(conversation, self.chat_template_kwargs), ChatForm(model=self.model)


@dataclass(frozen=True, kw_only=True)
class ChatForm(AnswerForm):
    """A chat completion."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    object: ClassVar[str] = "chat.completion"
    counts_reasoning: ClassVar[bool] = True

    def write_choice(
        self, completion: CompletionOutput, row: io.BytesIO, logprobs_json: LogprobsJson, *, splits_reasoning: bool
    ) -> None:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        if splits_reasoning:
            message["reasoning_content"] = completion.reasoning_content
            if completion.reasoning_content is not None:  # as in vLLM: who has only thought has no content
                message["content"] = completion.text or None
        row.write(encoded(opened({"index": completion.index, "message": message}, "logprobs")))
        if completion.logprobs is None:
            row.write(b"null")
        else:
            row.write(b'{"content":[')
            for number, position in enumerate(logprobs_json.positions(completion.logprobs)):
                row.write(encoded(f",{position}" if number else position))
            row.write(b'],"refusal":null}')
        row.write(encoded(f',"finish_reason":{to_json(completion.finish_reason)}}}'))
