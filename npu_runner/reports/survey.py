"""One pass over all rows of a job: what there is to count, and which rows a page might show. Knows nothing of pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from npu_runner.batch.files.joined import Joined
from npu_runner.batch.rows.endpoints import cells_of
from npu_runner.batch.rows.openai_response import error_of, object_in
from npu_runner.reports.fields import FieldTable
from npu_runner.reports.reading import (
    ANSWERED,
    CUT_OFF,
    EXPECTED,
    FAILED,
    REPETITION,
    UNEXPECTED,
    UNKNOWN,
    UNPARSED,
    WHOLE,
    asked_by,
    flaws_of,
    metadata_of,
    outcome_of,
    said_by,
)
from npu_runner.reports.vectors import VectorTable, vectors_in

ORDER = (FAILED, UNKNOWN, UNEXPECTED, CUT_OFF, REPETITION, UNPARSED, EXPECTED, ANSWERED)
"""Of what a row may be, worst first."""
OTHER_CODES = "other codes"
_MAX_CODES = 40
_MAX_KINDS = 40


class Kind(NamedTuple):
    """Rows that stand together on a page: all that are `outcome` before they are anything else, and of failed ones
    all with this `code`."""

    outcome: str
    code: str = ""


class Candidate(NamedTuple):
    """A row that might be shown. Texts are known by their hashes: of a huge job there are too many to keep."""

    place: int
    turns: tuple[int, ...]
    message: int
    """Of its error."""
    num_media: int


@dataclass
class Survey:
    outcomes: Counter[str] = field(default_factory=Counter)
    """By outcome and by flaw, or WHOLE: a row may be several."""
    kinds: Counter[Kind] = field(default_factory=Counter)
    candidates: dict[Kind, list[Candidate]] = field(default_factory=dict)
    by_metadata: dict[str, Counter[str]] = field(default_factory=dict)
    """Outcomes by the `kind` of the rows' metadata."""
    tokens: Counter[str] = field(default_factory=Counter)
    """`prompt`, `completion`, `reasoning` of the answered rows."""
    fields: FieldTable = field(default_factory=FieldTable)
    vectors: VectorTable = field(default_factory=VectorTable)

    @property
    def num_seen(self) -> int:
        return self.kinds.total()


def survey(joined: Joined, max_rows: int, *, has_schema: bool) -> Survey:
    """Candidates of each kind are its first `max_rows` rows."""
    found = Survey()
    for place, (request, answer) in zip(joined.places, joined.pairs(joined.places), strict=True):
        outcome = outcome_of(request, answer)
        flaws = flaws_of(request, answer, outcome, has_schema=has_schema)
        is_answered = outcome not in (FAILED, UNKNOWN)
        found.outcomes.update((outcome, *flaws, *([WHOLE] if is_answered and not flaws else [])))
        if is_answered:
            _add_answer(found, answer)
        _add_to_metadata(found, outcome, metadata_of(request).get("kind"))
        kind = _kind(found, outcome, flaws, answer)
        found.kinds[kind] += 1
        same = found.candidates.setdefault(kind, [])
        if len(same) < max_rows:
            same.append(_candidate(int(place), request, answer))
    return found


def _kind(found: Survey, outcome: str, flaws: list[str], answer: dict[str, Any]) -> Kind:
    if outcome != FAILED:
        return Kind(min((outcome, *flaws), key=ORDER.index))
    kind = Kind(FAILED, str(error_of(answer).get("code")))
    num_codes = sum(other.outcome == FAILED for other in found.kinds)
    return kind if kind in found.kinds or num_codes < _MAX_CODES else Kind(FAILED, OTHER_CODES)


def _add_answer(found: Survey, answer: dict[str, Any]) -> None:
    body = answer["response"]["body"]
    counts = next(iter(cells_of(body)), {})
    for name in ("prompt", "completion", "reasoning"):
        found.tokens[name] += counts.get(f"{name}_tokens") or 0
    for said in said_by(answer):
        if value := object_in(said.text):
            found.fields.add(value)
    for vector_D in vectors_in(answer):
        found.vectors.add(vector_D)


def _add_to_metadata(found: Survey, outcome: str, kind: object) -> None:
    name = None if kind is None else str(kind)[:80]
    if name is not None and (name in found.by_metadata or len(found.by_metadata) < _MAX_KINDS):
        found.by_metadata.setdefault(name, Counter())[outcome] += 1


def _candidate(place: int, request: dict[str, Any], answer: dict[str, Any]) -> Candidate:
    asked, message = asked_by(request), error_of(answer).get("message")
    return Candidate(place, tuple(map(hash, asked.turns)), 0 if message is None else hash(str(message)),
                     len(asked.media))
