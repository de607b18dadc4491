"""Counts all rows of a job in one pass, and chooses the rows that a page shows. Knows nothing of markup."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from npu_runner.batch.files.joined import Joined
from npu_runner.batch.rows.attempt import BEST_OF, attempts_of
from npu_runner.batch.rows.endpoints import cells_of, texts_of
from npu_runner.batch.rows.openai_response import object_in
from npu_runner.reports.cards import (
    FAILED,
    MAX_MEDIA,
    TITLES,
    UNKNOWN,
    WHOLE,
    code_of,
    flaws_of,
    metadata_of,
    outcome_of,
    question_in,
)

OTHER_CODES = "other codes"
RETRIED = "retried"
"""A row with more than one attempt."""
_MAX_CODES = 40
_MAX_GROUPS = 40
"""Values of the metadata's `kind` that are counted."""
_MAX_FIELDS = 60
_MAX_VALUES = 64
"""Different values of a field that are counted, ..."""
_MOST_SHOWN = 8
"""... and the most frequent that are shown."""
_MAX_NAME = 80


class Kind(NamedTuple):
    """Rows that stand together: those with one outcome, or else with one flaw; failed ones by `code`."""

    name: str
    code: str = ""


@dataclass
class FieldCounts:
    """The values of one field of JSON answers. A list counts with each of its plain items."""

    num_rows: int = 0
    values: Counter[str] = field(default_factory=Counter)
    has_more_values: bool = False
    num_numbers: int = 0
    lowest: float = math.inf
    highest: float = -math.inf
    total: float = 0.0

    def add(self, value: object) -> None:
        self.num_rows += 1
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, (int, float)) and not isinstance(item, bool) and abs(item) < 1e300:  # no NaN either
                self.num_numbers += 1
                self.total += item
                self.lowest, self.highest = min(self.lowest, item), max(self.highest, item)
            text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
            if isinstance(item, (list, dict)) or len(text) > _MAX_NAME:
                self.has_more_values = True
            elif text in self.values or len(self.values) < _MAX_VALUES:
                self.values[text] += 1
            else:
                self.has_more_values = True

    def describe(self) -> str:
        """The most frequent values with their counts, or the bounds and the mean of numbers that differ."""
        shown = self.values.most_common(_MOST_SHOWN)
        is_long = self.has_more_values or len(self.values) > _MOST_SHOWN
        if is_long and self.num_numbers > 1:
            mean = self.total / self.num_numbers
            return f"{self.lowest:,.4g} to {self.highest:,.4g}, mean {mean:,.4g}"
        if is_long and (not shown or shown[0][1] * _MOST_SHOWN < self.num_rows):
            return "many different values"
        texts = [f"{text or '(empty)'} {count:,}" for text, count in shown]
        return "; ".join(texts + ["others"] * is_long)


@dataclass
class Survey:
    counts: Counter[str] = field(default_factory=Counter)
    """Rows by outcome, by flaw, and WHOLE; a row may have several of them."""
    kinds: Counter[Kind] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Attempts after the first ones."""
    groups: dict[str, Counter[str]] = field(default_factory=dict)
    """Outcomes by the `kind` in the rows' metadata."""
    tokens: Counter[str] = field(default_factory=Counter)
    """`prompt`, `completion`, `reasoning` of the answered rows."""
    num_objects: int = 0
    """Answers that are JSON objects, ..."""
    fields: dict[str, FieldCounts] = field(default_factory=dict)
    """... and their fields."""
    kind_of_row: list[Kind] = field(default_factory=list)
    num_media: list[int] = field(default_factory=list)
    """Images and videos of each row that a page may show."""

    @property
    def num_seen(self) -> int:
        return len(self.kind_of_row)

    def ordered_kinds(self) -> list[Kind]:
        """Failures by their number of rows, then the other kinds, worst first."""
        order = list(TITLES)
        return sorted(self.kinds, key=lambda kind: (order.index(kind.name), -self.kinds[kind], kind.code))

    def add(self, request: dict[str, Any], answer: dict[str, Any], *, has_schema: bool) -> None:
        outcome = outcome_of(request, answer)
        flaws = flaws_of(request, answer, outcome, has_schema=has_schema)
        if attempts := attempts_of(answer):
            self.counts.update((RETRIED, *([BEST_OF] if answer.get(BEST_OF) else [])))
            self.reasons.update(str(each.get("reason"))[:_MAX_NAME] for each in attempts)
        is_answered = outcome not in (FAILED, UNKNOWN)
        self.counts.update((outcome, *flaws, *([WHOLE] if is_answered and not flaws else [])))
        if is_answered:
            self._add_answer(answer["response"]["body"])
        group = metadata_of(request).get("kind")
        if group is not None and (str(group)[:_MAX_NAME] in self.groups or len(self.groups) < _MAX_GROUPS):
            self.groups.setdefault(str(group)[:_MAX_NAME], Counter())[outcome] += 1
        kind = Kind(min((outcome, *flaws), key=list(TITLES).index), code_of(answer) if outcome == FAILED else "")
        if kind not in self.kinds and len(self.kinds) >= _MAX_CODES:
            kind = Kind(kind.name, OTHER_CODES if kind.code else "")
        self.kinds[kind] += 1
        self.kind_of_row.append(kind)
        self.num_media.append(min(MAX_MEDIA, len(question_in(request)[1])))

    def _add_answer(self, body: Mapping[str, Any]) -> None:
        counts = next(iter(cells_of(body)), {})
        for name in ("prompt", "completion", "reasoning"):
            self.tokens[name] += counts.get(f"{name}_tokens") or 0
        for text in texts_of(body):
            if value := object_in(text):
                self.num_objects += 1
                for name, item in list(value.items()):
                    if name[:_MAX_NAME] in self.fields or len(self.fields) < _MAX_FIELDS:
                        self.fields.setdefault(name[:_MAX_NAME], FieldCounts()).add(item)


def survey(joined: Joined, *, has_schema: bool) -> Survey:
    found = Survey()
    for request, answer in joined.pairs(joined.places):
        found.add(request, answer, has_schema=has_schema)
    return found


def spread(found: Survey, max_rows: int) -> dict[Kind, np.ndarray]:
    """The numbers of the rows that are shown, by kind: each kind gets as many as the others, as far as it has them, and
    they are taken at even distances."""
    kinds = found.ordered_kinds()
    number_of = {kind: number for number, kind in enumerate(kinds)}
    kind_of_row = np.array([number_of[kind] for kind in found.kind_of_row], dtype=np.int16)
    shown: dict[Kind, np.ndarray] = {}
    for kind, num_shown in zip(kinds, evenly([found.kinds[kind] for kind in kinds], max_rows), strict=True):
        rows = np.flatnonzero(kind_of_row == number_of[kind])
        shown[kind] = rows[np.arange(num_shown) * len(rows) // max(num_shown, 1)]
    return shown


def evenly(sizes: list[int], most: int) -> list[int]:
    """`most` shared out: each size gets as much as the others, and what is too much for one goes to the larger ones."""
    shares, left = [0] * len(sizes), most
    for rank, place in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        shares[place] = min(sizes[place], left // (len(sizes) - rank))
        left -= shares[place]
    return shares
