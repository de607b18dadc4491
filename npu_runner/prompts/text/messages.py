"""Checks OpenAI-style messages and splits them into plain text for the template and images. Knows no tokens.

Roles: system, developer (the same as system), user, assistant, tool. Images belong to users.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.images import as_image
from npu_runner.prompts.media.media import KINDS, Addresses, Media, MediaRules
from npu_runner.prompts.media.videos import Video
from npu_runner.prompts.text.tools import map_strings, parse_tool_calls, strings_in
from npu_runner.request.limits import LIMITS, check_count, field_error, shown, wrong_type

Seen = bytes | Image.Image | Media | Video
"""An image or a video."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
NO_FILE_PARTS = ("a file part is not read; a page of a PDF is an image: write the PDF below the allowed folder, and "
                 "give an image_url with its path and #page=1")
_FIELDS: dict[str, tuple[str, ...]] = {
    "system": ("name",), "user": ("name",), "tool": ("name", "tool_call_id"),
    "assistant": ("name", "reasoning_content", "tool_calls")}
"""The fields of a message of each role, beside role and content."""


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """The most images and videos of a prompt. `by_kind`: as in limit_mm_per_prompt."""

    has_vision: bool
    max_images: int
    by_kind: Mapping[str, int] = field(default_factory=dict)

    def check(self, seen: Sequence[tuple[Seen, str]], where: str | None = None) -> None:
        """Raises RequestError for more than the model or the settings allow. `where`: the field that has all of them;
        None: each stands in a list of its kind."""
        if not seen:
            return
        if not self.has_vision:
            kind, place = "videos" if isinstance(seen[0][0], Video) else "images", seen[0][1]
            raise RequestError(f"this model reads text only; remove the {kind} or choose a model with vision",
                               "model_has_no_vision", place.partition("[")[0] if where is None else place)
        where = seen[-1][1].partition("[")[0] if where is None else where
        if len(seen) > self.max_images:
            raise field_error(where, f"{len(seen)} images and videos, at most {self.max_images} are allowed "
                              "(max_images_per_prompt)", "too_many_images")
        for kind, most in self.by_kind.items():
            places = [place for item, place in seen if isinstance(item, Video) is (kind == "video")]
            if len(places) > most:
                raise field_error(places[most], f"one of {len(places)} {kind}s, at most {most} are allowed "
                                  "(limit_mm_per_prompt)", "too_many_images")


@dataclass
class Conversation:
    """`messages`: what the template sees; `seen`: (image or video, where it stood) in prompt order."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    seen: list[tuple[Seen, str]] = field(default_factory=list)

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


def parse_messages(messages: Any, limits: MediaLimits, media: MediaRules | None = None) -> Conversation:
    """A checked conversation. Raises RequestError naming the field. An image or a video needs no text.

    `media`: which addresses may be read; they are not read here. None: images and videos are no addresses. Without
    vision every content is one string (text parts joined by newlines), which is what such templates expect.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise wrong_type("messages", "a list", messages)
    if not messages:
        raise field_error("messages", "the list is empty; give at least one user message", "empty_messages")
    check_count("messages", "messages", messages, LIMITS.max_messages)
    conversation = Conversation()
    addresses = None if media is None else Addresses(media)
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = _role(message, where)
        others = _others(message, role, where)
        content = message.get("content")
        if content is None and others.keys() & {"tool_calls", "reasoning_content"}:
            content = ""
        content = parse_content(content, f"{where}.content", limits, conversation.seen, addresses, role=role)
        conversation.messages.append({"role": role, "content": content, **others})
    limits.check(conversation.seen, "messages")
    if addresses is not None:
        addresses.check_sizes("messages")
    has_text = any(m["role"] == "user" and _joined(m["content"]).strip() for m in conversation.messages)
    if not has_text and not conversation.seen:
        raise field_error("messages", "no user message has any text, image or video; ask a question", "no_user_text")
    return conversation


