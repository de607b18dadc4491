"""One row as the page shows it: its outcome, its question and its answer as bounded texts. Knows nothing of markup.

A failed row may hold anything, so a request is read as far as it has a known form.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from npu_runner.batch.rows.attempt import BEST_OF, attempts_of
from npu_runner.batch.rows.endpoints import answer_of, answers_of, cells_of, flaws_of_row, is_understood
from npu_runner.batch.rows.openai_response import error_of, has_failed, is_as_expected, name_of_answer, object_in
from npu_runner.batch.rows.scores import sides_of

FAILED, UNKNOWN, UNEXPECTED, EXPECTED, ANSWERED = "failed", "unknown", "unexpected", "expected", "answered"
CUT_OFF, REPETITION, UNPARSED = "cut_off", "repetition", "unparsed"
WHOLE = "whole"
"""An answer without one of these three flaws."""
TITLES = {
    FAILED: "Failed", UNKNOWN: "Unknown form", UNEXPECTED: "Not as expected", CUT_OFF: "Cut off",
    REPETITION: "Repetition", UNPARSED: "Unparsed: not JSON", EXPECTED: "As expected",
    ANSWERED: "Answered"}  # fmt: skip
"""The outcomes and flaws, worst first."""
MAX_TEXT = 4000
"""Characters of a text on the page."""
MAX_MEDIA = 8
"""Images and videos of a row that are shown."""
_MAX_PARTS = 24
"""Turns, answers, calls, metadata of a row that are shown, ..."""
_MAX_FIELDS = 60
"""... and fields of an object."""
_MAX_VALUE = 400
_MAX_NUMBERS = 12
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")


class Medium(NamedTuple):
    url: str
    is_video: bool
    options: str = "{}"
    """The other fields of the address, as JSON."""

    @property
    def key(self) -> str:
        """A digest that stands for a URL, which may hold megabytes."""
        named = f"{self.is_video} {self.options} {self.url}"
        return hashlib.blake2b(named.encode("utf-8", "replace"), digest_size=12).hexdigest()

    @property
    def address(self) -> str:
        """The path of a file; empty for a data URL."""
        return "" if self.url[:5].lower() == "data:" else cut(self.url, _MAX_VALUE)


class Call(NamedTuple):
    """A call of a tool: its arguments are `fields` where they are an object, else `text`."""

    name: str
    text: str
    fields: list[tuple[str, str]]


class Answer(NamedTuple):
    text: str
    fields: list[tuple[str, str]]
    """The fields of the JSON object that the text is; empty: the text is no object."""
    reasoning: str
    calls: list[Call]


@dataclass
class Card:
    name: str
    anchor: str
    outcome: str
    flaws: list[str]
    code: str
    """The code of a failed row; empty for another row."""
    turns: list[tuple[str, str]]
    """Role and text of each turn."""
    media: list[Medium]
    answers: list[Answer] = field(default_factory=list)
    metadata: list[tuple[str, str]] = field(default_factory=list)
    expected: str = ""
    """The expected answer, where the given one differs."""
    message: str = ""
    """The message of a failed row's error."""
    num_tokens: int | None = None

    @property
    def notes(self) -> list[str]:
        """The titles of what a reader should see at once."""
        return [TITLES[name] for name in (self.outcome, *self.flaws) if name not in (FAILED, ANSWERED)]


def outcome_of(request: dict[str, Any], answer: dict[str, Any]) -> str:
    """FAILED, UNEXPECTED, EXPECTED or ANSWERED; UNKNOWN for an answer in the form of no endpoint."""
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
    """The flaws of an answered row. `has_schema`: the job has a schema for rows without a rule of their own."""
    return [] if outcome in (FAILED, UNKNOWN) else flaws_of_row(request, answer, has_rule_of_job=has_schema).names


