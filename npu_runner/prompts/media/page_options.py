"""The fields of an image's address that choose a page, its size, a part of it and its rotation. Knows no files.

The order is fixed: the size at `dpi`, at most `longest`, at least `shortest`, `box`, `rotate`, `size`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.file_kinds import DOCUMENT_SUFFIXES
from npu_runner.request.limits import field_error

# W, H sides of an image, in pixels

DEFAULT_DPI = 150
DEFAULT_LONGEST = 3500
"""Pixels of the longer side of a PDF's page, where the address names no other."""
_MAX_SIDE = 65_500
_CLOCKWISE = {90: Image.Transpose.ROTATE_270, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_90}
_POINTS_PER_INCH = 72
_PAGE = re.compile(r"#page=([0-9]{1,9})\Z")
_MOST_PAGE_CHARS = len("#page=") + 9


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_side(value: Any) -> bool:
    return _is_whole(value) and 1 <= value <= _MAX_SIDE


def _are(values: Any, count: int, is_one: Callable[[Any], bool]) -> bool:
    is_list = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
    return is_list and len(values) == count and all(map(is_one, values))


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "page": (lambda page: _is_whole(page) and page >= 1, "a page's number, from 1,"),
    "dpi": (lambda dpi: _is_number(dpi) and 18 <= dpi <= 600, "a number from 18 to 600"),
    "longest": (_is_side, f"a number of pixels from 1 to {_MAX_SIDE}"),
    "shortest": (_is_side, f"a number of pixels from 1 to {_MAX_SIDE}"),
    "box": (lambda box: _are(box, 4, _is_number) and 0 <= box[0] < box[2] <= 1 and 0 <= box[1] < box[3] <= 1,
            "[x0, y0, x1, y1] with 0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1"),
    "rotate": (lambda degrees: _is_whole(degrees) and degrees in (0, *_CLOCKWISE),
               "90, 180 or 270 (degrees, clockwise)"),
    "size": (lambda size: _are(size, 2, _is_side), f"[width, height] in pixels, each from 1 to {_MAX_SIDE},"),
    "version": (lambda text: isinstance(text, str) and re.fullmatch("[0-9a-f]{32}", text) is not None,
                "a digest of 32 hexadecimal digits"),
}
"""Each field's predicate of its values, and their words."""


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """None: the address does not set the field. Hashable."""

    page: int | None = None
    """From 1."""
    dpi: float | None = None
    longest: int | None = None
    shortest: int | None = None
    box: tuple[float, ...] | None = None
    """Left, top, right and bottom, from 0 to 1 of the upright page."""
    rotate: int | None = None
    """Degrees, clockwise."""
    size: tuple[int, ...] | None = None
    version: str | None = None
    """`document_version` of the file that is meant."""

    @classmethod
    def from_fields(cls, given: Mapping[str, Any], where: str) -> PageOptions:
        """Reads the known fields of `given`. Raises RequestError naming the field below `where`."""
        found = {name: value for name in _FIELDS if (value := given.get(name)) is not None}
        for name, value in found.items():
            accepts, needed = _FIELDS[name]
            if not accepts(value):
                raise field_error(f"{where}.{name}", f"{needed} is needed, not {str(value)[:60]}")
        lists: dict[str, Any] = {name: tuple(found[name]) for name in ("box", "size") if name in found}
        return cls(**{**found, **lists})

    @property
    def changes_pixels(self) -> bool:
        return any(each is not None for each in (self.longest, self.shortest, self.box, self.rotate, self.size))

    def size_of_points(self, width: float, height: float, max_pixels: int) -> tuple[int, int]:
        """Pixels of a page of so wide and high points, before `box`. Raises RequestError for more than `max_pixels`."""
        scale = (self.dpi or DEFAULT_DPI) / _POINTS_PER_INCH
        return self._fit(width, height, scale, self.longest or DEFAULT_LONGEST, max_pixels)

    def size_of_pixels(self, width: int, height: int, max_pixels: int) -> tuple[int, int]:
        """As `size_of_points`, of an image that has pixels."""
        return self._fit(width, height, 1.0, self.longest or _MAX_SIDE * _MAX_SIDE, max_pixels)

    def _fit(self, width: float, height: float, scale: float, longest: int, max_pixels: int) -> tuple[int, int]:
        """Rounded up, as pypdfium2 does."""
        # Each scale is a factor and a divisor, so that the side that an option names has exactly its pixels.
        shortest, largest = (self.shortest or 0, min(width, height)), (longest, max(width, height))
        factor, divisor = min(max((scale, 1.0), shortest, key=_ratio), largest, key=_ratio)
        columns, rows = (
            min(max(1, math.ceil(factor if side == divisor else side * factor / divisor)), longest)
            for side in (width, height))
        for across, down in ((columns, rows), self.size or (1, 1)):
            if across * down > max_pixels:
                raise RequestError(f"the page would have {across}x{down} pixels, more than the {max_pixels} allowed "
                                   "(max_source_pixels); lower dpi, longest or shortest", "image_too_large")
        return columns, rows

    def box_of(self, width: int, height: int) -> tuple[int, int, int, int]:
        """`box` in whole pixels of an image of this size: rounded outwards, one pixel at least."""
        x0, y0, x1, y1 = self.box or (0.0, 0.0, 1.0, 1.0)
        left, top = min(math.floor(x0 * width), width - 1), min(math.floor(y0 * height), height - 1)
        return left, top, max(math.ceil(x1 * width), left + 1), max(math.ceil(y1 * height), top + 1)

    def resized(self, image: Image.Image, max_pixels: int) -> Image.Image:
        """An upright image at its size before `box`. Raises RequestError for more than `max_pixels`."""
        size = self.size_of_pixels(*image.size, max_pixels)
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)

    def part_of(self, image: Image.Image) -> Image.Image:
        """The part of a page that `box` names, with `rotate` and `size`."""
        if self.box is not None:
            image = image.crop(self.box_of(*image.size))
        if self.rotate:
            image = image.transpose(_CLOCKWISE[self.rotate])
        return image if self.size in (None, image.size) else image.resize(
            (self.size[0], self.size[1]), Image.Resampling.BICUBIC)


AS_IT_IS = PageOptions()


def split_page(url: str) -> tuple[str, int] | None:
    """The address of a document and the number of the page behind it; None: the address names no page."""
    found = _PAGE.search(url, max(1, len(url) - _MOST_PAGE_CHARS))  # an address may have megabytes
    if found is None:
        return None
    document = url[: found.start()]
    is_one = document[-5:].lower().endswith(DOCUMENT_SUFFIXES) or document.lstrip()[:5].lower() == "data:"
    return (document, int(found[1])) if is_one else None


def pages_in(value: Any) -> Iterator[tuple[str, int]]:
    """The pages of documents in the JSON of a request, as (document, page). Knows them by their addresses' names."""
    if isinstance(value, list):
        for each in value:
            yield from pages_in(each)
    elif isinstance(value, dict) and value.get("type") != "image_url":
        for each in value.values():
            yield from pages_in(each)
    elif isinstance(value, dict):
        given = value.get("image_url")
        url, page = (given.get("url"), given.get("page")) if isinstance(given, dict) else (given, None)
        if isinstance(url, str) and (found := split_page(url)) is not None:
            url, page = found
        if isinstance(url, str) and url[-5:].lower().endswith(DOCUMENT_SUFFIXES):
            yield url, page if isinstance(page, int) else 1


def _ratio(scale: tuple[float, float]) -> float:
    return scale[0] / scale[1]
