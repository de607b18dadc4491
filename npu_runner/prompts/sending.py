"""Packs a caller's images for a worker process. Decodes as little as possible. Knows no prompts.

Encoded bytes travel as they are, and so does the file of a PIL image that was opened and not yet read. The worker
decodes them. A PIL image whose pixels the caller has already is made upright RGB here and travels as these pixels.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from npu_runner.errors import RequestError
from npu_runner.prompts.media.images import FORMATS, exif_orientation, open_image
from npu_runner.prompts.media.media import Media, MediaRules, resolve_media
from npu_runner.prompts.media.videos import Video
from npu_runner.prompts.pair_prompts import Side, parse_side
from npu_runner.prompts.text.messages import Conversation, parse_messages


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


def sendable_images(images: Sequence[tuple[Any, str]], max_source_pixels: int) -> list[tuple[Any, str]]:
    """What travels in the place of each (image, where it stood); of the same image it is the same object.

    Raises RequestError for an image that is decoded here and cannot be.
    """
    known: dict[int, Any] = {}
    for image, where in images:
        if id(image) not in known:
            known[id(image)] = _sendable(image, where, max_source_pixels)
    return [(known[id(image)], where) for image, where in images]


def num_bytes(images: Sequence[tuple[Any, str]]) -> int:
    """What sendable images take until they are prepared, about."""
    return sum({id(image): _size(image) for image, _ in images}.values())


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
