"""Small images of a row for the report, decoded in a worker process. Knows nothing of rows.

A thumbnail takes less than the model's own image: JPEG is decoded at an eighth of its size where that is enough, and
what would still be larger than 50 megapixels is not shown.
"""

from __future__ import annotations

import base64
import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.image_formats import open_encoded
from npu_runner.prompts.media.images import open_image
from npu_runner.prompts.media.media import load_media
from npu_runner.prompts.media.video_files import VideoFile
from npu_runner.request.limits import LIMITS

SIDE = 360
FRAMES = 6  # of a video, at half the side
MAX_DECODED_PIXELS = 50_000_000


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