def parse_content(content: Any, where: str, limits: MediaLimits, seen: list[tuple[Seen, str]],
                  addresses: Addresses | None = None, *, role: str = "user") -> str | list[dict[str, str]]:
    """The content for a template; images and videos are added to `seen`, each with its field. Raises RequestError
    naming the field."""
    if isinstance(content, str):
        return checked_text(content, where)
    if isinstance(content, (bytes, bytearray)) or not isinstance(content, Sequence):
        raise wrong_type(where, "text or a list of parts", content)
    if not content:
        raise field_error(where, "the list of parts is empty", "invalid_type")
    check_count(where, "parts", content, LIMITS.max_parts)
    parts = [_part(part, role, f"{where}[{number}]", seen, addresses) for number, part in enumerate(content)]
    return parts if limits.has_vision else _joined(parts, separator="\n")


def check_ending(conversation: Conversation, add_generation_prompt: bool | None, continue_final_message: bool) -> None:
    """Raises RequestError if a conversation cannot be continued as requested. add_generation_prompt: None, not
    given."""
    if not continue_final_message:
        return
    name, last = "continue_final_message", conversation.messages[-1]
    if add_generation_prompt:
        raise field_error(name, "contradicts add_generation_prompt, which begins a new message; ask for one of them")
    if last["role"] != "assistant":
        raise field_error(name, f"the last message is of role {last['role']}; only the assistant's is continued")
    if "tool_calls" in last or not _joined(last["content"]):
        raise field_error(name, "the last message has tool_calls, or no text to continue")


def _role(message: Any, where: str) -> str:
    if not isinstance(message, Mapping):
        raise wrong_type(where, "an object", message)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise field_error(f"{where}.role", f"{shown(role)} is not one of {', '.join(ROLES)}", "invalid_role")
    return ROLES[role]


def _others(message: Mapping[str, Any], role: str, where: str) -> dict[str, Any]:
    """The fields of a message beside role and content. Null fields, and the empty lists of OpenAI's answers, are left
    out."""
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
        raise field_error(f"{where}.tool_call_id", "a tool's message names the call it answers", "missing_field")
    return found


def _part(part: Any, role: str, where: str, seen: list[tuple[Seen, str]],
          addresses: Addresses | None) -> dict[str, str]:
    if not isinstance(part, Mapping):
        raise wrong_type(where, "an object", part)
    name = part.get("type")
    if name == "text":
        return {"type": "text", "text": checked_text(part.get("text"), f"{where}.text")}
    if addresses is not None and name == "image_pil":  # vLLM's
        part, name = {"type": "image", "image": part.get("image_pil")}, "image"
    if name == "file":
        raise field_error(where, NO_FILE_PARTS, "unsupported_part")
    if not isinstance(name, str) or name not in KINDS:
        raise _no_such_part(name, where, "a part is text, image, image_url, video or video_url")
    item = None if addresses is None else addresses.media(part, where)
    if item is None and name.endswith("_url"):
        raise _no_such_part(name, where, "this address was not resolved; LLM.chat and the batch job do that, else give "
                                         "a part with bytes")
    kind = KINDS[name]
    if role != "user":
        raise field_error(where, f"{kind}s belong in user messages, not in {role} ones", "image_role")
    if kind == "video":
        seen.append((Video.from_source(part.get("video") if item is None else item, f"{where}.video"), where))
    else:
        seen.append((_image(part.get("image"), f"{where}.image") if item is None else item, where))
    return {"type": kind, kind: kind}  # templates only ask whether the key is there


def _image(value: Any, where: str) -> bytes | Image.Image | Media:
    image = as_image(value, where)
    if not isinstance(image, (bytes, bytearray, Image.Image, Media)):
        raise wrong_type(where, "encoded bytes, a PIL image or an array", image)
    return bytes(image) if isinstance(image, bytearray) else image


def _no_such_part(kind: Any, where: str, hint: str) -> RequestError:
    return field_error(f"{where}.type", f"{shown(kind)} parts are not supported: {hint}", "unsupported_part")


def checked_text(text: Any, where: str) -> str:
    """`text` if it is a string that UTF-8 can spell, else a RequestError naming `where`."""
    if not isinstance(text, str):
        raise wrong_type(where, "text", text)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can spell but no tokenizer takes
        raise field_error(where, f"not valid Unicode ({error.reason})", "invalid_unicode") from error
    return text


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
