"""The shapes in which a raw prompt may come, ours and vLLM's, made one. Knows no tokens and opens no image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_runner.errors import RequestError
from npu_runner.prompts.media.images import as_image
from npu_runner.prompts.media.processor_kwargs import checked_kwargs
from npu_runner.prompts.media.videos import Video

_FIELDS = ("prompt", "prompt_token_ids", "images", "videos", "multi_modal_data", "mm_processor_kwargs")


@dataclass(frozen=True, kw_only=True)
class RawPrompt:
    """Text or token ids, and what stands in the placeholders: images and videos, each kind in their order."""

    prompt: str | Sequence[int]
    images: Sequence[Any] = ()
    videos: Sequence[Video] = ()
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)


def raw_prompt(item: Any) -> RawPrompt:
    """Of text, of token ids, or of {"prompt" or "prompt_token_ids", "images" and "videos", or "multi_modal_data":
    {"image": one or several, "video": one or several}, "mm_processor_kwargs"}. None asks for nothing.

    Raises RequestError naming the field.
    """
    if not isinstance(item, Mapping):
        return RawPrompt(prompt=plain_ids(item))
    given = {name: value for name, value in item.items() if value is not None}
    for name in given:
        if name not in _FIELDS:
            shown = str(name)[:60]
            message = f"{shown}: not supported; a prompt has {', '.join(_FIELDS)}"
            raise RequestError(message, "unsupported_field", shown)
    kwargs = checked_kwargs(given.get("mm_processor_kwargs", {}))
    prompt = plain_ids(_one_of(given, "prompt_token_ids", "prompt"))
    images, where_images, videos, where_videos = _media(given)
    encoded = [Video.of(video, where_videos) for video in _several(videos, where_videos, "the encoded bytes of videos")]
    checked_images = [as_image(image, where_images)
                      for image in _several(images, where_images, "PIL images, arrays or encoded bytes")]
    return RawPrompt(prompt=prompt, images=checked_images, videos=encoded, mm_processor_kwargs=kwargs)


def plain_ids(prompt: Any) -> Any:
    """Token ids of an array, or array numbers, as a list of Python integers. Anything else is returned unchanged; later
    checks name it."""
    if isinstance(prompt, (str, bytes, bytearray, memoryview, Mapping)):
        return prompt
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, Sequence) or all(type(token) is int for token in ids):
        return ids
    return [plain_number(token) for token in ids]


def checked_ids(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """A list of them. Raises RequestError for anything else."""
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
        raise RequestError(
            f"prompt: text or a list of token ids is needed, not {type(prompt).__name__}", "invalid_type", "prompt")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt: {token!r} is not a token id of this model (0 to {vocab_size - 1})", "invalid_type", "prompt")
    return list(prompt)


def plain_number(value: Any) -> Any:
    """An integer of numpy's or torch's as Python's own; any other value as it is."""
    number = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    return number if type(number) is int else value


def _one_of(given: Mapping[str, Any], first: str, second: str) -> Any:
    if first not in given and second not in given:
        raise RequestError(f"{second}: missing; give it as text or token ids", "missing_field", second)
    # vLLM's prompts of ids may bring their text along; the ids count, there as here.
    if isinstance(given.get(first), str):
        raise RequestError(f"{first}: a list of token ids is needed, not text", "invalid_type", first)
    return given.get(first, given.get(second))


def _media(given: Mapping[str, Any]) -> tuple[Any, str, Any, str]:
    """Images and where they stood, videos and where they stood."""
    if "multi_modal_data" not in given:
        return given.get("images", ()), "images", given.get("videos", ()), "videos"
    name, data = "multi_modal_data", given["multi_modal_data"]
    for own in ("images", "videos"):
        if own in given:
            raise RequestError(f"{own}: there is {name} as well; give one of the two", "invalid_value", own)
    if not isinstance(data, Mapping):
        raise RequestError(f"{name}: an object is needed, not {type(data).__name__}", "invalid_type", name)
    for kind, value in data.items():
        if kind not in ("image", "video") and value is not None:
            where = f"{name}.{str(kind)[:60]}"
            raise RequestError(f"{where}: not supported; image and video are", "unsupported_field", where)
    return _listed(data.get("image")), f"{name}.image", _listed(data.get("video")), f"{name}.video"


def _listed(value: Any) -> Any:
    """vLLM's: one stands alone; an array of four axes is several."""
    if value is None:
        return ()
    if getattr(value, "ndim", None) == 4:
        return list(value)
    is_list = isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview))
    return value if is_list else [value]


def _several(given: Any, name: str, what: str) -> Sequence[Any]:
    if isinstance(given, (str, bytes, bytearray, memoryview)) or not isinstance(given, Sequence):
        raise RequestError(f"{name}: {what} are needed, not {type(given).__name__}", "invalid_type", name)
    return given
