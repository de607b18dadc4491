"""One self-contained HTML page over a job's answers: made for looking. Knows nothing of the engine.

Reads the output and the input again, a row at a time, so it shows resumed rows as well and holds only what is shown.
Images are decoded in a worker process: what kills it there is an image that cannot be shown. A thumbnail takes less
than the model's own image: JPEG is decoded at an eighth of its size where that is enough, and what would still be
larger than 50 megapixels is not shown.
"""

from __future__ import annotations

import base64
import io
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from npu_runner.batch.files.destination import Destination
from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.output_file import read_row, rows_in_order, scan_output
from npu_runner.batch.files.place import Place
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.summary import is_as_expected
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.batch.rows.openai_response import texts_of
from npu_runner.errors import JobError, RequestError
from npu_runner.prompts.media.image_formats import open_encoded
from npu_runner.prompts.media.images import open_image
from npu_runner.prompts.media.media import load_media
from npu_runner.prompts.media.video_files import VideoFile
from npu_runner.request.limits import LIMITS
from npu_runner.serving.replica import RawRow
from npu_runner.serving.workers.pool import PoolLimits, WorkerPool

_MAX_THUMBNAILS_PER_ROW = 8
_MAX_TEXT = 4000
_MAX_PENDING = 64  # images on their way to a worker and back
_MAX_KINDS = 40
_MOST_FIELDS = 60
_MOST_CHARS = 400
SIDE = 360
FRAMES = 6  # of a video, at half the side
MAX_DECODED_PIXELS = 50_000_000

FAILED, UNEXPECTED, EXPECTED, ANSWERED = "failed", "unexpected", "expected", "answered"
_ORDER = (FAILED, UNEXPECTED, EXPECTED, ANSWERED)


@dataclass
class Card:
    """One row on the page. `turns`: (role, text); `images`: data URLs, or None for one that cannot be shown; `videos`:
    the places of those that are strips of a video's frames."""

    name: str
    outcome: str
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

    def add(self, outcome: str, kind: str | None) -> None:
        self.outcomes[outcome] += 1
        if kind is not None and (kind in self.kinds or len(self.kinds) < _MAX_KINDS):
            self.kinds.setdefault(kind, Counter())[outcome] += 1


def write_report(
    target: Place,
    file: InputFile,
    rows: InputScan,
    output: Path,
    *,
    errors: Path | None = None,
    thumbnails: ThumbnailMaker,
    worker: PoolLimits,
    max_rows: int,
    max_row_bytes: int,
) -> None:
    """Write the page. Of a huge job it shows `max_rows` rows, failed and unexpected ones first, and says so.

    `errors`: the file of failed rows, if there is one beside the `output`. `worker` bounds what decodes images; of
    rows above `max_row_bytes` the answer alone is shown. Raises JobError, whatever goes wrong: the answers are all
    there by now.
    """
    try:
        with target.late_errors():
            outputs = [output] if errors is None else [output, errors]
            cards, counts = _cards(_Joined(file, outputs, rows, max_row_bytes), thumbnails, worker, max_rows)
            page = _page(cards, counts, rows.num_rows, output.name)
            with target.writing() as page_file:
                # "replace": it shows rows that were refused for half a surrogate pair, which no file can hold.
                page.dump(page_file, encoding="utf-8", errors="replace")
    except JobError as error:
        raise JobError(f"{error}. The answers are complete in {output}; the report alone is missing") from error
    except Exception as error:  # the border where a fault of the page becomes a reported failure
        raise JobError(
            f"{target.title}: cannot be made ({type(error).__name__}: {error}). The answers are complete in {output}; "
            "the report alone is missing"
        ) from error


