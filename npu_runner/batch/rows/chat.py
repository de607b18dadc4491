"""Reads the bodies of /v1/chat/completions and writes their answers. Knows nothing of files, tokens or the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from npu_runner.batch.rows.endpoint import (
    AS_JSON,
    ONE_TEMPLATE,
    AnswerForm,
    AnswerRow,
    RequestBody,
    RowBody,
    Strict,
    TextForm,
    Unserved,
    by_tag,
    object_tag,
    type_tag,
)
from npu_runner.batch.rows.logprobs_json import opened
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.text.chat_template import Effort, kwargs_with_effort
from npu_runner.prompts.text.messages import NO_FILE_PARTS
from npu_runner.prompts.text.tool_parsers import parse_calls
from npu_runner.request.limits import LIMITS, check_count, field_error, shown
from npu_runner.request.outputs import CompletionOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams

_CHOICES = ("none", "auto", "required")


class TextPart(Strict):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """The address of an image: a data: URL, file:// or a path. Detail is the checkpoint's, but for "low". The other
    fields are PageOptions', which checks their values."""

    url: str = Field(min_length=1)
    detail: Literal["auto", "high", "low"] | None = None
    page: int | None = None
    dpi: float | None = None
    longest: int | None = None
    shortest: int | None = None
    box: list[float] | None = None
    rotate: int | None = None
    size: list[int] | None = None
    version: str | None = None


class ImagePart(Strict):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class VideoUrl(Strict):
    """The address of a video: as an image's."""

    url: str = Field(min_length=1)


class VideoPart(Strict):
    """A video in a message."""

    type: Literal["video_url"]
    video_url: VideoUrl


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")]
    | Annotated[VideoPart, Tag("<video_url>")],
    by_tag(object_tag, "unknown_part", 'a part is an object whose type is "text", "image_url" or "video_url"'),
]
_Content = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[list[Part], Tag("<list>")],
    by_tag(type_tag, "content_type", "content is a string or a list of parts"),
]


class Message(Strict):
    """One turn, also one that was an answer: its nulls ask for nothing. The processor checks which fields belong to
    which role, and that a user asks something."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


Messages = Annotated[list[Message], AS_JSON]


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    """The tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[NamedTool, Tag("<dict>")],
    by_tag(lambda value: "<word>" if value in _CHOICES else type_tag(value), "choice_kind",
           '"none", "auto", "required" or {"type": "function", "function": {"name": ...}} is needed'),
]


class ConversationBody(RowBody):
    """The fields of a conversation. None: the row does not set the field."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @classmethod
    def refuse_unserved(cls, body: dict[str, Any]) -> None:
        super().refuse_unserved(body)
        check_messages(body)

    def conversation(self, processor: ChatProcessor, params: Any, template_kwargs: Mapping[str, Any] | None,
                     **options: Any) -> PromptInputs:
        """The prompt of `messages`. `options`: more arguments of the processor."""
        messages: Any = self.messages  # as JSON
        return processor(
            messages, template_kwargs, continue_final_message=bool(self.continue_final_message),
            truncate_prompt_tokens=processor.most_prompt_tokens(params), mm_processor_kwargs=self.mm_processor_kwargs,
            **options)


class ChatBody(ConversationBody, RequestBody):
    """The chat completion request, as far as it is served. None: the row does not set the field."""

    unserved: ClassVar[Mapping[str, Unserved]] = {
        **dict.fromkeys(
            ("audio", "moderation", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
             "safety_identifier", "stream_options", "verbosity", "web_search_options"), Unserved()),
        **dict.fromkeys(("store", "stream"), Unserved(False)),
        "chat_template": Unserved(instead=ONE_TEMPLATE), "function_call": Unserved("none", instead="use tool_choice"),
        "functions": Unserved(instead="give them as tools"), "modalities": Unserved(["text"]),
        "service_tier": Unserved("auto", "default"), "spaces_between_special_tokens": Unserved(True)}

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: Effort | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_thinking_tokens: int | None = None

    def own_max_tokens(self) -> int | None:
        """The field has an old name and a new one."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = f"max_tokens is {old} and max_completion_tokens is {new}; give one of them"
            raise RequestError(message, "invalid_value", "max_completion_tokens")
        if new is not None and new < 1:
            raise field_error("max_completion_tokens", f"{shown(new)} is below 1", "invalid_sampling_parameter")
        return old if new is None else new

    def num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "invalid_value", "top_logprobs")
        return None

    def prepare(self, processor: ChatProcessor, media: MediaRules,
                params: SamplingParams) -> tuple[PromptInputs, AnswerForm]:
        tools = None if self.tool_choice == "none" else self.tools
        parser = processor.parser_of_calls() if tools else None
        kwargs = kwargs_with_effort(self.chat_template_kwargs, self.reasoning_effort, processor.template_reads)
        prompt = self.conversation(processor, params, kwargs, media=media, tools=tools,
                                   is_call_forced=self.is_call_forced, add_generation_prompt=self.add_generation_prompt)
        form = ChatForm(
            model=self.model, tool_call_parser=parser, tools=tuple(tools or ()) if parser else (),
            parallel_tool_calls=self.parallel_tool_calls is not False)
        return prompt, form

    @property
    def is_call_forced(self) -> bool:
        """The answer is to be calls and nothing else."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def with_forced_calls(self, params: SamplingParams, processor: ChatProcessor) -> SamplingParams:
        choice, rules = self.tool_choice, self.rule_fields()
        if not self.tools and self.is_call_forced:
            raise RequestError("tool_choice: a call is forced, and there are no tools", "invalid_value", "tool_choice")
        if not self.tools or choice == "none":
            return params
        if rules and params.structured_outputs is not None:
            message = f"{rules[0]}: beside tools there are no rules for the answer; leave it out, or tool_choice none"
            raise RequestError(message, "unsupported_parameter", rules[0])
        if not self.is_call_forced:
            return params.replace(structured_outputs=None)  # a job's rule is for rows that leave all to the job
        name = choice.function.name if isinstance(choice, NamedTool) else None
        grammar = processor.grammar_of_calls(self.tools, name=name, is_parallel=self.parallel_tool_calls is not False)
        return params.replace(structured_outputs=grammar)


def check_messages(body: Mapping[str, Any]) -> None:
    """Raises RequestError for more than a conversation may have, before an object is made of every entry, and for
    OpenAI's messages that are not served."""
    if not isinstance(messages := body.get("messages"), list):
        return
    check_count("messages", "messages", messages, LIMITS.max_messages)
    num_parts = 0
    for index, message in enumerate(messages):
        if isinstance(message, dict):
            _refuse_message(message, f"messages[{index}]")
            content = message.get("content")
            parts = content if isinstance(content, list) else []
            num_parts += len(parts)
            for number, part in enumerate(parts):
                if isinstance(part, dict) and part.get("type") == "file":
                    field = f"messages[{index}].content[{number}]"
                    raise RequestError(f"{field}: {NO_FILE_PARTS}", "unsupported_part", field)
    check_count("messages", "parts", num_parts, LIMITS.max_parts)


