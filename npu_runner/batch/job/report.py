"""One self-contained HTML page over a job's answers: made for looking. Knows nothing of the engine.

Reads the output and the input again, a row at a time, so it shows resumed rows as well and holds only what is shown.
Without the input it shows answers alone.
Images are decoded in a worker process: what kills it there is an image that cannot be shown.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.output_file import OutputScan, read_row, rows_in_order, scan_output
from npu_runner.batch.files.place import Place
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.summary import is_as_expected, is_json
from npu_runner.batch.job.thumbnails import ThumbnailMaker
from npu_runner.batch.rows.endpoint import asks_for_json
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.batch.rows.openai_response import is_cut_off, is_repetition, texts_of
from npu_runner.batch.rows.scores import sides_of
from npu_runner.errors import JobError, RequestError
from npu_runner.serving.replica import RawRow
from npu_runner.serving.workers.pool import PoolLimits, WorkerPool

_MAX_THUMBNAILS_PER_ROW = 8
_MAX_TEXT = 4000
_MOST_SIDES = 16  # queries and documents of a row
_MAX_PENDING = 64  # images on their way to a worker and back
_MAX_KINDS = 40
_MOST_FIELDS = 60
_MOST_CHARS = 400

FAILED, UNEXPECTED, EXPECTED, ANSWERED = "failed", "unexpected", "expected", "answered"
CUT_OFF, REPETITION, UNPARSED = "cut_off", "repetition", "unparsed"
_ORDER = (FAILED, UNEXPECTED, CUT_OFF, REPETITION, UNPARSED, EXPECTED, ANSWERED)
_NO_INPUT = "The question is not shown: the page was made without the input."


@dataclass
class Card:
    """One row on the page. `turns`: (role, text); `images`: data URLs, or None for one that cannot be shown; `videos`:
    the places of those that are strips of a video's frames."""

    name: str
    outcome: str
    flaws: list[str]
    """CUT_OFF, REPETITION, UNPARSED: what an answered row may be beside its outcome."""
    turns: list[tuple[str, str]] = field(default_factory=list)
    images: list[str | None] = field(default_factory=list)
    videos: set[int] = field(default_factory=set)
    num_more_images: int = 0
    answers: list[tuple[str, str, list[tuple[str, str]]]] = field(default_factory=list)
    """(reasoning, content, its fields where it is a JSON object) of each completion."""
    expected: str | None = None
    error: str | None = None
    note: str = ""


@dataclass(frozen=True)
class _Image:
    """A task: the image `url` is to stand on this card in this place."""

    card: int
    place: int
    url: str
    is_video: bool


@dataclass
class _Counts:
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, outcome: str, flaws: list[str], kind: str | None) -> None:
        self.outcomes.update((outcome, *flaws))
        if kind is not None and (kind in self.kinds or len(self.kinds) < _MAX_KINDS):
            self.kinds.setdefault(kind, Counter())[outcome] += 1


def write_report(
    target: Place,
    file: InputFile | None,
    rows: InputScan | None,
    outputs: Sequence[Path],
    *,
    thumbnails: ThumbnailMaker,
    worker: PoolLimits,
    max_rows: int,
    max_row_bytes: int,
    has_schema: bool = False,
) -> None:
    """Write the page. Of a huge job it shows `max_rows` rows, those with flaws first, and says so.

    `file` and `rows`: the input, None where it is not there. `outputs`: the file of answers, and that of failed rows
    behind it, where there is one. `has_schema`: the job has one for rows that say nothing of their answer. `worker`
    bounds what decodes images; of rows above `max_row_bytes` the answer alone is shown. Raises JobError, whatever goes
    wrong: no answer is touched.
    """
    missing = f"No answer in {outputs[0]} is affected; the report alone is missing"
    try:
        with target.late_errors():
            joined = _Joined(file, outputs, rows, max_row_bytes, has_schema)
            cards, counts = _cards(joined, thumbnails, worker, max_rows)
            page = _page(cards, counts, joined.num_rows, outputs[0].name)
            with target.writing() as page_file:
                # "replace": it shows rows that were refused for half a surrogate pair, which no file can hold.
                page.dump(page_file, encoding="utf-8", errors="replace")
    except JobError as error:
        raise JobError(f"{error}. {missing}") from error
    except Exception as error:  # the border where a fault of the page becomes a reported failure
        raise JobError(f"{target.title}: cannot be made ({type(error).__name__}: {error}). {missing}") from error


def make_report(
    place: Place, options: BatchOptions, max_source_pixels: int, file: InputFile | None, rows: InputScan | None,
    outputs: Sequence[Path], *, has_schema: bool,
) -> None:  # fmt: skip
    """The page of a job's output, with a worker process that decodes its images. See `write_report`."""
    worker = PoolLimits(
        num_workers=1,
        task_timeout_seconds=options.workers.preprocessing_timeout,
        worker_memory_bytes=options.workers.worker_memory_bytes,
    )
    write_report(
        place, file, rows, outputs, worker=worker, max_rows=options.report_rows,
        thumbnails=ThumbnailMaker(options.allowed_media_dir, max_source_pixels, options.workers.max_media_bytes),
        max_row_bytes=options.max_row_bytes, has_schema=has_schema,
    )  # fmt: skip


