"""One self-contained HTML page over a job's answers: made for looking. Knows nothing of the engine.

Reads the output and the input again, a row at a time, so it shows resumed rows as well and holds only what is shown.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from npu_runner.batch.files.durable import clear_file_errors, replacing
from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.output_file import read_row, scan_output
from npu_runner.batch.job.tally import is_as_expected
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.errors import RequestError
from npu_runner.multimodal.images import open_image
from npu_runner.multimodal.media import load_media

_THUMBNAIL_SIDE = 360
_MAX_THUMBNAILS_PER_ROW = 8
_MAX_TEXT = 4000
_MAX_KINDS = 40
# Decoding happens in this process here, and only for a look.
_MAX_THUMBNAIL_SOURCE_PIXELS = 50_000_000

FAILED, UNEXPECTED, EXPECTED, ANSWERED = "failed", "unexpected", "expected", "answered"
_ORDER = (FAILED, UNEXPECTED, EXPECTED, ANSWERED)


@dataclass
class Card:
    """One row on the page. `turns`: (role, text); `pictures`: data URLs, or None for one that cannot be shown."""

    name: str
    outcome: str
    turns: list[tuple[str, str]] = field(default_factory=list)
    pictures: list[str | None] = field(default_factory=list)
    num_more_pictures: int = 0
    answers: list[str] = field(default_factory=list)
    expected: str | None = None
    error: str | None = None
    note: str = ""


@dataclass
class _Counts:
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, outcome: str, kind: str | None) -> None:
        self.outcomes[outcome] += 1
        if kind is not None and (kind in self.kinds or len(self.kinds) < _MAX_KINDS):
            self.kinds.setdefault(kind, Counter())[outcome] += 1


def write_report(
    target: Path,
    file: InputFile,
    rows: InputScan,
    output: Path,
    *,
    allowed_media_dir: Path | None,
    max_rows: int,
) -> None:
    """Write the page. Of a huge job it shows `max_rows` rows, failed and unexpected ones first, and says so."""
    starts = _starts(rows, output)
    with open(output, "rb") as answers:
        counts, chosen = _choose(file, answers, starts, max_rows)
        wanted = np.zeros(rows.num_rows, dtype=bool)
        wanted[chosen] = True
        cards = [_card(row, answer, allowed_media_dir) for row, answer in _joined(file, answers, starts, wanted)]
    cards.sort(key=lambda card: _ORDER.index(card.outcome))  # stable: input order within each outcome
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template("report.html.jinja").stream(
        cards=cards,
        counts=counts.outcomes,
        kinds=sorted(counts.kinds.items()),
        num_rows=rows.num_rows,
        num_expected=counts.outcomes[EXPECTED] + counts.outcomes[UNEXPECTED],
        output=output.name,
    )
    with clear_file_errors(f"report {target}"), replacing(target) as page_file:
        # "replace": the page shows rows that were refused for half a surrogate pair, which no file can hold.
        page.dump(page_file, encoding="utf-8", errors="replace")


def _starts(rows: InputScan, output: Path) -> np.ndarray:
    """For every input row, where its answer begins in the output; -1 if it has none."""
    scan = scan_output(output)
    starts = np.full(rows.num_rows, -1, dtype=np.int64)
    if scan.num_rows:
        by_key = np.argsort(scan.keys, kind="stable")
        places = by_key[np.minimum(np.searchsorted(scan.keys, rows.keys, sorter=by_key), scan.num_rows - 1)]
        found = scan.keys[places] == rows.keys
        starts[found] = scan.starts[places[found]]
    return starts


def _joined(
    file: InputFile, answers: Any, starts: np.ndarray, wanted: np.ndarray
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Request and result of the wanted rows that have one; an unreadable request is empty."""
    indexes = np.flatnonzero(wanted)
    for index, row in zip(indexes, file.rows(wanted), strict=True):
        if starts[index] < 0:
            continue
        try:
            request = read_json(file.source.read(row))
        except RequestError:
            request = {}
        yield request, read_row(answers, int(starts[index]))


def _choose(file: InputFile, answers: Any, starts: np.ndarray, max_rows: int) -> tuple[_Counts, list[int]]:
    counts = _Counts()
    first: dict[str, list[int]] = {outcome: [] for outcome in _ORDER}
    answered = starts >= 0
    for index, (request, answer) in zip(
        np.flatnonzero(answered), _joined(file, answers, starts, answered), strict=True
    ):
        outcome = _outcome(request, answer)
        kind = _metadata(request).get("kind")
        counts.add(outcome, None if kind is None else str(kind)[:80])
        if len(first[outcome]) < max_rows:
            first[outcome].append(int(index))
    return counts, [index for outcome in _ORDER for index in first[outcome]][:max_rows]


def _outcome(request: dict[str, Any], answer: dict[str, Any]) -> str:
    if answer["error"] is not None:
        return FAILED
    expected = _metadata(request).get("expected")
    if expected is None:
        return ANSWERED
    return EXPECTED if is_as_expected(_texts(answer)[0], str(expected)) else UNEXPECTED


def _metadata(request: dict[str, Any]) -> dict[str, Any]:
    body = request.get("body")
    metadata = body.get("metadata") if isinstance(body, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _texts(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["response"]["body"]["choices"]]


def _card(request: dict[str, Any], answer: dict[str, Any], allowed_media_dir: Path | None) -> Card:
    error = answer["error"]
    expected = _metadata(request).get("expected")
    card = Card(
        name=answer["custom_id"] or f"line {error['line']}",
        outcome=_outcome(request, answer),
        expected=None if expected is None else str(expected)[:_MAX_TEXT],
    )
    if error is not None:
        card.error = f"{error['code']}: {error['message']}"[:_MAX_TEXT]
    else:
        body = answer["response"]["body"]
        card.answers = [text[:_MAX_TEXT] for text in _texts(answer)]
        reasons = {choice["finish_reason"] for choice in body["choices"]} - {"stop"}
        card.note = f"{body['usage']['completion_tokens']} tokens" + (", cut off at the limit" if reasons else "")
    messages = request.get("body", {}).get("messages") if isinstance(request.get("body"), dict) else None
    for message in messages if isinstance(messages, list) else []:
        _add_message(card, message, allowed_media_dir)
    return card


def _add_message(card: Card, message: Any, allowed_media_dir: Path | None) -> None:
    """Rows that failed may hold anything at all here."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = []
    for part in parts if isinstance(parts, list) else []:
        if not isinstance(part, dict):
            continue
        if isinstance(part.get("text"), str):
            texts.append(part["text"])
        url = part.get("image_url")
        if isinstance(url, dict) and isinstance(url.get("url"), str):
            if len(card.pictures) < _MAX_THUMBNAILS_PER_ROW:
                card.pictures.append(_thumbnail(url["url"], allowed_media_dir))
            else:
                card.num_more_pictures += 1
    if texts:
        card.turns.append((str(message.get("role"))[:20], "\n".join(texts)[:_MAX_TEXT]))


def _thumbnail(url: str, allowed_media_dir: Path | None) -> str | None:
    try:
        image = open_image(load_media(url, allowed_media_dir), max_source_pixels=_MAX_THUMBNAIL_SOURCE_PIXELS)
    except RequestError:
        return None
    image.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(encoded.getvalue()).decode("ascii")
