"""What stands above the rows: the job, its figures, codes, and how the fields of its answers are spread, as words and
bars. Knows nothing of markup or files.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from npu_runner.reports.choice import Section
from npu_runner.reports.fields import FieldSpread, FieldTable
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
)
from npu_runner.reports.survey import Survey
from npu_runner.reports.vectors import VectorTable

_MOST_BARS = 8
_FEW_VALUES = 12
_UNITS = {"text": "characters", "list": "items", "object": "fields"}
_LABELS = {FAILED: "failed", UNKNOWN: "of unknown form", UNEXPECTED: "other than expected", CUT_OFF: "cut off",
           REPETITION: "repetition", UNPARSED: "unparsed", EXPECTED: "as expected", WHOLE: "whole"}
TITLES = {UNKNOWN: "Of a form that this version does not know", UNEXPECTED: "Other than expected",
          CUT_OFF: "Cut off at the limit", REPETITION: "Repeats itself", UNPARSED: "Not JSON",
          EXPECTED: "As expected", ANSWERED: "Answered"}


@dataclass(frozen=True, kw_only=True)
class About:
    """The job, as its manifest and its record of runs have it. Seconds and devices are those of all runs."""

    model: str
    created: int
    """Unix time."""
    platform: str | None = None
    num_devices: int = 0
    version: str | None = None
    num_runs: int = 0
    """With none there are no seconds either."""
    start_seconds: float = 0.0
    serve_seconds: float = 0.0
    num_drafted: int = 0
    """Tokens proposed ahead of their step, and those of them that were drawn."""
    num_accepted: int = 0

    def facts(self) -> list[str]:
        where = [] if self.platform is None else [f"{self.platform} × {self.num_devices}"]
        version = [] if self.version is None else [f"npu-runner {self.version}"]
        runs = [f"{self.num_runs} runs"] if self.num_runs > 1 else []
        moment = time.gmtime(self.created)
        date = f"{moment.tm_mday} {time.strftime('%B %Y, %H:%M', moment)} UTC"
        return [self.model, date, *where, *runs, *version]


class Figure(NamedTuple):
    """`tone`: good, bad, odd or nothing."""

    name: str
    value: str
    tone: str = ""
    more: str = ""


def figures(num_rows: int, found: Survey, about: About | None) -> list[Figure]:
    counts = found.outcomes
    shown = [Figure("rows", f"{num_rows:,}")]
    num_missing = num_rows - found.num_seen
    if num_missing:
        shown.append(Figure("without an answer", f"{num_missing:,}", "odd"))
    if counts[FAILED]:
        shown.append(Figure("failed", f"{counts[FAILED]:,}", "bad", share(counts[FAILED], found.num_seen)))
    shown += [Figure(_LABELS[flaw], f"{counts[flaw]:,}", "odd", share(counts[flaw], found.num_seen))
              for flaw in (UNKNOWN, CUT_OFF, REPETITION, UNPARSED) if counts[flaw]]
    num_expected = counts[EXPECTED] + counts[UNEXPECTED]
    if num_expected:
        shown += [
            Figure("answers as expected", share(counts[EXPECTED], num_expected), tone(counts[EXPECTED], num_expected)),
            Figure("other than expected", f"{counts[UNEXPECTED]:,} of {num_expected:,}"),
        ]
    shown += [Figure(f"{name} tokens", f"{found.tokens[name]:,}") for name in ("prompt", "completion")
              if found.tokens[name]]
    if found.tokens["reasoning"]:
        shown.append(Figure("reasoning tokens", f"{found.tokens['reasoning']:,}"))
    if about is not None and about.num_drafted:
        shown.append(Figure("drafted tokens kept", share(about.num_accepted, about.num_drafted),
                            more=f"of {about.num_drafted:,}"))
    if about is not None and about.num_runs:
        start = f"{duration(about.start_seconds)} to start"
        shown.append(Figure("to serve", duration(about.serve_seconds), more=start))
    return shown


def tone(num_good: int, num_all: int) -> str:
    """Green is said of all, red of none."""
    if num_good == num_all:
        return "good"
    return "" if num_good else "bad"


def share(part: int, whole: int) -> str:
    """In per cent; all of it and nothing of it are said of nothing else."""
    if not part or part == whole:
        return f"{100 * part // whole} %"
    tenths = min(999, max(1, round(1000 * part / whole)))
    return f"{tenths / 10:.1f} %"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


class Filter(NamedTuple):
    outcome: str
    words: str
    num: int


def filters(found: Survey, sections: tuple[Section, ...]) -> list[Filter]:
    """What can be shown alone: whatever there is of, where there is a choice."""
    there = [Filter(name, words, found.outcomes[name]) for name, words in _LABELS.items()
             if found.outcomes[name] and (name != WHOLE or found.outcomes[name] < found.num_seen)]
    return there if len(there) > 1 and sections else []


class Bar(NamedTuple):
    label: str
    num: int
    width: float
    """In per cent of the longest."""


class FieldView(NamedTuple):
    """`columns`: heights of a spread of numbers, in per cent of the highest."""

    name: str
    facts: list[str]
    bars: list[Bar]
    num_more: int
    """Rows whose values have no bar."""
    columns: list[float]
    bounds: tuple[str, str]


def field_views(table: FieldTable) -> list[FieldView]:
    """Of one object alone nothing is spread."""
    if table.num_objects < 2:
        return []
    return [_field_view(name, spread, table.num_objects) for name, spread in table.spreads.items()]


def _field_view(name: str, spread: FieldSpread, num_objects: int) -> FieldView:
    numbers = spread.numbers
    is_many_numbers = numbers.num_seen > 1 and len(spread.values) > _FEW_VALUES
    facts = [] if spread.num_rows == num_objects else [f"in {share(spread.num_rows, num_objects)}"]
    if is_many_numbers:
        bounds = (plain(numbers.lowest), plain(numbers.highest))
        highest = max(numbers.bins())
        columns = [100 * count / highest for count in numbers.bins()]
        return FieldView(name, [*facts, f"mean {plain(numbers.mean)}"], [], 0, columns, bounds)
    if _is_flat(spread.values):
        return FieldView(name, [_described(spread), *facts], [], 0, [], ("", ""))
    bars, num_more = bars_of(spread.values, most=_MOST_BARS)
    if spread.has_more_values or num_more:
        facts.append("and others")
    return FieldView(name, facts, bars, num_more, [], ("", ""))


def _described(spread: FieldSpread) -> str:
    """Values that are too different for bars: "texts of 40 to 295 characters"."""
    (kind, _), *others = spread.types.most_common()
    if others or kind not in _UNITS:
        return "many different values"
    lowest, highest = plain(spread.lengths.lowest), plain(spread.lengths.highest)
    return f"{kind}s of {lowest if lowest == highest else f'{lowest} to {highest}'} {_UNITS[kind]}"


def _is_flat(values: Counter[str]) -> bool:
    """Of many values none comes often: bars would say nothing."""
    most = max(values.values(), default=0)
    return most * _MOST_BARS < values.total() or (most < 2 and len(values) != 1 and values.total() != 2)


def bars_of(counts: Counter[str], *, most: int) -> tuple[list[Bar], int]:
    """The most frequent, and how much the others add up to."""
    common = counts.most_common(most)
    longest = max((count for _, count in common), default=1)
    bars = [Bar(label or "(empty)", count, 100 * count / longest) for label, count in common]
    return bars, counts.total() - sum(bar.num for bar in bars)


def plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:,.4g}"


def of_vectors(table: VectorTable) -> str:
    """A sentence; empty where there are none."""
    if not table.num_of_length:
        return ""
    lengths = table.num_of_length.most_common(4)
    said = ", ".join(f"{count:,} vector{'s' * (count != 1)} of {length:,} numbers" for length, count in lengths)
    more = " and other lengths" if len(table.num_of_length) > len(lengths) else ""
    lowest, highest = plain(table.norms.lowest), plain(table.norms.highest)
    return f"{said}{more}, of norm {lowest if lowest == highest else f'{lowest} to {highest}'}."
