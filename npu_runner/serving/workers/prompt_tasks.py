"""Prompts that are to be prepared, in this process or in a worker. Imports neither torch nor an engine.

Knows nothing of callers, nor of what is done with a prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.media.videos import Video
from npu_runner.prompts.pair_prompts import Side
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.prompt_forms import RawPrompt
from npu_runner.prompts.sending import checked_conversation, checked_pair, sendable_images
from npu_runner.prompts.text.messages import check_ending
from npu_runner.request.prompt_inputs import PromptInputs

# To tokenize this many characters takes about as long as to send them to a worker and to take the tokens back.
_LEAST_CHARS = 4096


@dataclass(frozen=True, kw_only=True)
class PromptTask(ABC):
    """A prompt to be prepared. `images`: and videos, each with where it stands, in order."""

    images: Sequence[tuple[Any, str]] = ()
    num_chars: int = 0
    is_plain: bool = True
    """All of it but the images is of Python's own types, so any process can unpickle it."""
    truncate_prompt_tokens: int | None = None
    """Keep the last so many tokens."""

    @property
    def is_worth_a_worker(self) -> bool:
        """It takes longer than the way there and back."""
        return self.is_plain and (bool(self.images) or self.num_chars >= _LEAST_CHARS)

    def sendable(self, max_source_pixels: int) -> PromptTask:
        """The same, picklable. Raises RequestError for an image that cannot be."""
        return replace(self, images=sendable_images(self.images, max_source_pixels))

    @abstractmethod
    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        """What the engine takes. Raises RequestError where the prompt cannot be served."""


@dataclass(frozen=True, kw_only=True)
class ChatTask(PromptTask):
    """A conversation that was parsed: `messages` hold text and, where an image stands, a part that says so."""

    messages: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ChatProcessor: tools, add_generation_prompt, continue_final_message, mm_processor_kwargs, chat_template, as
    far as they ask for anything."""

    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        images = (image for image, _ in self.images)
        messages = [
            {**message, "content": [
                {"type": kind, kind: next(images)} if (kind := part["type"]) in ("image", "video") else part
                for part in message["content"]
            ]} if isinstance(message["content"], list) else message
            for message in self.messages
        ]
        return processor(messages, self.chat_template_kwargs, truncate_prompt_tokens=self.truncate_prompt_tokens,
                         **self.options)


@dataclass(frozen=True, kw_only=True)
class TextTask(PromptTask):
    """A raw prompt: text or token ids. Its videos stand behind its images, wherever their placeholders do."""

    prompt: Any
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        seen = [each for each, _ in self.images]
        images, videos = ([each for each in seen if isinstance(each, Video) is is_video] for is_video in (False, True))
        return processor.from_text(self.prompt, images, videos, truncate_prompt_tokens=self.truncate_prompt_tokens,
                                   mm_processor_kwargs=self.mm_processor_kwargs)


@dataclass(frozen=True, kw_only=True)
class PairTask(PromptTask):
    """A query and a document that were parsed. `options`: PairPrompts' own; `num_of_query`: of the images."""

    query: str | list[dict[str, str]]
    document: str | list[dict[str, str]]
    num_of_query: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        assert processor.pairs is not None, "the task was checked before"
        seen = list(self.images)
        query = Side(self.query, seen[: self.num_of_query])
        document = Side(self.document, seen[self.num_of_query :])
        return processor.pairs(query, document, truncate_prompt_tokens=self.truncate_prompt_tokens, **self.options)


def pair_task(pair: tuple[Any, Any], rules: MediaRules, *, has_vision: bool, options: Mapping[str, Any]) -> PairTask:
    """Raises RequestError for what can be seen without reading an address or decoding an image."""
    query, document = checked_pair(pair, ("data_1", "data_2"), rules, has_vision=has_vision)
    contents = query.content, document.content
    num_chars = sum(len(part["text"] if isinstance(part, dict) else part) for content in contents
                    for part in ([content] if isinstance(content, str) else content)
                    if isinstance(part, str) or part["type"] == "text")
    return PairTask(query=query.content, document=document.content, num_of_query=len(query.seen), num_chars=num_chars,
                    images=[*query.seen, *document.seen], options=options)


def chat_task(messages: Any, chat_template_kwargs: Mapping[str, Any] | None, rules: MediaRules, *, has_vision: bool,
              tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool | None = None,
              continue_final_message: bool = False, mm_processor_kwargs: Mapping[str, Any] | None = None,
              chat_template: str | None = None) -> ChatTask:
    """Raises RequestError for what can be seen without reading an address or decoding an image."""
    conversation = checked_conversation(messages, rules, has_vision=has_vision)
    check_ending(conversation, add_generation_prompt, continue_final_message)
    asked = {"tools": tools, "add_generation_prompt": add_generation_prompt,
             "continue_final_message": continue_final_message or None, "mm_processor_kwargs": mm_processor_kwargs,
             "chat_template": chat_template}
    return ChatTask(
        messages=conversation.messages, chat_template_kwargs=chat_template_kwargs, images=conversation.seen,
        options={name: value for name, value in asked.items() if value is not None},
        num_chars=sum(len(text) for _, text in conversation.texts()))


def text_task(raw: RawPrompt) -> TextTask:
    """Where its prompt is neither text nor token ids, preparing it says so."""
    prompt = raw.prompt
    images = [(image, f"images[{number}]") for number, image in enumerate(raw.images)]
    images += [(video, f"videos[{number}]") for number, video in enumerate(raw.videos)]
    settings: dict[str, Any] = {"images": images, "mm_processor_kwargs": raw.mm_processor_kwargs}
    if isinstance(prompt, str):
        return TextTask(prompt=str.__str__(prompt), num_chars=len(prompt), **settings)
    is_plain = isinstance(prompt, Sequence) and all(type(token) is int for token in prompt)
    return TextTask(prompt=list(prompt) if is_plain else prompt, is_plain=is_plain, **settings)


@dataclass(frozen=True)
class NumberedTask:
    """`number`: the caller's name for it."""

    number: int
    task: PromptTask


@dataclass(frozen=True)
class Preparation:
    """What workers apply to tasks."""

    processor: ChatProcessor

    def __call__(self, numbered: NumberedTask) -> PromptInputs | RequestError:
        try:
            return numbered.task.prepare(self.processor)
        except RequestError as error:
            return error