def _cards(
    joined: _Joined, thumbnails: ThumbnailMaker, worker: PoolLimits, max_rows: int
) -> tuple[list[Card], _Counts]:
    cards: list[Card] = []
    counts, chosen = _choose(joined, max_rows)
    _fill_in(cards, _lay_out(joined, np.sort(chosen), cards), thumbnails, worker)
    cards.sort(key=lambda card: _rank(card.outcome, card.flaws))  # stable: input order within each rank
    return cards, counts


def _page(cards: list[Card], counts: _Counts, num_rows: int, output: str) -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("report.html.jinja").stream(
        cards=cards,
        counts=counts.outcomes,
        kinds=sorted(counts.kinds.items()),
        num_rows=num_rows,
        num_expected=counts.outcomes[EXPECTED] + counts.outcomes[UNEXPECTED],
        output=output,
    )


def _lay_out(joined: _Joined, places: np.ndarray, cards: list[Card]) -> Iterator[_Image]:
    """Append a card for each row to `cards` on the way; yields the images that they lack yet."""
    for request, answer in joined.pairs(places):
        card, urls = _card(request, answer, joined.has_schema)
        cards.append(card)
        for place, url in enumerate(urls):
            yield _Image(len(cards) - 1, place, url, place in card.videos)


def _fill_in(cards: list[Card], images: Iterator[_Image], thumbnails: ThumbnailMaker, worker: PoolLimits) -> None:
    """Let a worker make the images. One that cannot be made, or takes the worker with it, stays None."""
    num_pending = 0
    with WorkerPool(_OfImage(thumbnails), worker) as pool:
        while True:
            while num_pending < _MAX_PENDING and (image := next(images, None)) is not None:
                pool.submit(image)
                num_pending += 1
            if not num_pending:  # all rows are looked at by now
                return
            finished = pool.get(1.0)
            if finished is not None:
                num_pending -= 1
                if isinstance(finished.result, str):
                    cards[finished.task.card].images[finished.task.place] = finished.result


@dataclass(frozen=True)
class _OfImage:
    thumbnails: ThumbnailMaker

    def __call__(self, image: _Image) -> str | None:
        return self.thumbnails.strip(image.url) if image.is_video else self.thumbnails(image.url)


