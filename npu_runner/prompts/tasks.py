"""Prompts to prepare, in this process or in a worker, with their images. Imports no torch.

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
from npu_runner.prompts.media.images import FORMATS, as_image, exif_orientation, open_image
from npu_runner.prompts.media.media import Addresses, Media, MediaRules
from npu_runner.prompts.media.processor_kwargs import checked_kwargs
from npu_runner.prompts.media.videos import Video
from npu_runner.prompts.pair_prompts import Side, parse_side
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.text.messages import Conversation, check_ending, parse_messages
from npu_runner.prompts.text.tokenizer import BYTES, are_plain_ids, plain_ids
from npu_runner.request.limits import field_error, wrong_type
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams

# To tokenize this many characters takes about as long as to send them to a worker and to take the tokens back.
_LEAST_CHARS = 4096
_PARAMS = SamplingParams()  # made once: it is checked field by field
_FIELDS = ("prompt", "prompt_token_ids", "images", "videos", "multi_modal_data", "mm_processor_kwargs")


@dataclass(frozen=True, kw_only=True)
class PromptTask(ABC):
    """A prompt to be prepared."""

    number: int = 0
    """Its index among the requests of a service."""
    params: SamplingParams | PoolingParams = _PARAMS
    """As `ChatProcessor.resolve_params` has made them."""
    num_chars: int = 0
    is_plain: bool = True
    """All of it but the images is of Python's own types, so any process can unpickle it."""

    @property
    def images(self) -> Sequence[tuple[Any, str]]:
        """The images and videos, each with where it stands, in order."""
        return ()

    @property
    def pages(self) -> list[tuple[str, int]]:
        """The pages of documents that it shows, as (document, page)."""
        return [page for image, _ in self.images if isinstance(image, Media) and (page := image.page) is not None]

    @property
    def is_worth_a_worker(self) -> bool:
        """Preparing it takes longer than the way to a worker and back."""
        return self.is_plain and (bool(self.images) or self.num_chars >= _LEAST_CHARS)

    @property
    def num_bytes(self) -> int:
        """The approximate size of a sendable task."""
        return self.num_chars + sum({id(image): _size(image) for image, _ in self.images}.values())

    def sendable(self, max_source_pixels: int) -> PromptTask:
        """The same, picklable. Raises RequestError for an image that cannot be sent."""
        return self.with_images(_sendable_images(self.images, max_source_pixels)) if self.images else self

    def with_images(self, images: list[tuple[Any, str]]) -> PromptTask:
        """The same, with these in the places of its images and videos."""
        raise NotImplementedError

    @abstractmethod
    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        """The prompt as the engine takes it. Raises RequestError where it cannot be served."""


@dataclass(frozen=True, kw_only=True)
class MadeTask(PromptTask):
    """A prompt that is prepared already, or the error that it caused."""

    made: PromptInputs | RequestError

    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        if isinstance(self.made, RequestError):
            raise self.made
        return self.made


@dataclass(frozen=True, kw_only=True)
class ChatTask(PromptTask):
    """A parsed conversation. `options`: ChatProcessor's, without None."""

    conversation: Conversation
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> Sequence[tuple[Any, str]]:
        return self.conversation.seen

    def with_images(self, images: list[tuple[Any, str]]) -> PromptTask:
        return replace(self, conversation=Conversation(self.conversation.messages, images))

    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        most = processor.most_prompt_tokens(self.params)
        return processor(self.conversation, truncate_prompt_tokens=most, **self.options)


@dataclass(frozen=True, kw_only=True)
class TextTask(PromptTask):
    """A raw prompt: text or token ids. `seen`: its images, and behind them its videos, wherever their placeholders
    are."""

    prompt: Any
    seen: Sequence[tuple[Any, str]] = ()
    mm_processor_kwargs: Mapping[str, Any] | None = None

    @property
    def images(self) -> Sequence[tuple[Any, str]]:
        return self.seen

    @property
    def is_short_text(self) -> bool:
        """Whether it is text that takes little time to encode."""
        return isinstance(self.prompt, str) and self.num_chars < _LEAST_CHARS

    def with_images(self, images: list[tuple[Any, str]]) -> PromptTask:
        return replace(self, seen=images)

    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        images = [each for each, _ in self.seen if not isinstance(each, Video)]
        videos = [each for each, _ in self.seen if isinstance(each, Video)]
        return processor.from_text(self.prompt, images, videos, mm_processor_kwargs=self.mm_processor_kwargs,
                                   truncate_prompt_tokens=processor.most_prompt_tokens(self.params))


@dataclass(frozen=True, kw_only=True)
class PairTask(PromptTask):
    """A parsed query and document. `options`: PairPrompts' own."""

    query: Side
    document: Side
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> Sequence[tuple[Any, str]]:
        return [*self.query.seen, *self.document.seen]

    def with_images(self, images: list[tuple[Any, str]]) -> PromptTask:
        num_of_query = len(self.query.seen)
        return replace(self, query=replace(self.query, seen=images[:num_of_query]),
                       document=replace(self.document, seen=images[num_of_query:]))

    def prepare(self, processor: ChatProcessor) -> PromptInputs:
        assert processor.pairs is not None, "the task was checked before"
        most = processor.most_prompt_tokens(self.params)
        return processor.pairs(self.query, self.document, truncate_prompt_tokens=most, **self.options)


def pair_task(processor: ChatProcessor, pair: tuple[Any, Any], media: MediaRules, **task_fields: Any) -> PairTask:
    """Raises RequestError for faults that show without reading an address or decoding an image."""
    addresses = Addresses(media)
    query, document = (parse_side(side, name, processor.media_limits, addresses)
                       for side, name in zip(pair, ("data_1", "data_2"), strict=True))
    addresses.check_sizes("data_2")
    texts = Conversation([{"role": "user", "content": side.content} for side in (query, document)]).texts()
    return PairTask(query=query, document=document, num_chars=sum(len(text) for _, text in texts), **task_fields)


