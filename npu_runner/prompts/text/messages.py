"""Checks OpenAI-style messages and splits them into plain text for the template and images. Knows no tokens.

Roles: system, developer (the same as system), user, assistant, tool. Images belong to users. Parsing what was parsed
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.images import as_image
from npu_runner.prompts.media.media import Media
from npu_runner.prompts.media.videos import Video
from npu_runner.prompts.text.tools import map_strings, parse_tool_calls, strings_in
from npu_runner.request.limits import LIMITS, check_count, shown

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS: dict[str, tuple[str, ...]] = {
    "system": ("name",), "user": ("name",), "tool": ("name", "tool_call_id"),
    "assistant": ("name", "reasoning_content", "tool_calls")}
"""What a message of each role may have beside role and content."""


@dataclass
class Conversation:
    """`messages`: what the template sees; `seen`: (image or video, where it stood) in prompt order."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    seen: list[tuple[bytes | Image.Image | Media | Video, str]] = field(default_factory=list)

    def map_text(self, change: Callable[[str, str, bool], str]) -> list[dict[str, Any]]:
        """The messages with `change(role, text, is_part)` applied to every piece of text in them."""
        return [_map_message(message, partial(change, message["role"])) for message in self.messages]

    def texts(self) -> list[tuple[str, str]]:
        """(role, text) of every message: its parts as if they stood side by side, and then all else in it."""
        found = []
        for message in self.messages:
            found.append((message["role"], _joined(message["content"])))
            others = [value for name, value in message.items() if name not in ("role", "content")]
            found += [(message["role"], text) for text in strings_in(others)]
        return found