def _refuse_message(message: dict[str, Any], where: str) -> None:
    role = message.get("role")
    if role == "function":
        raise RequestError(f"messages of role {role} are not supported", "unsupported_value", f"{where}.role")
    if message.get("refusal") is not None:
        field = f"{where}.refusal"
        raise RequestError(f"{field}: a refusal is no text of the model's; leave it out", "unsupported_value", field)
    # An answer that is replayed may have no content.
    is_answer = role == "assistant" and (message.get("tool_calls") or message.get("reasoning_content") is not None)
    if message.get("content") is None and not is_answer:
        field = f"{where}.content"
        if "content" not in message:
            raise RequestError(f"{field}: missing", "missing_required_parameter", field)
        raise RequestError(f"{field}: content is a string or a list of parts, but it is None", "invalid_type", field)


@dataclass(frozen=True, kw_only=True)
class ChatForm(TextForm):
    id_prefix: ClassVar[str] = "chatcmpl-"
    object: ClassVar[str] = "chat.completion"
    item_name: ClassVar[str] = "message"
    counts_reasoning: ClassVar[bool] = True
    prompt_logprobs_in_body: ClassVar[bool] = True

    tool_call_parser: str | None = None
    """It reads calls out of the answer; None: the answer is text."""
    tools: tuple[Mapping[str, Any], ...] = ()
    parallel_tool_calls: bool = True

    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        content, calls = self._calls(completion, row.digest)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content if content.strip() else None
            message["tool_calls"] = calls
        if row.splits_reasoning:
            message["reasoning_content"] = completion.reasoning_content
            if completion.reasoning_content is not None:  # as in vLLM: an answer of reasoning alone has no content
                message["content"] = message["content"] or None
        row.write(opened({"index": completion.index, "message": message}, "logprobs"))
        if completion.logprobs is None:
            row.write("null")
        else:
            row.write('{"content":[')
            for number, position in enumerate(row.logprobs_json.positions(completion.logprobs)):
                row.write(f",{position}" if number else position)
            row.write('],"refusal":null}')
        # An answer that was cut off may lack calls, so that it stays "length".
        reason = "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
        row.write_end(completion, reason)

    @classmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        return item["message"]["content"] or ""

    @classmethod
    def logprobs_of(cls, logprobs: Mapping[str, Any], num_prompt_tokens: int | None) -> Sequence[float]:
        return [token["logprob"] for token in logprobs.get("content") or ()]

    def _calls(self, completion: CompletionOutput, row_digest: str) -> tuple[str, list[dict[str, Any]]]:
        if self.tool_call_parser is None:
            return completion.text, []
        content, calls = parse_calls(
            self.tool_call_parser, completion.text, self.tools, is_parallel=self.parallel_tool_calls)
        return content, [
            {
                "id": f"call_{row_digest[:24]}_{completion.index}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls)
        ]