def metadata_of(request: dict[str, Any]) -> dict[str, Any]:
    body = request.get("body")
    metadata = body.get("metadata") if isinstance(body, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def code_of(answer: dict[str, Any]) -> str:
    return str(error_of(answer).get("code"))[:80]


def card_of(request: dict[str, Any], answer: dict[str, Any], *, has_schema: bool) -> Card:
    outcome = outcome_of(request, answer)
    turns, media = question_in(request)
    metadata = metadata_of(request)
    card = Card(
        name=name_of_answer(answer), anchor=_anchor_of(answer), outcome=outcome,
        flaws=flaws_of(request, answer, outcome, has_schema=has_schema),
        code=code_of(answer) if outcome == FAILED else "", turns=turns, media=media,
        metadata=_fields(dict([pair for pair in metadata.items() if pair[0] != "expected"][:_MAX_PARTS])))
    if attempts := attempts_of(answer):
        steps = [f"{each.get('reason')} (step {each.get('step')})" for each in attempts]
        best = "; the first one without an error counts" if answer.get(BEST_OF) else ""
        card.metadata.append(("later attempts", cut(", ".join(steps) + best, _MAX_VALUE)))
    if outcome == FAILED:
        card.message = cut(str(error_of(answer).get("message")))
    elif outcome != UNKNOWN:
        card.answers = answers_in(answer)[:_MAX_PARTS]
        counts = next(iter(cells_of(answer["response"]["body"])), {})
        has_completion = counts.get("completion_tokens") is not None
        card.num_tokens = counts.get("completion_tokens" if has_completion else "prompt_tokens")
    if outcome != EXPECTED and "expected" in metadata:
        card.expected = cut(str(metadata["expected"]))
    return card


def answers_in(answer: dict[str, Any]) -> list[Answer]:
    """The items of an answered row. A vector is its first numbers."""
    form, items = answers_of(answer["response"]["body"])
    if form.has_vectors:
        return [Answer(_first_numbers(form.cells_of(item, None)["vector"].tolist()), [], "", []) for item in items]
    return [_answer(form.text_of(item), item.get("message") or {}) for item in items]


def _answer(text: str, message: dict[str, Any]) -> Answer:
    calls = [Call(cut(name, _MAX_VALUE), cut(arguments, _MAX_VALUE), _fields(object_in(arguments) or {}))
             for name, arguments in _calls_in(message)]
    return Answer(cut(text), _fields(object_in(text) or {}), cut(str(message.get("reasoning_content") or "")), calls)


def _first_numbers(numbers: list[float]) -> str:
    more = " ..." if len(numbers) > _MAX_NUMBERS else ""
    return f"{len(numbers)} numbers: {' '.join(f'{number:.4g}' for number in numbers[:_MAX_NUMBERS])}{more}"


def cut(text: str, most: int = MAX_TEXT) -> str:
    if len(text) <= most:
        return text
    return f"{text[:most]} [the first {most:,} of {len(text):,} characters]"


def _fields(value: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of each field, a value that is no text as JSON; empty for an object with too many fields."""
    if len(value) > _MAX_FIELDS:
        return []
    texts = {name: item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
             for name, item in value.items()}  # fmt: skip
    return [(cut(name, _MAX_VALUE), cut(text, _MAX_VALUE)) for name, text in texts.items()]


def _anchor_of(answer: dict[str, Any]) -> str:
    """The row's address on its page, the same whenever the page is made. A name that is no plain word has a digest."""
    name = answer["custom_id"]
    if name is not None and _PLAIN_NAME.fullmatch(name):
        return f"row-{name}"
    known_by = f"\0line {answer['error']['line']}" if name is None else name
    # No plain name has a colon.
    return f"row:{hashlib.blake2b(known_by.encode('utf-8', 'replace'), digest_size=8).hexdigest()}"


def question_in(request: dict[str, Any]) -> tuple[list[tuple[str, str]], list[Medium]]:
    """The turns that have a text, and the media in their order."""
    body = request.get("body")
    fields = body if isinstance(body, dict) else {}
    messages = fields.get("messages", sides_of(fields, _MAX_PARTS) or [
        {"role": "prompt", "content": fields.get("prompt", fields.get("input"))}])
    turns: list[tuple[str, str]] = []
    media: list[Medium] = []
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict):
            calls = [f"{name}({arguments})" for name, arguments in _calls_in(message)]
            text = "\n".join([*_texts_in(message.get("content"), media), *calls])
            if text:
                turns.append((str(message.get("role"))[:20], cut(text)))
    if len(turns) > _MAX_PARTS:
        turns[_MAX_PARTS // 2 : -_MAX_PARTS // 2] = [("", f"[{len(turns) - _MAX_PARTS} turns are not shown]")]
    return turns, media


def _texts_in(content: Any, media: list[Medium]) -> Iterator[str]:
    """The texts of a message or a prompt; its media are added to `media`."""
    if isinstance(content, str):
        yield content
    parts = content if isinstance(content, list) else []
    if parts and all(type(part) is int for part in parts):
        more = " ..." if len(parts) > _MAX_NUMBERS else ""
        yield f"{len(parts)} token ids: {' '.join(map(str, parts[:_MAX_NUMBERS]))}{more}"
        return
    for part in parts:
        if isinstance(part, (str, list)):  # a request for vectors may have several inputs
            yield from _texts_in(part, media)
        if not isinstance(part, dict):
            continue
        if isinstance(part.get("text"), str):
            yield part["text"]
        for name in ("image_url", "video_url"):
            url = part.get(name)
            if isinstance(url, dict) and isinstance(url.get("url"), str):
                options = {field: value for field, value in url.items() if field != "url"}
                media.append(Medium(url["url"], name == "video_url", json.dumps(options)))


def _calls_in(message: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, arguments) of each call of a tool."""
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [(str(function.get("name")), str(function.get("arguments") or ""))
            for function in functions if isinstance(function, dict)]