class _Joined:
    """The rows of the input beside their answers in the output, read where they stand; without an input, answers."""

    def __init__(self, file: InputFile | None, outputs: Sequence[Path], rows: InputScan | None, max_row_bytes: int,
                 has_schema: bool):
        self.has_schema = has_schema
        self._file = file
        self._outputs = outputs
        self._max_row_bytes = max_row_bytes
        scans = [scan_output(output) for output in outputs]
        keys = _keys_of(scans) if rows is None else rows.keys
        self.num_rows = len(keys)
        self._starts = np.zeros(len(keys), dtype=np.int64)
        self._output_of = np.full(len(keys), -1, dtype=np.int8)
        for number, scan in enumerate(scans):
            found = rows_in_order(scan, keys)
            here = np.flatnonzero(found >= 0)
            self._starts[here] = scan.starts[found[here]]
            self._output_of[here] = number
        self.places = np.flatnonzero(self._output_of >= 0)
        """Numbers of the rows that have an answer."""

    def pairs(self, places: np.ndarray) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Request and result of these rows, in order; an unreadable request is empty."""
        wanted = np.zeros(len(self._starts), dtype=bool)
        wanted[places] = True
        rows: Iterable[RawRow | None] = itertools.repeat(None, len(places))
        with ExitStack() as opened:
            answers = [opened.enter_context(open(output, "rb")) for output in self._outputs]
            for place, row in zip(places, rows if self._file is None else self._file.rows(wanted), strict=True):
                yield self._request(row), read_row(answers[self._output_of[place]], int(self._starts[place]))

    def _request(self, row: RawRow | None) -> dict[str, Any]:
        if self._file is None or row is None:
            return {"body": {"messages": [{"role": "input", "content": _NO_INPUT}]}}
        if row.num_bytes > self._max_row_bytes:
            return {}
        try:
            return read_json(self._file.source.read(row))
        except RequestError:
            return {}


def _keys_of(scans: list[OutputScan]) -> np.ndarray:
    """Each row once: a job that was killed while it moved failed rows leaves some in both files."""
    first = scans[0].keys
    return np.concatenate([first, *(scan.keys[~np.isin(scan.keys, first)] for scan in scans[1:])])


def _choose(joined: _Joined, max_rows: int) -> tuple[_Counts, np.ndarray]:
    counts = _Counts()
    first: list[list[int]] = [[] for _ in _ORDER]
    for place, (request, answer) in zip(joined.places, joined.pairs(joined.places), strict=True):
        outcome, flaws = _outcome(request, answer), _flaws(request, answer, joined.has_schema)
        kind = _metadata(request).get("kind")
        counts.add(outcome, flaws, None if kind is None else str(kind)[:80])
        same = first[_rank(outcome, flaws)]
        if len(same) < max_rows:
            same.append(int(place))
    chosen = [place for same in first for place in same][:max_rows]
    return counts, np.array(chosen, dtype=np.int64)


def _rank(outcome: str, flaws: list[str]) -> int:
    """Where a row stands on the page: by the first that it is."""
    return min(map(_ORDER.index, (outcome, *flaws)))


def _outcome(request: dict[str, Any], answer: dict[str, Any]) -> str:
    if answer["error"] is not None:
        return FAILED
    expected = _metadata(request).get("expected")
    if expected is None or "choices" not in answer["response"]["body"]:
        return ANSWERED
    return EXPECTED if is_as_expected(_texts(answer)[0], str(expected)) else UNEXPECTED


def _flaws(request: dict[str, Any], answer: dict[str, Any], has_schema: bool) -> list[str]:
    """What the job counts of an answered row beside its outcome. Prompts of token ids have no text that an echo could
    be told by."""
    body = answer["response"]["body"]  # without choices: it failed, or its answer is vectors
    flaws = [flaw for flaw, is_so in ((CUT_OFF, is_cut_off), (REPETITION, is_repetition)) if is_so(body)]
    asked = request.get("body", {})
    if not body.get("choices") or not asks_for_json(asked, has_rule_of_job=has_schema):
        return flaws
    echo = asked["prompt"] if asked.get("echo") else ""
    if isinstance(echo, str) and not all(is_json(text.removeprefix(echo)) for text in _texts(answer)):
        flaws.append(UNPARSED)
    return flaws


def _metadata(request: dict[str, Any]) -> dict[str, Any]:
    body = request.get("body")
    metadata = body.get("metadata") if isinstance(body, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _texts(answer: dict[str, Any]) -> list[str]:
    return texts_of(answer["response"]["body"])


def _reasonings(answer: dict[str, Any]) -> list[str]:
    """One for each text."""
    choices = answer["response"]["body"].get("choices")
    if choices is None:
        return [""] * len(_texts(answer))
    return [choice.get("message", {}).get("reasoning_content") or "" for choice in choices]


def _card(request: dict[str, Any], answer: dict[str, Any], has_schema: bool) -> tuple[Card, list[str]]:
    """The card of a row, and what its images are called, which are all None on it yet."""
    error = answer["error"]
    expected = _metadata(request).get("expected")
    card = Card(
        name=answer["custom_id"] or f"line {error['line']}",
        outcome=_outcome(request, answer),
        flaws=_flaws(request, answer, has_schema),
        expected=None if expected is None else str(expected)[:_MAX_TEXT],
    )
    if error is not None:
        card.error = f"{error['code']}: {error['message']}"[:_MAX_TEXT]
    else:
        body = answer["response"]["body"]
        pairs = zip(_reasonings(answer), _texts(answer), strict=True)
        card.answers = [(reasoning[:_MAX_TEXT], text[:_MAX_TEXT], fields_of(text)) for reasoning, text in pairs]
        num_tokens = body["usage"].get("completion_tokens", body["usage"]["prompt_tokens"])
        words = {CUT_OFF: "cut off at the limit", REPETITION: "repeats itself", UNPARSED: "not JSON"}
        card.note = ", ".join([f"{num_tokens} tokens", *map(words.__getitem__, card.flaws)])
    body = request.get("body")
    asked = body if isinstance(body, dict) else {}
    messages = asked.get("messages", sides_of(asked, _MOST_SIDES) or [
        {"role": "prompt", "content": asked.get("prompt", asked.get("input"))}])
    urls: list[str] = []
    for message in messages if isinstance(messages, list) else []:
        _add_message(card, message, urls)
    card.num_more_images = max(0, len(urls) - _MAX_THUMBNAILS_PER_ROW)
    del urls[_MAX_THUMBNAILS_PER_ROW:]
    card.images = [None] * len(urls)
    return card, urls


def _add_message(card: Card, message: Any, urls: list[str]) -> None:
    """Rows that failed may hold anything at all here."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = []
    for part in parts if isinstance(parts, list) else []:
        if not isinstance(part, dict):
            continue
        if isinstance(part.get("text"), str):
            texts.append(part["text"])
        for name in ("image_url", "video_url"):
            url = part.get(name)
            if isinstance(url, dict) and isinstance(url.get("url"), str):
                card.videos |= {len(urls)} if name == "video_url" else set()
                urls.append(url["url"])
    if texts:
        card.turns.append((str(message.get("role"))[:20], "\n".join(texts)[:_MAX_TEXT]))


def fields_of(text: str) -> list[tuple[str, str]]:
    """(name, value) of each field, a value that is no text as JSON; none where the text is no object, or too long."""
    if not text.lstrip().startswith("{"):
        return []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # cut off at its limit, or text that only begins so
        return []
    if not isinstance(value, dict) or len(value) > _MOST_FIELDS:
        return []
    return [(name[:_MOST_CHARS], _shown(item)) for name, item in value.items()]


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} ..."
