"""What a request asks and what its result says, whatever endpoint they are of. Knows nothing of pages.

Rows that failed may hold anything at all, so a request is read as far as it goes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from npu_runner.batch.rows.endpoints import answer_of, answers_of, is_understood
from npu_runner.batch.rows.flaws import flaws_of_row
from npu_runner.batch.rows.openai_response import has_failed, is_as_expected
from npu_runner.batch.rows.scores import sides_of

MAX_TEXT = 4000
_MAX_ROLE = 20
_MAX_TOKEN_IDS = 12
_MOST_SIDES = 16
"""Queries and documents of a row that are shown."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")

FAILED, UNKNOWN, UNEXPECTED, EXPECTED, ANSWERED = "failed", "unknown", "unexpected", "expected", "answered"
CUT_OFF, REPETITION, UNPARSED = "cut_off", "repetition", "unparsed"
WHOLE = "whole"
"""An answer without any of these flaws."""


class Turn(NamedTuple):
    role: str
    text: str


class Medium(NamedTuple):
    url: str
    is_video: bool


@dataclass(frozen=True)
class Asked:
    """A request as a page shows it."""

    turns: tuple[Turn, ...]
    media: tuple[Medium, ...]


class ToolCall(NamedTuple):
    name: str
    arguments: str


@dataclass(frozen=True)
class Said:
    """One completion as a page shows it."""

    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def anchor_of(answer: dict[str, Any]) -> str:
    """The row's address on its page, the same whenever the page is made. A name that is no plain word has a digest."""
    name = answer["custom_id"]
    if name is not None and _PLAIN_NAME.fullmatch(name):
        return f"row-{name}"
    known_by = f"\0line {answer['error']['line']}" if name is None else name
    # No plain name has a colon.
    return f"row:{hashlib.blake2b(known_by.encode('utf-8', 'replace'), digest_size=8).hexdigest()}"


def metadata_of(request: dict[str, Any]) -> dict[str, Any]:
    body = request.get("body")
    metadata = body.get("metadata") if isinstance(body, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def outcome_of(request: dict[str, Any], answer: dict[str, Any]) -> str:
    """FAILED, UNEXPECTED, EXPECTED or ANSWERED; UNKNOWN for an answer that has the form of no endpoint."""
    if has_failed(answer):
        return FAILED
    if not is_understood(answer):
        return UNKNOWN
    expected = metadata_of(request).get("expected")
    given = None if expected is None else answer_of(answer["response"]["body"])
    if given is None:
        return ANSWERED
    return EXPECTED if is_as_expected(given, str(expected)) else UNEXPECTED


def flaws_of(request: dict[str, Any], answer: dict[str, Any], outcome: str, *, has_schema: bool) -> list[str]:
    """What the job counts of an answered row beside its outcome."""
    return [] if outcome in (FAILED, UNKNOWN) else flaws_of_row(request, answer, has_rule_of_job=has_schema).names


def asked_by(request: dict[str, Any]) -> Asked:
    """Turns without a text are left out; media are in the order in which they stand."""
    body = request.get("body")
    asked = body if isinstance(body, dict) else {}
    messages = asked.get("messages", sides_of(asked, _MOST_SIDES) or [
        {"role": "prompt", "content": asked.get("prompt", asked.get("input"))}])
    turns: list[Turn] = []
    media: list[Medium] = []
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            texts = [*_texts_in(message.get("content"), media), *map(_as_text, _calls_in(message))]
            if texts:
                turns.append(Turn(str(message.get("role"))[:_MAX_ROLE], "\n".join(texts)))
    return Asked(tuple(turns), tuple(media))


def _texts_in(content: Any, media: list[Medium]) -> Iterator[str]:
    """The texts of a message or a prompt; its media are added to `media`."""
    if isinstance(content, str):
        yield content
    parts = content if isinstance(content, list) else []
    if parts and all(type(part) is int for part in parts):
        more = " ..." if len(parts) > _MAX_TOKEN_IDS else ""
        yield f"{len(parts)} token ids: {' '.join(map(str, parts[:_MAX_TOKEN_IDS]))}{more}"
        return
    for part in parts:
        if isinstance(part, (str, list)):  # of inputs for vectors there may be several
            yield from _texts_in(part, media)
        if not isinstance(part, dict):
            continue
        if isinstance(part.get("text"), str):
            yield part["text"]
        for name in ("image_url", "video_url"):
            url = part.get(name)
            if isinstance(url, dict) and isinstance(url.get("url"), str):
                media.append(Medium(url["url"], name == "video_url"))


def said_by(answer: dict[str, Any]) -> list[Said]:
    """The items of an answered row in words; vectors are no text."""
    form, items = answers_of(answer["response"]["body"])
    messages = [item.get("message") or {} for item in items]
    return [] if form.has_vectors else [
        Said(form.text_of(item), message.get("reasoning_content") or "", tuple(_calls_in(message)))
        for item, message in zip(items, messages, strict=True)]


def _calls_in(message: dict[str, Any]) -> list[ToolCall]:
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [ToolCall(str(function.get("name")), str(function.get("arguments") or ""))
            for function in functions if isinstance(function, dict)]


def _as_text(call: ToolCall) -> str:
    return f"{call.name}({call.arguments})"
