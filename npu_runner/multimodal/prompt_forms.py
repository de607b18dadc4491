"""The shapes in which a raw prompt may come, ours and vLLM's, made one. Knows no tokens and opens no picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from npu_runner.errors import RequestError

_FIELDS = ("prompt", "prompt_token_ids", "images", "multi_modal_data")


def prompt_and_images(item: Mapping[str, Any]) -> tuple[str | Sequence[int], Sequence[Any]]:
    """Text or token ids, and the pictures in the order of their placeholders, of {"prompt" or "prompt_token_ids",
    "images" or "multi_modal_data": {"image": one or several}}. None asks for nothing.

    Raises RequestError naming the field.
    """
    given = {name: value for name, value in item.items() if value is not None}
    for name in given:
        if name not in _FIELDS:
            shown = str(name)[:60]
            message = f"{shown}: not supported; a prompt has {', '.join(_FIELDS)}"
            raise RequestError(message, "unsupported_field", shown)
    return _one_of(given, "prompt_token_ids", "prompt"), _images(given)


def _one_of(given: Mapping[str, Any], first: str, second: str) -> Any:
    if first not in given and second not in given:
        raise RequestError(f"{second}: missing; give it as text or token ids", "missing_field", second)
    # vLLM's prompts of ids may bring their text along; the ids count, there as here.
    if isinstance(given.get(first), str):
        raise RequestError(f"{first}: a list of token ids is needed, not text", "invalid_type", first)
    return given.get(first, given.get(second))


def _images(given: Mapping[str, Any]) -> Sequence[Any]:
    if "multi_modal_data" not in given:
        return _several(given.get("images", ()), "images")
    name, data = "multi_modal_data", given["multi_modal_data"]
    if "images" in given:
        raise RequestError(f"images: {name} has them already; give one of the two", "invalid_value", "images")
    if not isinstance(data, Mapping):
        raise RequestError(f"{name}: an object is needed, not {type(data).__name__}", "invalid_type", name)
    for kind, value in data.items():
        if kind != "image" and value is not None:
            field = f"{name}.{str(kind)[:60]}"
            raise RequestError(f"{field}: not supported; image is", "unsupported_field", field)
    images = data.get("image")
    if images is None:
        return ()
    is_list = isinstance(images, Sequence) and not isinstance(images, (bytes, bytearray))
    return _several(images if is_list else [images], f"{name}.image")


def _several(images: Any, name: str) -> Sequence[Any]:
    if isinstance(images, (str, bytes, bytearray)) or not isinstance(images, Sequence):
        message = f"{name}: PIL images or encoded bytes are needed, not {type(images).__name__}"
        raise RequestError(message, "invalid_type", name)
    return images