def make_report(
    place: Place, options: BatchOptions, max_source_pixels: int, file: InputFile, rows: InputScan,
    destination: Destination,
) -> None:  # fmt: skip
    """The page of a job's output, with a worker process that decodes its images."""
    assert destination.path is not None, "refused at the start"
    worker = PoolLimits(
        num_workers=1,
        task_timeout_seconds=options.workers.preprocessing_timeout,
        worker_memory_bytes=options.workers.worker_memory_bytes,
    )
    write_report(
        place, file, rows, destination.path, errors=destination.error_path, worker=worker,
        max_rows=options.report_rows,
        thumbnails=ThumbnailMaker(options.allowed_media_dir, max_source_pixels, options.workers.max_media_bytes),
        max_row_bytes=options.max_row_bytes,
    )  # fmt: skip


def _cards(
    joined: _Joined, thumbnails: ThumbnailMaker, worker: PoolLimits, max_rows: int
) -> tuple[list[Card], _Counts]:
    cards: list[Card] = []
    counts, chosen = _choose(joined, max_rows)
    _fill_in(cards, _lay_out(joined.pairs(np.sort(chosen)), cards), thumbnails, worker)
    cards.sort(key=lambda card: _ORDER.index(card.outcome))  # stable: input order within each outcome
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


def _lay_out(pairs: Iterator[tuple[dict[str, Any], dict[str, Any]]], cards: list[Card]) -> Iterator[_Image]:
    """Append a card for each row to `cards` on the way; yields the images that they lack yet."""
    for request, answer in pairs:
        card, urls = _card(request, answer)
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
    """The rows of the input beside their answers in the output, read where they stand."""

    def __init__(self, file: InputFile, outputs: Sequence[Path], rows: InputScan, max_row_bytes: int):
        self._file = file
        self._outputs = outputs
        self._max_row_bytes = max_row_bytes
        self._starts = np.zeros(rows.num_rows, dtype=np.int64)
        self._output_of = np.full(rows.num_rows, -1, dtype=np.int8)
        for number, output in enumerate(outputs):
            scan = scan_output(output)
            found = rows_in_order(scan, rows.keys)
            here = np.flatnonzero(found >= 0)
            self._starts[here] = scan.starts[found[here]]
            self._output_of[here] = number
        self.places = np.flatnonzero(self._output_of >= 0)
        """Numbers of the rows that have an answer."""

    def pairs(self, places: np.ndarray) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Request and result of these rows, in order; an unreadable request is empty."""
        wanted = np.zeros(len(self._starts), dtype=bool)
        wanted[places] = True
        with ExitStack() as opened:
            answers = [opened.enter_context(open(output, "rb")) for output in self._outputs]
            for place, row in zip(places, self._file.rows(wanted), strict=True):
                yield self._request(row), read_row(answers[self._output_of[place]], int(self._starts[place]))

    def _request(self, row: RawRow) -> dict[str, Any]:
        if row.num_bytes > self._max_row_bytes:
            return {}
        try:
            return read_json(self._file.source.read(row))
        except RequestError:
            return {}


def _choose(joined: _Joined, max_rows: int) -> tuple[_Counts, np.ndarray]:
    counts = _Counts()
    first: dict[str, list[int]] = {outcome: [] for outcome in _ORDER}
    for place, (request, answer) in zip(joined.places, joined.pairs(joined.places), strict=True):
        outcome = _outcome(request, answer)
        kind = _metadata(request).get("kind")
        counts.add(outcome, None if kind is None else str(kind)[:80])
        if len(first[outcome]) < max_rows:
            first[outcome].append(int(place))
    chosen = [place for outcome in _ORDER for place in first[outcome]][:max_rows]
    return counts, np.array(chosen, dtype=np.int64)


def _outcome(request: dict[str, Any], answer: dict[str, Any]) -> str:
    if answer["error"] is not None:
        return FAILED
    expected = _metadata(request).get("expected")
    if expected is None or "choices" not in answer["response"]["body"]:
        return ANSWERED
    return EXPECTED if is_as_expected(_texts(answer)[0], str(expected)) else UNEXPECTED


def _metadata(request: dict[str, Any]) -> dict[str, Any]:
    body = request.get("body")
    metadata = body.get("metadata") if isinstance(body, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _texts(answer: dict[str, Any]) -> list[str]:
    return texts_of(answer["response"]["body"])


def _reasonings(answer: dict[str, Any]) -> list[str]:
    body = answer["response"]["body"]
    return [item.get("message", {}).get("reasoning_content") or "" for item in body.get("choices", body.get("data"))]


def _card(request: dict[str, Any], answer: dict[str, Any]) -> tuple[Card, list[str]]:
    """The card of a row, and what its images are called, which are all None on it yet."""
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
        pairs = zip(_reasonings(answer), _texts(answer), strict=True)
        card.answers = [(reasoning[:_MAX_TEXT], text[:_MAX_TEXT], fields_of(text)) for reasoning, text in pairs]
        is_cut = any(choice["finish_reason"] == "length" for choice in body.get("choices", []))
        num_tokens = body["usage"].get("completion_tokens", body["usage"]["prompt_tokens"])
        card.note = f"{num_tokens} tokens" + (", cut off at the limit" if is_cut else "")
    body = request.get("body")
    asked = body if isinstance(body, dict) else {}
    messages = asked.get("messages", [{"role": "prompt", "content": asked.get("prompt", asked.get("input"))}])
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


@dataclass(frozen=True)
class ThumbnailMaker:
    """A data: URL of the image behind a URL; None when it cannot be shown. Picklable."""

    allowed_media_dir: Path | None
    max_source_pixels: int
    """An image that declares more was refused by the job and is not opened here either, ..."""
    max_media_bytes: int = LIMITS.max_media_bytes
    """... nor one whose file is larger."""

    def __call__(self, url: str) -> str | None:
        try:
            image = self._open(self._load(url))
        except RequestError:
            return None
        image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        return _as_url(image)

    def strip(self, url: str) -> str | None:
        """The same of a video: a strip of its frames."""
        try:
            return _as_url(_strip(self._load(url)))
        except RequestError:
            return None

    def _load(self, url: str) -> bytes:
        return load_media(url, self.allowed_media_dir, max_bytes=self.max_media_bytes)

    def _open(self, data: bytes) -> Image.Image:
        small = _opened_small(data, self.max_source_pixels)
        return open_image(data if small is None else small, max_source_pixels=MAX_DECODED_PIXELS)


def _as_url(image: Image.Image) -> str:
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(encoded.getvalue()).decode("ascii")


def _strip(data: bytes) -> Image.Image:
    """Some of a video's frames side by side, from the first to the last."""
    with VideoFile(data) as file:
        indices = np.linspace(0, file.num_frames - 1, min(FRAMES, file.num_frames)).round().astype(int).tolist()
        frames = []
        for pixels_HWC in file.frames(indices):
            frames.append(Image.fromarray(np.ascontiguousarray(pixels_HWC)))
            frames[-1].thumbnail((SIDE // 2, SIDE // 2), Image.Resampling.LANCZOS)
    width = frames[0].width
    strip = Image.new("RGB", (width * len(frames), frames[0].height))
    for place, frame in enumerate(frames):
        strip.paste(frame, (place * width, 0))
    return strip


def _opened_small(data: bytes, max_source_pixels: int) -> Image.Image | None:
    """The header of an image whose decoder can make it smaller on the way; None of one whose decoder cannot."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own bomb warning: our limit is checked right after
            image = open_encoded(data, max_source_pixels)
    except RequestError:
        raise
    except Exception:  # noqa: BLE001 - hostile bytes raise anything: open_image names it
        return None
    if image.width * image.height > max_source_pixels:
        raise RequestError("more pixels than max_source_pixels", code="image_too_large")
    return image if image.draft("RGB", (2 * SIDE, 2 * SIDE)) is not None else None
