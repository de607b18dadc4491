"""Parses the arguments of `LLM`'s calls into tasks. Knows no service and no engine.

Names of options are vLLM's where it has them. An option that is not served may have a value that changes nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from npu_runner.config import template_text
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.tasks import MadeTask, PromptTask, chat_task, pair_task, text_task
from npu_runner.prompts.text.chat_template import kwargs_with_effort
from npu_runner.prompts.text.tokenizer import plain_number
from npu_runner.prompts.text.tools import parse_tools
from npu_runner.request.limits import field_error, plain_template_kwargs, shown
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.pooling_params import CLASSIFY, LABELS, PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
_NO_MORE = object()
_Params = TypeVar("_Params", SamplingParams, PoolingParams, SamplingParams | PoolingParams)
AnyParams = SamplingParams | PoolingParams | Iterable[SamplingParams | PoolingParams]
"""One object for all prompts of a call, or one for each prompt."""


def is_one_prompt(prompts: Any) -> bool:
    """A list is a list of prompts, unless it is one prompt's token ids."""
    num_dims = getattr(prompts, "ndim", None)  # an array's
    if isinstance(prompts, (str, bytes, Mapping, PromptInputs)) or num_dims == 0:
        return True
    if not isinstance(prompts, Sequence) and num_dims is None:
        return False
    return isinstance(plain_number(next(iter(prompts), None)), int)


def is_one_conversation(conversations: Any) -> bool:
    """A list of messages is one, a list of lists several."""
    if isinstance(conversations, (str, bytes, Mapping)):
        return True  # which is said to be none
    return isinstance(conversations, Sequence) and len(conversations) > 0 and isinstance(conversations[0], Mapping)


def _no_params(given: Any) -> RequestError:
    return field_error("sampling_params", f"{type(given).__name__} {shown(given)} is not SamplingParams (for embed: "
                       "PoolingParams), nor a list of them; write SamplingParams(max_tokens=3), or "
                       "SamplingParams(**fields)", "invalid_type")


def with_fields(given: PoolingParams | Iterable[PoolingParams] | None,
                **values: Any) -> PoolingParams | Iterable[Any]:
    """`given`, with these fields. An object that is no PoolingParams stays as it is, and is refused when it is read."""
    if given is None:
        return PoolingParams(**values)

    def set_fields(one: Any) -> Any:
        return one.replace(**values) if isinstance(one, PoolingParams) else one

    if isinstance(given, PoolingParams) or not isinstance(given, Iterable):
        return set_fields(given)
    return list(map(set_fields, given)) if isinstance(given, Sequence) else map(set_fields, given)


def classes_task(given: PoolingParams | Iterable[PoolingParams] | None, processor: ChatProcessor) -> str:
    """The task of requests for classes. If each brings params, a model that generates text needs labels in all of them:
    `resolve_params` refuses those without."""
    if given is None or isinstance(given, PoolingParams):
        return CLASSIFY if given is None or given.labels is None else LABELS
    return CLASSIFY if processor.pooling is not None else LABELS


def params_of(given: Any, default: SamplingParams, count: int | None) -> AnyParams:
    """The params of a call with `count` prompts, where that is known: one for all, or one for each. Raises
    RequestError for what is none, and for another number of them."""
    if given is None:
        return default
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, (SamplingParams, PoolingParams, Iterable)):
        raise _no_params(given)
    if count is not None and isinstance(given, Sized) and len(given) != count:
        raise RequestError(f"{len(given)} sampling_params for {count} prompts; pass one, or one for each")
    if count is None or isinstance(given, (SamplingParams, PoolingParams, Sequence)):
        return given
    return list(islice(given, count))  # an iterator can be read only once


def with_index(index: int, error: RequestError) -> RequestError:
    """`error`, with the number of the prompt in its call."""
    return RequestError(f"prompt {index}: {error.message}", error.code, error.param)


# -- options of a call, and how its items become prompts ---------------------------------------------------------------


Parse = Callable[..., PromptTask]
"""Called with an item, and `number` and `params` of its task. Raises RequestError for an item that is no prompt."""
_UNSERVED: dict[str, tuple[Any, str]] = {
    "lora_request": (None, "LLM(lora=PATH) merges one adapter for all requests"),
    "priority": (None, "requests are served in their order"),
    "tokenization_kwargs": (None, "SamplingParams have truncate_prompt_tokens"),
    "chat_template_content_format": ("auto", "the template itself says what it takes"),
}


class PromptOptions(TypedDict, total=False):
    """vLLM's options of every call; only values without an effect are accepted."""

    lora_request: None
    priority: None
    tokenization_kwargs: None


class ChatOptions(PromptOptions, total=False):
    """Options of calls with conversations; see LLM.chat."""

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
    """Options of calls with queries and documents; see LLM.score."""

    allowed_media_dir: Path | str | None
    mm_processor_kwargs: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    instruction: str | None


