"""One row as a page shows it, cut and folded to what can be looked at. Knows nothing of files or markup."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from npu_runner.batch.rows.endpoints import cells_of
from npu_runner.batch.rows.openai_response import error_of, name_of_answer, object_in
from npu_runner.reports.reading import (
    CUT_OFF,
    EXPECTED,
    FAILED,
    MAX_TEXT,
    REPETITION,
    UNEXPECTED,
    UNKNOWN,
    UNPARSED,
    WHOLE,
    Asked,
    Medium,
    Said,
    ToolCall,
    anchor_of,
    asked_by,
    flaws_of,
    metadata_of,
    outcome_of,
    said_by,
)
from npu_runner.reports.thumbnails import key_of
from npu_runner.reports.vectors import Neighbour, outline, vectors_in

MAX_MEDIA_PER_ROW = 8
_MAX_VECTORS = 4
_MOST_FIELDS = 60
_MOST_METADATA = 20
_MOST_CHARS = 400
_BEGINNING = 220
_SHORT = 90
_NOTES = {UNEXPECTED: "not as expected", EXPECTED: "as expected", CUT_OFF: "cut off at the limit",
          REPETITION: "repeats itself", UNPARSED: "not JSON", UNKNOWN: "no form that this version knows"}


@dataclass(frozen=True)
class Words:
    """A text: whole, or folded behind its beginning."""

    text: str
    beginning: str | None = None
    """Shown while the text is folded; None: it is short."""
    num_chars: int = 0
    """Of the text before it was cut; 0: it was not."""

    @property
    def is_short(self) -> bool:
        """It fits into a line or two and may stand out."""
        return self.beginning is None and len(self.text) <= _SHORT and "\n" not in self.text

    @classmethod
    def of(cls, text: str, *, most_chars: int, most_lines: int) -> Words:
        """`most_chars`, `most_lines`: a text with more of either is folded."""
        num_chars = len(text) if len(text) > MAX_TEXT else 0
        text = text[:MAX_TEXT].strip("\n")
        if len(text) <= most_chars and text.count("\n") < most_lines:
            return cls(text, None, num_chars)
        beginning = "\n".join(text[:_BEGINNING].split("\n")[:3])
        return cls(text, beginning.rsplit(" ", 1)[0].rstrip() or beginning, num_chars)


def of_prompt(text: str) -> Words:
    return Words.of(text, most_chars=360, most_lines=6)


def of_answer(text: str) -> Words:
    return Words.of(text, most_chars=700, most_lines=12)


@dataclass(frozen=True)
class ShownTurn:
    role: str
    words: Words


@dataclass(frozen=True)
class ShownCall:
    name: str
    fields: list[tuple[str, str]]
    """Of its arguments, where they are an object; else they are `text`."""
    text: str


@dataclass(frozen=True)
class Answer:
    words: Words | None
    """None: there is nothing but calls."""
    fields: list[tuple[str, str]]
    """Of the JSON object that it is; none: it is no object, or too large for a table."""
    reasoning: Words | None
    calls: list[ShownCall]


@dataclass(frozen=True)
class ShownVector:
    outline: str
    num_numbers: int
    neighbours: list[Neighbour]


@dataclass
class Card:
    """A row. `media`: the key of each picture, whether it is a sheet of a video's frames, and its address; "" for one
    that is in the row."""

    place: int
    name: str
    anchor: str
    outcome: str
    flaws: list[str]
    turns: list[ShownTurn] = field(default_factory=list)
    turn_keys: tuple[int, ...] = ()
    media: list[tuple[str, bool, str]] = field(default_factory=list)
    num_more_media: int = 0
    answers: list[Answer] = field(default_factory=list)
    vectors: list[ShownVector] = field(default_factory=list)
    num_more_vectors: int = 0
    metadata: list[tuple[str, str]] = field(default_factory=list)
    expected: Words | None = None
    message: Words | None = None
    """Of its error."""
    code: str = ""
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(outcome or flaw, words) of what is to be said of it in a word."""
    num_tokens: int | None = None


def card_of(place: int, request: dict[str, Any], answer: dict[str, Any], *, has_schema: bool) -> tuple[Card, Asked]:
    """The card without its pictures, and the request, whose first media are those of the card."""
    asked = asked_by(request)
    metadata = metadata_of(request)
    expected = metadata.get("expected")
    outcome = outcome_of(request, answer)
    flaws = flaws_of(request, answer, outcome, has_schema=has_schema)
    card = Card(
        place=place, name=name_of_answer(answer), anchor=anchor_of(answer), outcome=outcome,
        flaws=flaws if flaws or outcome in (FAILED, UNKNOWN) else [WHOLE],
        turns=[ShownTurn(turn.role, of_prompt(turn.text)) for turn in asked.turns],
        turn_keys=tuple(map(hash, asked.turns)),
        media=[(key_of(medium), medium.is_video, _address_of(medium)) for medium in asked.media[:MAX_MEDIA_PER_ROW]],
        num_more_media=max(0, len(asked.media) - MAX_MEDIA_PER_ROW),
        metadata=[(_cut(name), _shown(value)) for name, value in list(metadata.items())[:_MOST_METADATA]
                  if name != "expected"],
        expected=None if expected is None or outcome == EXPECTED else of_prompt(str(expected)),
        notes=[(name, _NOTES[name]) for name in (outcome, *flaws) if name in _NOTES])
    if outcome == FAILED:
        error = error_of(answer)
        card.code, card.message = str(error.get("code")), of_answer(str(error.get("message")))
    if outcome in (FAILED, UNKNOWN):
        return card, asked
    body = answer["response"]["body"]
    counts = next(iter(cells_of(body)), {})
    card.num_tokens = counts.get("prompt_tokens") if counts.get("completion_tokens") is None else \
        counts["completion_tokens"]
    card.answers = [_answer(said) for said in said_by(answer)]
    vectors = vectors_in(answer)
    card.vectors = [ShownVector(outline(vector_D), len(vector_D), []) for vector_D in vectors[:_MAX_VECTORS]]
    card.num_more_vectors = max(0, len(vectors) - _MAX_VECTORS)
    return card, asked


def _address_of(medium: Medium) -> str:
    return "" if medium.url[:5].lower() == "data:" else _cut(medium.url)


def without_turns(card: Card, keys: frozenset[int]) -> list[ShownTurn]:
    return [turn for turn, key in zip(card.turns, card.turn_keys, strict=True) if key not in keys]


def _answer(said: Said) -> Answer:
    return Answer(
        words=None if said.calls and not said.text.strip() else of_answer(said.text),
        fields=fields_of(said.text),
        reasoning=Words(said.reasoning[:MAX_TEXT], None, len(said.reasoning) if len(said.reasoning) > MAX_TEXT else 0)
        if said.reasoning else None,
        calls=list(map(_call, said.calls)))


def _call(call: ToolCall) -> ShownCall:
    fields = fields_of(call.arguments)
    return ShownCall(call.name[:_MOST_CHARS], fields, "" if fields else _cut(call.arguments))


def fields_of(text: str) -> list[tuple[str, str]]:
    """(name, value) of each field, a value that is no text as JSON; none where the text is no object, or too long."""
    value = object_in(text)
    if value is None or len(value) > _MOST_FIELDS:
        return []
    return [(name[:_MOST_CHARS], _shown(item)) for name, item in value.items()]


def _shown(value: object) -> str:
    return _cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} ..."