def chat_task(processor: ChatProcessor, messages: Any, media: MediaRules, options: Mapping[str, Any] | None = None,
              **task_fields: Any) -> ChatTask:
    """`options`: ChatProcessor's; None among them counts as left out. Raises RequestError for faults that show without
    reading an address or decoding an image."""
    options = options or {}
    conversation = parse_messages(messages, processor.media_limits, media)
    check_ending(conversation, options.get("add_generation_prompt"), options.get("continue_final_message", False))
    # A string of a class of its own may be one that no worker knows.
    conversation.messages = conversation.map_text(lambda role, text, is_part: str.__str__(text))
    return ChatTask(conversation=conversation, num_chars=sum(len(text) for _, text in conversation.texts()),
                    options={name: value for name, value in options.items() if value is not None}, **task_fields)


# -- raw prompts, in our shapes and vLLM's -----------------------------------------------------------------------------


def text_task(item: Any, **task_fields: Any) -> TextTask:
    """The task of text, of token ids, or of {"prompt" or "prompt_token_ids", "images" and "videos", or
    "multi_modal_data": {"image": one or several, "video": one or several}, "mm_processor_kwargs"}.

    Raises RequestError naming the field. A prompt that is neither text nor token ids is refused when it is prepared.
    """
    if isinstance(item, str) or not isinstance(item, Mapping):
        return _text_task(item, **task_fields)
    given = {name: value for name, value in item.items() if value is not None}
    for name in given:
        if name not in _FIELDS:
            raise field_error(str(name)[:60], f"not supported; a prompt has {', '.join(_FIELDS)}", "unsupported_field")
    kwargs = checked_kwargs(given.get("mm_processor_kwargs", {}))
    prompt = _one_of(given, "prompt_token_ids", "prompt")
    images, where_images, videos, where_videos = _media(given)
    seen: list[tuple[Any, str]] = [
        (Video.from_source(video, where_videos), f"videos[{number}]")
        for number, video in enumerate(_several(videos, where_videos, "the encoded bytes of videos"))]
    seen = [(as_image(image, where_images), f"images[{number}]") for number, image in enumerate(
        _several(images, where_images, "PIL images, arrays or encoded bytes"))] + seen
    return _text_task(prompt, seen=seen, mm_processor_kwargs=kwargs, **task_fields)


def _text_task(prompt: Any, **others: Any) -> TextTask:
    if isinstance(prompt, str):
        return TextTask(prompt=str.__str__(prompt), num_chars=len(prompt), **others)
    is_plain = isinstance(prompt, list) and are_plain_ids(prompt)
    if not is_plain:
        prompt = plain_ids(prompt)
        is_plain = isinstance(prompt, Sequence) and not isinstance(prompt, BYTES) and are_plain_ids(prompt)
    return TextTask(prompt=list(prompt) if is_plain else prompt, is_plain=is_plain, **others)


def _one_of(given: Mapping[str, Any], first: str, second: str) -> Any:
    if first not in given and second not in given:
        raise field_error(second, "missing; give it as text or token ids", "missing_field")
    # vLLM's prompts of ids may bring their text along; the ids count, there as here.
    if isinstance(given.get(first), str):
        raise field_error(first, "a list of token ids is needed, not text", "invalid_type")
    return given.get(first, given.get(second))


def _media(given: Mapping[str, Any]) -> tuple[Any, str, Any, str]:
    """Images and where they stood, videos and where they stood."""
    if "multi_modal_data" not in given:
        return given.get("images", ()), "images", given.get("videos", ()), "videos"
    name, data = "multi_modal_data", given["multi_modal_data"]
    for own in ("images", "videos"):
        if own in given:
            raise field_error(own, f"there is {name} as well; give one of the two")
    if not isinstance(data, Mapping):
        raise wrong_type(name, "an object", data)
    for kind, value in data.items():
        if kind not in ("image", "video") and value is not None:
            raise field_error(f"{name}.{str(kind)[:60]}", "not supported; image and video are", "unsupported_field")
    return _listed(data.get("image")), f"{name}.image", _listed(data.get("video")), f"{name}.video"


def _listed(value: Any) -> Any:
    """vLLM's: one stands alone; an array of four axes is several."""
    if value is None:
        return ()
    if getattr(value, "ndim", None) == 4:
        return list(value)
    is_list = isinstance(value, Sequence) and not isinstance(value, BYTES)
    return value if is_list else [value]


def _several(given: Any, name: str, what: str) -> Sequence[Any]:
    if isinstance(given, (str, *BYTES)) or not isinstance(given, Sequence):
        raise field_error(name, f"{what} are needed, not {type(given).__name__}", "invalid_type")
    return given


# -- images on their way to a worker -----------------------------------------------------------------------------------


class _Pixels:
    """Decoded pixels, uint8 (height, width, 3); on the other side of a process border it is a PIL image."""

    def __init__(self, image: Image.Image):
        self.pixels_HWC = np.asarray(image)

    def __reduce__(self) -> tuple[Any, tuple[np.ndarray]]:
        return Image.fromarray, (self.pixels_HWC,)


def _sendable_images(images: Sequence[tuple[Any, str]], max_source_pixels: int) -> list[tuple[Any, str]]:
    """Each image in a picklable form; the same image is the same object. Raises RequestError for an image that is
    decoded here and cannot be."""
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
    if isinstance(image, Image.Image):  # pixels that came from another process
        return image.width * image.height * len(image.getbands())
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
        raise field_error(where, error.message, error.code) from error


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