def checked_options(call: str, options: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The options that change something. Raises TypeError for a name that `kind` lacks, RequestError for an option that
    is not served."""
    known = sorted(kind.__optional_keys__)  # type: ignore[attr-defined]
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}; {_instead_of(name, known)}")
        if name in _UNSERVED and value is not None and value != _UNSERVED[name][0]:
            raise field_error(name, f"{shown(value)} is not served: {_UNSERVED[name][1]}", "unsupported_parameter")
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
    """Parses a query and a document. Raises RequestError for invalid options."""
    options = {"instruction": instruction, "mm_processor_kwargs": mm_processor_kwargs,
               "chat_template_kwargs": plain_template_kwargs(dict(chat_template_kwargs or {}))}
    return lambda pair, **task_fields: pair_task(processor, pair, rules, options=options, **task_fields)


def chat_parser(processor: ChatProcessor, rules: MediaRules, *, mm_processor_kwargs: Mapping[str, Any] | None = None,
                chat_template: Path | str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None,
                add_generation_prompt: bool | None = None, continue_final_message: bool = False,
                tools: Sequence[Mapping[str, Any]] | None = None, reasoning_effort: str | None = None) -> Parse:
    """Parses conversations. Raises RequestError for invalid options."""
    template = None if chat_template is None else template_text(chat_template)
    kwargs = None if chat_template_kwargs is None else plain_template_kwargs(dict(chat_template_kwargs))
    options = {
        "chat_template_kwargs": kwargs_with_effort(
            kwargs, reasoning_effort, lambda name: processor.template_reads(name, template)),
        "tools": None if tools is None else parse_tools(tools), "add_generation_prompt": add_generation_prompt,
        "chat_template": template, "continue_final_message": continue_final_message,
        "mm_processor_kwargs": mm_processor_kwargs}
    return lambda messages, **task_fields: chat_task(processor, messages, rules, options, **task_fields)


def prompt_or_chat_parser(processor: ChatProcessor, rules: MediaRules, options: Mapping[str, Any], *,
                          add_generation_prompt: bool | None = False) -> Parse:
    """Parses raw prompts and conversations in any order. Where `options` do not say `add_generation_prompt`, the prompt
    of a conversation ends behind its last message, as in vLLM; with None as in `chat`."""
    chat = chat_parser(processor, rules, **{"add_generation_prompt": add_generation_prompt, **options})

    def parse(item: Any, **task_fields: Any) -> PromptTask:
        if is_conversation(item):
            return chat(item, **task_fields)
        for name in options:
            raise field_error(name, "belongs to messages; a raw prompt is used as it is")
        return parse_prompt(item, **task_fields)

    return parse


def parse_prompt(item: Any, **task_fields: Any) -> PromptTask:
    """Parses a raw prompt."""
    return MadeTask(made=item, **task_fields) if isinstance(item, PromptInputs) else text_task(item, **task_fields)


def is_conversation(item: Any) -> bool:
    """Whether it is a list of messages, not of prompts."""
    is_list = isinstance(item, Sequence) and not isinstance(item, (str, bytes)) and len(item) > 0
    return is_list and isinstance(item[0], Mapping) and "role" in item[0]


# -- the tasks of a call -----------------------------------------------------------------------------------------------


@functools.cache  # a process logs it once
def _log_default_limit() -> None:
    logger.warning("an answer was cut off: its SamplingParams name no max_tokens, and the default was reached "
                   "(LLM.get_default_sampling_params()); finish_reason is \"length\" then. This is said once.")


class UnsaidLimit:
    """max_tokens of a call's requests that set none: the checkpoint's `defaults` (fields of SamplingParams), then
    `otherwise`. None: as many as the model's length leaves."""

    def __init__(self, defaults: Mapping[str, Any], otherwise: int | None = None):
        self._most: int | None = defaults.get("max_tokens", otherwise)
        self._given: set[int] = set()

    def bounded(self, params: _Params) -> _Params:
        """`params` with a limit, if there is one."""
        if not isinstance(params, SamplingParams) or params.max_tokens is not None or self._most is None:
            return params
        limited = params.with_limit(self._most)
        self._given.add(limited.max_tokens or 0)
        return limited

    def log_cut_off(self, output: RequestOutput) -> None:
        """Log the first answer of this process that such a limit has cut off."""
        for completion in output.completions:
            if completion.is_cut_off and len(completion.token_ids) in self._given:
                _log_default_limit()


def tasks_of(items: Iterable[Any], params: AnyParams, parse: Parse, limit: UnsaidLimit,
             processor: ChatProcessor, first_number: int = 0) -> Iterator[PromptTask]:
    """The task of each item, numbered in their order; an invalid item becomes a task with its error. Raises
    RequestError if there are fewer params than items."""
    wanted = repeat(params) if isinstance(params, (SamplingParams, PoolingParams)) else iter(params)
    last = resolved = None
    for index, item in enumerate(items):
        one: Any = next(wanted, _NO_MORE)
        if one is _NO_MORE:
            raise RequestError(f"{index} sampling_params for more prompts; pass one, or one for each")
        try:
            if not isinstance(one, (SamplingParams, PoolingParams)):
                raise _no_params(one)
            if one is not last or resolved is None:
                processor.most_prompt_tokens(new := processor.resolve_params(limit.bounded(one)))  # raises for too many
                last, resolved = one, new
            yield parse(item, number=first_number + index, params=resolved)
        except RequestError as error:
            yield MadeTask(made=error, number=first_number + index, params=resolved or SamplingParams())