def parse_messages(messages: Any, *, has_vision: bool, max_images: int) -> Conversation:
    """A checked conversation. Raises RequestError naming the field. An image or a video needs no text.

    Without vision every content is one string (text parts joined by newlines), which is what such templates expect.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages: a list is needed, not {type(messages).__name__}", "invalid_type", "messages")
    if not messages:
        raise RequestError("messages: the list is empty; give at least one user message", "empty_messages", "messages")
    check_count("messages", "messages", messages, LIMITS.max_messages)
    conversation = Conversation()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = _role(message, where)
        others = _others(message, role, where)
        content = message.get("content")
        if content is None and others.keys() & {"tool_calls", "reasoning_content"}:
            content = ""
        content = _content(content, role, f"{where}.content", conversation.seen)
        if not has_vision and isinstance(content, list):
            content = _joined(content, separator="\n")
        conversation.messages.append({"role": role, "content": content, **others})
    _check_seen(conversation, has_vision, max_images)
    has_text = any(m["role"] == "user" and _joined(m["content"]).strip() for m in conversation.messages)
    if not has_text and not conversation.seen:
        raise RequestError("messages: no user message has any text, image or video; ask a question", "no_user_text",
                           "messages")
    return conversation


def parse_content(content: Any, where: str, *, has_vision: bool,
                  seen: list[tuple[Any, str]]) -> str | list[dict[str, str]]:
    """What a template sees of a user's content; images and videos are added to `seen`, each with where it stood.
    Raises RequestError naming the field. Without vision it is one string, as in `parse_messages`."""
    parsed = _content(content, "user", where, seen)
    if seen and not has_vision:
        raise _no_vision(seen[0][1])
    return parsed if has_vision or isinstance(parsed, str) else _joined(parsed, separator="\n")


def check_ending(conversation: Conversation, add_generation_prompt: bool | None, continue_final_message: bool) -> None:
    """Raises RequestError if a conversation cannot be continued as requested. add_generation_prompt: None, not
    given."""
    if not continue_final_message:
        return
    name, last = "continue_final_message", conversation.messages[-1]
    if add_generation_prompt:
        message = f"{name}: contradicts add_generation_prompt, which begins a new message; ask for one of them"
        raise RequestError(message, "invalid_value", name)
    if last["role"] != "assistant":
        message = f"{name}: the last message is of role {last['role']}; only the assistant's is continued"
        raise RequestError(message, "invalid_value", name)
    if "tool_calls" in last or not _joined(last["content"]):
        message = f"{name}: the last message has tool_calls, or no text to continue"
        raise RequestError(message, "invalid_value", name)


def _role(message: Any, where: str) -> str:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: an object is needed, not {type(message).__name__}", "invalid_type", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        message = f"{where}.role: {shown(role)} is not one of {', '.join(ROLES)}"
        raise RequestError(message, "invalid_role", f"{where}.role")
    return ROLES[role]


def _others(message: Mapping[str, Any], role: str, where: str) -> dict[str, Any]:
    """What a message has beside role and content. Fields that are null, and the lists that OpenAI's answers have empty,
    are as if they were not there."""
    given = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
    found: dict[str, Any] = {}
    for name, value in given.items():
        field_name = f"{where}.{str(name)[:60]}"
        if name in ("annotations", "tool_calls") and role == "assistant" and value == []:
            continue
        if name not in _FIELDS[role]:
            hint = f"{field_name}: not supported; a message of role {role} has {', '.join(_FIELDS[role])}"
            raise RequestError(hint, "unsupported_field", field_name)
        is_calls = name == "tool_calls"
        found[name] = parse_tool_calls(value, field_name) if is_calls else checked_text(value, field_name)
    if role == "tool" and "tool_call_id" not in found:
        field_name = f"{where}.tool_call_id"
        raise RequestError(f"{field_name}: a tool's message names the call it answers", "missing_field", field_name)
    return found


def _content(content: Any, role: str, where: str, seen: list[tuple[Any, str]]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return checked_text(content, where)
    if isinstance(content, (bytes, bytearray)) or not isinstance(content, Sequence):
        raise RequestError(
            f"{where}: text or a list of parts is needed, not {type(content).__name__}", "invalid_type", where)
    if not content:
        raise RequestError(f"{where}: the list of parts is empty", "invalid_type", where)
    check_count(where, "parts", content, LIMITS.max_parts)
    return [_part(part, role, f"{where}[{number}]", seen) for number, part in enumerate(content)]


def _part(part: Any, role: str, where: str, seen: list[tuple[Any, str]]) -> dict[str, str]:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where}: an object is needed, not {type(part).__name__}", "invalid_type", where)
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": checked_text(part.get("text"), f"{where}.text")}
    if kind == "image":
        image = as_image(part.get("image"), f"{where}.image")
        if not isinstance(image, (bytes, bytearray, Image.Image, Media)):
            raise RequestError(
                f"{where}.image: encoded bytes, a PIL image or an array is needed, not {type(image).__name__}",
                "invalid_type", f"{where}.image")
        if role != "user":
            raise RequestError(f"{where}: images belong in user messages, not in {role} ones", "image_role", where)
        seen.append((bytes(image) if isinstance(image, bytearray) else image, where))
        return {"type": "image", "image": "image"}  # templates only ask whether the key is there
    if kind == "video":
        return _video_part(part, role, where, seen)
    if kind in ("image_url", "video_url"):
        hint = "this address was not resolved; LLM.chat and the batch job do that, else give a part with bytes"
    else:
        hint = "a part is text, image, image_url, video or video_url"
    message = f"{where}.type: {shown(kind)} parts are not supported: {hint}"
    raise RequestError(message, "unsupported_part", f"{where}.type")


def _video_part(part: Mapping[str, Any], role: str, where: str, seen: list[tuple[Any, str]]) -> dict[str, str]:
    video = Video.of(part.get("video"), f"{where}.video")
    if role != "user":
        raise RequestError(f"{where}: videos belong in user messages, not in {role} ones", "image_role", where)
    seen.append((video, where))
    return {"type": "video", "video": "video"}  # as for an image


def checked_text(text: Any, where: str) -> str:
    """`text` if it is a string that UTF-8 can spell, else a RequestError naming `where`."""
    if not isinstance(text, str):
        raise RequestError(f"{where}: text is needed, not {type(text).__name__}", "invalid_type", where)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can spell but no tokenizer takes
        raise RequestError(f"{where}: not valid Unicode ({error.reason})", "invalid_unicode", where) from error
    return text


def _check_seen(conversation: Conversation, has_vision: bool, max_images: int) -> None:
    if not conversation.seen:
        return
    if not has_vision:
        raise _no_vision(conversation.seen[0][1])
    if len(conversation.seen) > max_images:
        raise RequestError(
            f"messages: {len(conversation.seen)} images and videos, at most {max_images} are allowed "
            "(max_images_per_prompt)",
            "too_many_images",
            "messages")


def _no_vision(where: str) -> RequestError:
    return RequestError("this model reads text only; remove the images and videos or choose a model with vision",
                        "model_has_no_vision", where)


def _joined(content: str | list[dict[str, str]], separator: str = "") -> str:
    if isinstance(content, str):
        return content
    return separator.join(part["text"] for part in content if part["type"] == "text")


def _map_message(message: Mapping[str, Any], change: Callable[[str, bool], str]) -> dict[str, Any]:
    others = {name: value for name, value in message.items() if name not in ("role", "content")}
    mapped = {name: map_strings(value, lambda text: change(text, False)) for name, value in others.items()}
    return {"role": message["role"], "content": _map_content(message["content"], change), **mapped}


def _map_content(content: str | list[dict[str, str]], change: Callable[[str, bool], str]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return change(content, False)
    return [{**part, "text": change(part["text"], True)} if part["type"] == "text" else part for part in content]
