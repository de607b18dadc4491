"""Decodes the images and videos of the report, small, in a worker process. Knows nothing of where they are put.

An image that kills its worker, or takes too long, cannot be shown. A thumbnail takes less memory than the model's own
image: JPEG is decoded at an eighth of its sides where that is enough, and an image above 50 megapixels is not shown.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.image_formats import open_encoded
from npu_runner.prompts.media.images import open_image
from npu_runner.prompts.media.media import Addresses, MediaRules, load_media
from npu_runner.prompts.media.pages import OpenDocuments
from npu_runner.prompts.media.videos import VideoFile
from npu_runner.reports.cards import Medium
from npu_runner.reports.priority import lower_session
from npu_runner.request.limits import LIMITS
from npu_runner.serving.workers.pool import PoolLimits, WorkerPool

FRAMES = 6
"""The frames of a video that stand on one sheet."""
MAX_DECODED_PIXELS = 50_000_000
MAX_BYTES = 32 << 20
"""The size that all images of a page are made for; in base64 they take a third more."""
_LARGEST_SIDE, _SMALLEST_SIDE = 1024, 160
_BYTES_PER_PIXEL = 0.15  # a photograph at this quality, measured; drawings take less
_QUALITY = 82
_SHEET_COLUMNS = 3
_MAX_PENDING = 64  # tasks that the worker has


def side_for(num_images: int) -> int:
    """Pixels of the longer side, so that this number of photographs of 4 to 3 takes about MAX_BYTES."""
    pixels = MAX_BYTES / max(1, num_images) / _BYTES_PER_PIXEL
    return int(min(_LARGEST_SIDE, max(_SMALLEST_SIDE, math.sqrt(pixels * 4 / 3))))


@dataclass(frozen=True)
class ThumbnailMaker:
    """Makes a small JPEG of a medium; None if it cannot be shown. Picklable."""

    allowed_media_dir: Path | None
    max_source_pixels: int
    """The job refused an image that declares more pixels, and so does the page, ..."""
    max_media_bytes: int = LIMITS.max_media_bytes
    """... and one whose file is larger."""
    side: int = 360
    """Most pixels of the longer side."""

    def __call__(self, medium: Medium) -> bytes | None:
        lower_session()
        try:
            image = self._sheet(medium) if medium.is_video else self._image(medium)
        except RequestError:
            return None
        image.thumbnail((self.side, self.side), Image.Resampling.LANCZOS)
        encoded = io.BytesIO()
        image.save(encoded, "JPEG", quality=_QUALITY)
        return encoded.getvalue()

    def _sheet(self, medium: Medium) -> Image.Image:
        return _sheet(load_media(medium.url, self.allowed_media_dir, max_bytes=self.max_media_bytes), self.side)

    def _image(self, medium: Medium) -> Image.Image:
        rules = MediaRules(allowed_dir=self.allowed_media_dir, max_bytes=self.max_media_bytes)
        address = {**json.loads(medium.options), "url": medium.url}
        media = Addresses(rules).media({"type": "image_url", "image_url": address}, "")
        assert media is not None, "it has an address"
        data, _ = _documents().load_image(media, min(MAX_DECODED_PIXELS, self.max_source_pixels))
        if isinstance(data, Image.Image):
            return data
        small = _opened_small(data, self.max_source_pixels, 2 * self.side)
        return open_image(data if small is None else small, max_source_pixels=MAX_DECODED_PIXELS)


@functools.cache
def _documents() -> OpenDocuments:
    return OpenDocuments()


def _sheet(data: bytes, side: int) -> Image.Image:
    """Frames from the first to the last, in rows."""
    with VideoFile(data) as file:
        indices = np.linspace(0, file.num_frames - 1, min(FRAMES, file.num_frames)).round().astype(int).tolist()
        frames = []
        for pixels_HWC in file.frames(indices):
            frames.append(Image.fromarray(np.ascontiguousarray(pixels_HWC)))
            frames[-1].thumbnail((side // 2, side // 2), Image.Resampling.LANCZOS)
    width, height = frames[0].size
    columns = min(_SHEET_COLUMNS, len(frames))
    sheet = Image.new("RGB", (width * columns, height * math.ceil(len(frames) / columns)))
    for number, frame in enumerate(frames):
        sheet.paste(frame, (number % columns * width, number // columns * height))
    return sheet


def _opened_small(data: bytes, max_source_pixels: int, side: int) -> Image.Image | None:
    """The header of an image whose decoder can reduce it while it decodes; None if the decoder cannot."""
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


class ThumbnailPool:
    """Entered while the page is written. The worker process starts with the first medium."""

    def __init__(self, thumbnails: ThumbnailMaker, limits: PoolLimits):
        self._thumbnails, self._limits = thumbnails, limits
        self._pool: WorkerPool[Medium] | None = None
        self._entered = ExitStack()

    def __enter__(self) -> ThumbnailPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def make(self, media: Iterator[Medium]) -> dict[str, str]:
        """Data URLs by the keys of the media, each different one decoded once; one that cannot be shown is missing."""
        tasks, num_pending = iter({medium.key: medium for medium in media}.values()), 0
        found: dict[str, str] = {}
        while True:
            while num_pending < _MAX_PENDING and (task := next(tasks, None)) is not None:
                self._open_pool().submit(task)
                num_pending += 1
            if not num_pending:
                return found
            finished = self._open_pool().get(1.0)
            if finished is not None:
                num_pending -= 1
                if isinstance(finished.result, bytes):
                    encoded = base64.b64encode(finished.result).decode("ascii")
                    found[finished.task.key] = f"data:image/jpeg;base64,{encoded}"

    def _open_pool(self) -> WorkerPool[Medium]:
        if self._pool is None:
            self._pool = self._entered.enter_context(WorkerPool(self._thumbnails, self._limits))
        return self._pool
