"""Prompts that are to be prepared, in this process or in a worker, with the images that they bring. Imports no torch.

Encoded images travel as they are, and so does the file of a PIL image that was opened and not yet read: the worker
decodes them. A PIL image whose pixels the caller has already is made upright RGB here and travels as these pixels.
Knows nothing of callers, nor of what is done with a prompt.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from npu_runner.errors import RequestError
from npu_runner.prompts.media.images import FORMATS, exif_orientation, open_image
from npu_runner.prompts.media.media import Media, MediaRules, resolve_media
from npu_runner.prompts.media.videos import Video
from npu_runner.prompts.pair_prompts import Side, parse_side
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.prompt_forms import RawPrompt
from npu_runner.prompts.text.messages import Conversation, check_ending, parse_messages
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams

# To tokenize this many characters takes about as long as to send them to a worker and to take the tokens back.
_LEAST_CHARS = 4096


@dataclass(frozen=True, kw_only=True)
class PromptTask(ABC):
    """A prompt to be prepared. `images`: and videos, each with where it stands, in order."""

    number: int = 0
    """Its index among the requests of a service."""
    params: SamplingParams | PoolingParams = field(default_factory=SamplingParams)
    """As `ChatProcessor.resolve_params` has made them."""
    images: Sequence[tuple[Any, str]] = ()
    num_chars: int = 0
    is_plain: bool = True
    """All of it but the images is of Python's own types, so any process can unpickle it."""

    @property
    def is_worth_a_worker(self) -> bool:
        """Preparing it takes longer than the way to a worker and back."""
        return self.is_plain and (bool(self.images) or self.num_chars >= _LEAST_CHARS)

    @property
    def num_bytes(self) -> int:
        """About what a sendable task takes until it is prepared."""
        return self.num_chars + sum({id(image): _size(image) for image, _ in self.images}.values())

    def sendable(self, max_source_pixels: int) -> PromptTask:
        """The same, picklable. Raises RequestError for an image that cannot be sent."""
        return replace(self, images=_sendable_images(self.images, max_source_pixels)) if self.images else self

    @abstractmethod
    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        """The prompt as the engine takes it. Raises RequestError where it cannot be served."""


@dataclass(frozen=True, kw_only=True)
class MadeTask(PromptTask):
    """A prompt that is prepared already, or the error that it caused."""

    made: PromptInputs | RequestError

    @property
    def is_worth_a_worker(self) -> bool:
        return False

    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        if isinstance(self.made, RequestError):
            raise self.made
        return self.made


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
        return processor(messages, self.chat_template_kwargs, **self.options,
                         truncate_prompt_tokens=processor.most_prompt_tokens(self.params))


@dataclass(frozen=True, kw_only=True)
class TextTask(PromptTask):
    """A raw prompt: text or token ids. Its videos stand behind its images, wherever their placeholders do."""

    prompt: Any
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        seen = [each for each, _ in self.images]
        images, videos = ([each for each in seen if isinstance(each, Video) is is_video] for is_video in (False, True))
        return processor.from_text(self.prompt, images, videos, mm_processor_kwargs=self.mm_processor_kwargs,
                                   truncate_prompt_tokens=processor.most_prompt_tokens(self.params))


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
        return processor.pairs(query, document, **self.options,
                               truncate_prompt_tokens=processor.most_prompt_tokens(self.params))


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


# -- images on their way to a worker -----------------------------------------------------------------------------------


class _Pixels:
    """Decoded pixels, uint8 (height, width, 3); on the other side of a process border it is a PIL image."""

    def __init__(self, image: Image.Image):
        self.pixels_HWC = np.asarray(image)

    def __reduce__(self) -> tuple[Any, tuple[np.ndarray]]:
        return Image.fromarray, (self.pixels_HWC,)


def checked_conversation(messages: Any, rules: MediaRules, *, has_vision: bool) -> Conversation:
    """The conversation, its addresses not read yet, all text in it plain strings.

    Raises RequestError for whatever can be seen without reading an address or decoding an image.
    """
    is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
    conversation = parse_messages(
        resolve_media(messages, rules) if is_list else messages, has_vision=has_vision, max_images=rules.max_images)
    # A string of a class of its own may be one that no worker knows.
    conversation.messages = conversation.map_text(lambda role, text, is_part: str.__str__(text))
    return conversation


def checked_pair(pair: tuple[Any, Any], names: tuple[str, str], rules: MediaRules, *,
                 has_vision: bool) -> tuple[Side, Side]:
    """A query and a document, their addresses not read yet. `names`: of the fields that errors name. Raises
    RequestError for whatever can be seen without reading an address or decoding an image."""
    resolved = resolve_media(pair, rules, names=names)
    query, document = (parse_side(side, name, has_vision=has_vision)
                       for side, name in zip(resolved, names, strict=True))
    return query, document


def _sendable_images(images: Sequence[tuple[Any, str]], max_source_pixels: int) -> list[tuple[Any, str]]:
    """What travels in the place of each (image, where it stood); of the same image it is the same object.

    Raises RequestError for an image that is decoded here and cannot be.
    """
    known: dict[int, Any] = {}
    for image, where in images:
        if id(image) not in known:
            known[id(image)] = _sendable(image, where, max_source_pixels)
    return [(known[id(image)], where) for image, where in images]


def _size(image: Any) -> int:
    if isinstance(image, Video):
        image = image.source
    if isinstance(image, _Pixels):
        return int(image.pixels_HWC.nbytes)
    return len(image.url) if isinstance(image, Media) else len(image)


def _sendable(image: Any, where: str, max_source_pixels: int) -> Any:
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, (Media, Video)):
        return image
    data = unread_file(image)
    if data is not None:
        return data
    try:
        return _Pixels(open_image(image, max_source_pixels=max_source_pixels))
    except RequestError as error:
        raise RequestError(f"{where}: {error.message}", error.code, where) from error


def unread_file(image: Image.Image) -> bytes | None:
    """The file of an image that is not decoded yet. None if there is none, or if its bytes would decode to another
    image (a later frame, a smaller draft, a changed orientation)."""
    file = getattr(image, "fp", None)
    if not isinstance(image, ImageFile.ImageFile) or not image.tile or file is None:
        return None
    try:
        position = file.tell()
        file.seek(0)
        data = file.read()
        file.seek(position)
        with Image.open(io.BytesIO(data), formats=FORMATS) as again:
            return data if _is_as(again, image) else None
    except (OSError, ValueError, SyntaxError):  # a closed file, a format of Pillow's that is none of ours
        return None


def _is_as(again: Image.Image, image: ImageFile.ImageFile) -> bool:
    assert isinstance(again, ImageFile.ImageFile), "Image.open opens files"
    same = again.size == image.size and again.mode == image.mode and again.tile == image.tile
    same = same and again.info.get("transparency") == image.info.get("transparency")
    # EXIF that was never read was never changed; reading it would decode a PNG.
    is_untouched = getattr(image, "_exif", None) is None
    return same and (is_untouched or exif_orientation(again) == exif_orientation(image))
