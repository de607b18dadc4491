"""Small images and frames of videos for the report, each different one decoded once, in a worker process. Knows nothing
of where they are put. What kills the worker, or keeps it too long, is a picture that cannot be shown.

A thumbnail takes less than the model's own image: JPEG is decoded at an eighth of its size where that is enough, and
what would still be larger than 50 megapixels is not shown.
"""

from __future__ import annotations

import hashlib
import io
import math
import warnings
from collections.abc import Container, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.image_formats import open_encoded
from npu_runner.prompts.media.images import open_image
from npu_runner.prompts.media.media import load_media
from npu_runner.prompts.media.video_files import VideoFile
from npu_runner.reports.reading import Medium
from npu_runner.request.limits import LIMITS
from npu_runner.serving.workers.pool import PoolLimits, WorkerPool

FRAMES = 6
"""Of a video, on one sheet."""
MAX_DECODED_PIXELS = 50_000_000
_LARGEST_SIDE, _SMALLEST_SIDE = 1024, 160
_BYTES_PER_PIXEL = 0.15  # of a photograph at this quality, measured; drawings take less
_QUALITY = 82
_SHEET_COLUMNS = 3
_MAX_PENDING = 64  # on their way to the worker and back


class Picture(NamedTuple):
    """A JPEG."""

    data: bytes
    width: int
    height: int


def side_for(num_pictures: int, num_bytes: int) -> int:
    """Pixels of the longer side, so that so many photographs of 4 to 3 take about `num_bytes`. Never fewer than can be
    made out, so very many of them take more."""
    pixels = num_bytes / max(1, num_pictures) / _BYTES_PER_PIXEL
    return int(min(_LARGEST_SIDE, max(_SMALLEST_SIDE, math.sqrt(pixels * 4 / 3))))


@dataclass(frozen=True)
class ThumbnailMaker:
    """The image behind a URL, small; None when it cannot be shown. Picklable."""

    allowed_media_dir: Path | None
    max_source_pixels: int
    """An image that declares more was refused by the job and is not opened here either, ..."""
    max_media_bytes: int = LIMITS.max_media_bytes
    """... nor one whose file is larger."""
    side: int = 360
    """Most pixels of the longer side."""

    def __call__(self, url: str) -> Picture | None:
        try:
            image = self._open(self._load(url))
        except RequestError:
            return None
        image.thumbnail((self.side, self.side), Image.Resampling.LANCZOS)
        return _encoded(image)

    def sheet(self, url: str) -> Picture | None:
        """The same of a video: some of its frames, from the first to the last, in rows."""
        try:
            return _encoded(_sheet(self._load(url), self.side))
        except RequestError:
            return None

    def _load(self, url: str) -> bytes:
        return load_media(url, self.allowed_media_dir, max_bytes=self.max_media_bytes)

    def _open(self, data: bytes) -> Image.Image:
        small = _opened_small(data, self.max_source_pixels, 2 * self.side)
        return open_image(data if small is None else small, max_source_pixels=MAX_DECODED_PIXELS)


def _encoded(image: Image.Image) -> Picture:
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=_QUALITY)
    return Picture(encoded.getvalue(), image.width, image.height)


def _sheet(data: bytes, side: int) -> Image.Image:
    """Frames are half of `side` at most: on a sheet there are several."""
    with VideoFile(data) as file:
        indices = np.linspace(0, file.num_frames - 1, min(FRAMES, file.num_frames)).round().astype(int).tolist()
        frames = []
        for pixels_HWC in file.frames(indices):
            frames.append(Image.fromarray(np.ascontiguousarray(pixels_HWC)))
            frames[-1].thumbnail((side // 2, side // 2), Image.Resampling.LANCZOS)
    width, height = frames[0].size
    columns = min(_SHEET_COLUMNS, len(frames))
    sheet = Image.new("RGB", (width * columns, height * math.ceil(len(frames) / columns)))
    for place, frame in enumerate(frames):
        sheet.paste(frame, (place % columns * width, place // columns * height))
    return sheet


def _opened_small(data: bytes, max_source_pixels: int, side: int) -> Image.Image | None:
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
    return image if image.draft("RGB", (side, side)) is not None else None


def key_of(medium: Medium) -> str:
    """Stands for a medium whose URL may hold megabytes."""
    kind = "video" if medium.is_video else "image"
    return hashlib.blake2b(f"{kind} {medium.url}".encode("utf-8", "replace"), digest_size=12).hexdigest()


@dataclass(frozen=True)
class _OfMedium:
    thumbnails: ThumbnailMaker

    def __call__(self, task: tuple[str, Medium]) -> Picture | None:
        _, medium = task
        return self.thumbnails.sheet(medium.url) if medium.is_video else self.thumbnails(medium.url)


class PictureMaker:
    """Entered while pages are made. The worker process starts with the first medium."""

    def __init__(self, thumbnails: ThumbnailMaker, worker: PoolLimits):
        self._make = _OfMedium(thumbnails)
        self._worker = worker
        self._pool: WorkerPool[tuple[str, Medium]] | None = None
        self._entered = ExitStack()

    def __enter__(self) -> PictureMaker:
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def make(self, media: Iterator[Medium], known: Container[str] = ()) -> dict[str, Picture]:
        """By `key_of`, but those that are `known`; what cannot be shown is left out."""
        found: dict[str, Picture] = {}
        tasks, num_pending = self._different(media, known), 0
        while True:
            while num_pending < _MAX_PENDING and (task := next(tasks, None)) is not None:
                self._open_pool().submit(task)
                num_pending += 1
            if not num_pending:  # all are looked at by now
                return found
            finished = self._open_pool().get(1.0)
            if finished is not None:
                num_pending -= 1
                if isinstance(finished.result, Picture):
                    found[finished.task[0]] = finished.result

    @staticmethod
    def _different(media: Iterator[Medium], known: Container[str]) -> Iterator[tuple[str, Medium]]:
        seen: set[str] = set()
        for medium in media:
            key = key_of(medium)
            if key not in seen and key not in known:
                seen.add(key)
                yield key, medium

    def _open_pool(self) -> WorkerPool[tuple[str, Medium]]:
        if self._pool is None:
            self._pool = self._entered.enter_context(WorkerPool(self._make, self._worker))
        return self._pool
