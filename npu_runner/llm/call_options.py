"""What a call of `LLM` may say beside prompts and params, and how its items become prompts. Knows no engine.

Names are vLLM's where it has them. What it has and is not served may be there as long as it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from npu_runner.config import template_text
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.prompt_forms import raw_prompt
from npu_runner.prompts.tasks import MadeTask, PromptTask, chat_task, pair_task, text_task
from npu_runner.prompts.text.chat_template import kwargs_with_effort
from npu_runner.prompts.text.tools import parse_tools
from npu_runner.request.limits import plain_template_kwargs, shown
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams

Parse = Callable[[Any], PromptTask]
"""Raises RequestError for an item that is no prompt."""
_UNSERVED: dict[str, tuple[Any, str]] = {
    "lora_request": (None, "LLM(lora=PATH) merges one adapter for all requests"),
    "priority": (None, "requests are served in their order"),
    "tokenization_kwargs": (None, "SamplingParams have truncate_prompt_tokens"),
    "chat_template_content_format": ("auto", "the template itself says what it takes"),
}


class PromptOptions(TypedDict, total=False):
    """Of every call: vLLM's that ask for nothing."""

    lora_request: None
    priority: None
    tokenization_kwargs: None


class ChatOptions(PromptOptions, total=False):
    """Of a call with conversations; see LLM.chat."""

    allowed_media_dir: Path | str | None
    mm_processor_kwargs: Mapping[str, Any] | None
    chat_template: Path | str | None
    chat_template_content_format: Literal["auto"]
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    reasoning_effort: str | None


class PairOptions(PromptOptions, total=False):
    """Of a call with queries and documents; see LLM.score."""

    allowed_media_dir: Path | str | None
    mm_processor_kwargs: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    instruction: str | None


def checked_options(call: str, options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Those that ask for anything. Raises TypeError for a name that `kind` has not, RequestError for what is not
    served."""
    known = sorted(kind.__optional_keys__)  # type: ignore[attr-defined]
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}; {_instead_of(name, known)}")
        if name in _UNSERVED and value is not None and value != _UNSERVED[name][0]:
            message = f"{name}: {shown(value)} is not served: {_UNSERVED[name][1]}"
            raise RequestError(message, "unsupported_parameter", name)
    return {name: value for name, value in options.items() if name not in _UNSERVED and value is not None}


def _instead_of(name: str, known: Sequence[str]) -> str:
    for params in (SamplingParams, PoolingParams):
        if name in {field.name for field in fields(params)}:
            return f"give {params.__name__}({name}=...) as its second argument"
    served = [each for each in known if each not in _UNSERVED]
    return f"it takes {', '.join(served)}" if served else "it takes no such options"


def pair_parser(processor: ChatProcessor, rules: MediaRules, *, instruction: str | None = None,
                mm_processor_kwargs: Mapping[str, Any] | None = None,
                chat_template_kwargs: Mapping[str, Any] | None = None) -> Parse:
    """Of a query and a document. Raises RequestError for options that cannot be."""
    options = {"instruction": instruction, "mm_processor_kwargs": mm_processor_kwargs,
               "chat_template_kwargs": plain_template_kwargs(dict(chat_template_kwargs or {}))}
    return lambda pair: pair_task(processor, pair, rules, options)


def chat_parser(processor: ChatProcessor, rules: MediaRules, *, mm_processor_kwargs: Mapping[str, Any] | None = None,
                chat_template: Path | str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
                add_generation_prompt: bool | None = None, continue_final_message: bool = False,
                tools: Sequence[Mapping[str, Any]] | None = None, reasoning_effort: str | None = None) -> Parse:
    """Of conversations. Raises RequestError for options that cannot be."""
    template = None if chat_template is None else template_text(chat_template)

    def is_read(name: str) -> bool:
        return processor.template_reads(name, template)

    kwargs = None if chat_template_kwargs is None else plain_template_kwargs(dict(chat_template_kwargs))
    kwargs_and_effort = kwargs_with_effort(kwargs, reasoning_effort, is_read)
    checked_tools = None if tools is None else parse_tools(tools)

    def parse(messages: Any) -> PromptTask:
        return chat_task(
            processor, messages, rules, chat_template_kwargs=kwargs_and_effort, tools=checked_tools,
            add_generation_prompt=add_generation_prompt, chat_template=template,
            continue_final_message=continue_final_message, mm_processor_kwargs=mm_processor_kwargs)

    return parse


def prompt_or_chat_parser(processor: ChatProcessor, rules: MediaRules, options: Mapping[str, Any]) -> Parse:
    """Of raw prompts and conversations in any order. A conversation is looked at, not answered: its prompt ends behind
    the last message, as in vLLM."""
    chat = chat_parser(processor, rules, **{"add_generation_prompt": False, **options})

    def parse(item: Any) -> PromptTask:
        if is_conversation(item):
            return chat(item)
        for name in options:
            raise RequestError(f"{name}: belongs to messages; a raw prompt is taken as it is", "invalid_value", name)
        return parse_prompt(item)

    return parse


def parse_prompt(item: Any) -> PromptTask:
    """Of a raw prompt."""
    return MadeTask(made=item) if isinstance(item, PromptInputs) else text_task(raw_prompt(item))


def is_conversation(item: Any) -> bool:
    """Messages, and no list of prompts."""
    is_list = isinstance(item, Sequence) and not isinstance(item, (str, bytes)) and len(item) > 0
    return is_list and isinstance(item[0], Mapping) and "role" in item[0]
