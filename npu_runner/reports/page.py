"""Renders the page of a job: the head from counts of all rows, then the chosen rows. Knows nothing of files.

Cards are made while the page is written, some at a time, so memory holds few of them.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from npu_runner.batch.files.joined import Joined
from npu_runner.batch.files.manifest import RULE_OF_JOB, Manifest
from npu_runner.batch.files.runs import Run, Runs
from npu_runner.batch.rows.attempt import BEST_OF
from npu_runner.reports.cards import (
    CUT_OFF,
    EXPECTED,
    FAILED,
    MAX_MEDIA,
    REPETITION,
    TITLES,
    UNEXPECTED,
    UNKNOWN,
    UNPARSED,
    WHOLE,
    Card,
    Medium,
    card_of,
)
from npu_runner.reports.survey import RETRIED, Kind, Survey
from npu_runner.reports.thumbnails import ThumbnailPool

_HERE = Path(__file__).parent
_CARDS_AT_ONCE = 32
_LABELS = {FAILED: "failed", UNKNOWN: "unknown form", CUT_OFF: "cut off", REPETITION: "repetition",
           UNPARSED: "unparsed", WHOLE: "whole", UNEXPECTED: "not as expected", EXPECTED: "as expected"}


def facts(manifest: Manifest, runs: Runs) -> list[str]:
    """The line below the page's title."""
    last: Run = runs.last[-1] if runs.last else {"platform": None, "devices": 0, "npu_runner": None}
    where = [] if last["platform"] is None else [f"{last['platform']} × {last['devices']}"]
    version = [] if last["npu_runner"] is None else [f"npu-runner {last['npu_runner']}"]
    moment = time.gmtime(manifest.created)
    date = f"{moment.tm_mday} {time.strftime('%B %Y, %H:%M', moment)} UTC"
    return [manifest.model_name, date, *where, *([f"{len(runs)} runs"] if len(runs) > 1 else []), *version]


class Figure(NamedTuple):
    """A number of the page's head; `tone`: bad, odd or empty."""

    name: str
    value: str
    more: str = ""
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """`shown`: the numbers of the shown rows in `joined.places`, by kind and in order."""

    output: str
    joined: Joined
    found: Survey
    shown: Mapping[Kind, np.ndarray]
    manifest: Manifest
    runs: Runs

    @property
    def num_shown(self) -> int:
        return sum(map(len, self.shown.values()))

    @property
    def num_media(self) -> int:
        """Images and videos of the shown rows."""
        return sum(self.found.num_media[number] for numbers in self.shown.values() for number in numbers)

    def write(self, file: BinaryIO, thumbnails: ThumbnailPool) -> None:
        found = self.found
        page = _environment().get_template("page.html.jinja").stream(
            output=self.output, policy=_policy(), style=_asset("page.css"), script=_asset("page.js"),
            num_rows=self.joined.num_rows, num_shown=self.num_shown, has_input=self.joined.has_input,
            facts=facts(self.manifest, self.runs), figures=figures(self.joined.num_rows, found, self.runs),
            tables=self._tables(), filters=self._filters(),
            sections=(self._section(number, kind, thumbnails) for number, kind in enumerate(self.shown)))
        # "replace": it shows rows that were refused for half a surrogate pair, which no file can hold.
        page.enable_buffering(64)
        page.dump(file, encoding="utf-8", errors="replace")

    def _filters(self) -> list[tuple[str, str, int]]:
        """(token of a card, label, number of all rows)"""
        codes = [(f"code-{number}", f"failed: {kind.code}", self.found.kinds[kind])
                 for number, kind in enumerate(self.shown) if kind.code]
        labels = [(name, label, self.found.counts[name]) for name, label in _LABELS.items() if self.found.counts[name]]
        return [("", "all rows of this page", self.num_shown), *labels[:1], *codes, *labels[1:]]

    def _tables(self) -> list[tuple[str, list[str], list[list[str]], bool]]:
        """(title, heads of columns, lines, whether it is open) of each table of the head that has lines."""
        found = self.found
        codes = [[kind.code, f"{found.kinds[kind]:,}", share(found.kinds[kind], found.num_seen)]
                 for kind in self.shown if kind.code]
        fields = [[name, share(counts.num_rows, found.num_objects), counts.describe()]
                  for name, counts in found.fields.items()] if found.num_objects > 1 else []
        groups = []
        for group, counts in sorted(found.groups.items()):
            num_compared = counts[EXPECTED] + counts[UNEXPECTED]
            good = f"{counts[EXPECTED]:,} of {num_compared:,} ({share(counts[EXPECTED], num_compared)})" \
                if num_compared else ""
            groups.append([group, f"{counts.total():,}", f"{counts[FAILED]:,}", good])
        reasons = [[reason, f"{count:,}"] for reason, count in found.reasons.most_common()]
        settings = [[name, str(value)[:400]] for name, value in sorted(self.manifest.settings.items())]
        tables = [
            ("Failures by code", ["code", "rows", "of all rows"], codes, True),
            ("Later attempts by reason", ["reason", "attempts"], reasons, True),
            (f"Fields of {found.num_objects:,} answers in JSON", ["field", "in answers", "values"], fields, True),
            ("By kind of question", ["kind", "rows", "failed", "as expected"], groups, False),
            ("Settings", ["name", "value"], settings, False)]
        return [table for table in tables if table[2]]

    def _section(self, number: int, kind: Kind, thumbnails: ThumbnailPool) -> dict[str, Any]:
        num_rows, numbers = self.found.kinds[kind], self.shown[kind]
        counted = f"{num_rows:,} row{'s' * (num_rows != 1)}"
        if len(numbers) < num_rows:
            counted += f", {len(numbers):,} shown"
        return {"name": kind.name, "code": kind.code, "title": TITLES[kind.name], "counted": counted,
                "cards": self._cards(self.joined.places[numbers], f"code-{number}" if kind.code else "", thumbnails)}

    def _cards(self, places: np.ndarray, token: str,
               thumbnails: ThumbnailPool) -> Iterator[tuple[Card, list[tuple[Medium, str | None]], str]]:
        """Each card with its media, the data URL of each (None: it cannot be shown), and its tokens for the filters."""
        for first in range(0, len(places), _CARDS_AT_ONCE):
            cards = [card_of(request, answer, has_schema=RULE_OF_JOB in self.manifest.settings)
                     for request, answer in self.joined.pairs(places[first : first + _CARDS_AT_ONCE])]
            urls = thumbnails.make(medium for card in cards for medium in card.media[:MAX_MEDIA])
            for card in cards:
                is_whole = card.outcome not in (FAILED, UNKNOWN) and not card.flaws
                tokens = [card.outcome, *card.flaws, *([WHOLE] if is_whole else []), token]
                yield (card, [(medium, urls.get(medium.key)) for medium in card.media[:MAX_MEDIA]],
                       " ".join(tokens).strip())


def figures(num_rows: int, found: Survey, runs: Runs) -> list[Figure]:
    counts, num_seen = found.counts, found.num_seen
    shown = [Figure("rows", f"{num_rows:,}")]
    if num_rows > num_seen:
        shown.append(Figure("without an answer", f"{num_rows - num_seen:,}", tone="odd"))
    shown += [Figure(_LABELS[name], f"{counts[name]:,}", share(counts[name], num_seen), tone)
              for name, tone in ((FAILED, "bad"), (UNKNOWN, "odd"), (CUT_OFF, "odd"), (REPETITION, "odd"),
                                 (UNPARSED, "odd"), (WHOLE, "")) if counts[name]]
    if num_copied := runs.sums("tally").get("num_copied", 0):
        shown.append(Figure("copied from equal rows", f"{num_copied:,}"))
    if counts[RETRIED]:
        shown.append(Figure("tried again", f"{counts[RETRIED]:,}",
                            f"{found.reasons.total():,} attempts more, {counts[BEST_OF]:,} best_of"))
    if num_compared := counts[EXPECTED] + counts[UNEXPECTED]:
        shown.append(Figure("as expected", f"{counts[EXPECTED]:,} of {num_compared:,}",
                            share(counts[EXPECTED], num_compared)))
    shown += [Figure(f"{name} tokens", f"{found.tokens[name]:,}") for name in ("prompt", "completion", "reasoning")
              if found.tokens[name]]
    seconds, computed = runs.sums("seconds"), runs.sums("computed")
    if num_drafted := computed.get("draft_proposed", 0):
        shown.append(Figure("accepted drafts", share(computed.get("draft_accepted", 0), num_drafted),
                            f"of {num_drafted:,} tokens"))
    if len(runs):
        shown.append(Figure("to serve", duration(seconds["serve"]), f"{duration(seconds['start'])} to start"))
    return shown


def share(part: int, whole: int) -> str:
    """In per cent; 0 % and 100 % stand for none and all alone."""
    if not part or part == whole:
        return f"{100 * part // whole} %"
    return f"{min(999, max(1, round(1000 * part / whole))) / 10:.1f} %"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


@cache
def _environment() -> Environment:
    return Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                       lstrip_blocks=True)


@cache
def _asset(name: str) -> Markup:
    return Markup((_HERE / name).read_text(encoding="utf-8"))


@cache
def _policy() -> str:
    """The Content-Security-Policy: our style and our script by their hashes, images within the page, nothing else."""
    style, script = (base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode()
                     for name in ("page.css", "page.js"))
    return (f"default-src 'none'; img-src data:; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
            "base-uri 'none'; form-action 'none'")
