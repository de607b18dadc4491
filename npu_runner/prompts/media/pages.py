"""Loads the image behind an address: a page of a document, or an image file, with the options of the address.

The documents of the last rows stay open, because neighbouring rows show pages of one document. Knows no prompts.
"""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, BinaryIO

from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.document_files import (
    Document,
    RenderedPage,
    document_version,
    open_document,
    reading,
)
from npu_runner.prompts.media.file_kinds import HEAD_BYTES, document_kind, image_kind, video_kind
from npu_runner.prompts.media.image_formats import several_pages
from npu_runner.prompts.media.images import open_image
from npu_runner.prompts.media.media import Media, bounded
from npu_runner.prompts.media.pdf_fonts import fonts_here
from npu_runner.request.limits import field_error
from npu_runner.request.prompt_inputs import PageFacts

_MOST_OPEN = 4
_MOST_KEPT_PIXELS = 3500 * 3500
"""A larger page is rendered for each part of it."""
_BLANK_RANGE = 8
"""The most levels between the pixels of a blank page, in each colour."""


class OpenDocuments:
    """Used by a processor; not picklable. A file that was replaced or changed is opened again."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[object, ...], Document] = OrderedDict()
        self._page: tuple[object, RenderedPage] | None = None
        """The last page of which a part was shown, because neighbouring rows show parts of one page."""
        self._lock = threading.RLock()

    def load_image(self, media: Media, max_pixels: int) -> tuple[bytes | Image.Image, PageFacts | None]:
        """The image of an address, and its facts if it is a page or has options; else the bytes of the file. Raises
        RequestError naming the field."""
        source = media.load() if media.is_inline else media.open()
        try:
            if isinstance(source, bytes):
                kind = document_kind(source[:HEAD_BYTES])
                if kind == "PDF":
                    raise RequestError("a PDF in a data: URL is not read; write it to a file below the allowed folder, "
                                       "and name that with #page=1", "image_not_recognised")
                if kind == "TIFF" and media.options.page is not None:
                    with self._lock, open_document(io.BytesIO(source)) as document:
                        return self._page_of(document, (object(),), media, max_pixels)
                return _part_of(source, media, max_pixels)
            with self._lock:
                return self._load_file(source, media, max_pixels)
        except RequestError as error:
            raise field_error(media.where, f"{media.name}{error.message}", error.code) from error

    def _load_file(self, file: BinaryIO, media: Media,
                   max_pixels: int) -> tuple[bytes | Image.Image, PageFacts | None]:
        """As `load_image`; the file is closed, or belongs to an open document."""
        status = os.fstat(file.fileno())
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, media.password)
        if key in self._open:
            file.close()
            self._open.move_to_end(key)
        else:
            try:
                with reading():
                    kind = document_kind(file.read(HEAD_BYTES), media.url)
                    if kind is None:
                        if media.options.version is not None:
                            _check_version(media, document_version(file))
                        file.seek(0)
                        data = file.read(min(status.st_size, media.rules.max_bytes + 1))
                        return _part_of(bounded(data, media.rules.max_bytes), media, max_pixels)
            except BaseException:
                file.close()
                raise
            self._open[key] = open_document(file, password=media.password, name=media.url)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)[1].close()
        try:
            return self._page_of(self._open[key], key, media, max_pixels)
        except RequestError as error:
            if error.code == "media_unreadable":  # the document has parts that were not read
                self._open.pop(key).close()
            raise

    def _page_of(self, document: Document, key: tuple[object, ...], media: Media,
                 max_pixels: int) -> tuple[Image.Image, PageFacts]:
        options = media.options
        if options.version is not None:
            _check_version(media, document.version)
        if options.page is None and document.num_pages > 1:
            raise several_pages(f"{document.kind} file")
        if options.dpi is not None and document.kind != "PDF":
            raise _contradicted("dpi: the page of a PDF is rendered at it", document.kind)
        named = (key, replace(options, box=None, rotate=None))
        if self._page is None or self._page[0] != named:
            self._page = None  # its memory is free before another page is rendered
            whole = document.render((options.page or 1) - 1, options, max_pixels)
            if options.box is not None and whole.image.width * whole.image.height <= _MOST_KEPT_PIXELS:
                self._page = (named, whole)
        else:
            whole = self._page[1]
        image = options.part_of(whole.image)
        # They are known: a page was rendered with them.
        return image, _facts(image, whole.has_text, fonts_here().renderer if document.kind == "PDF" else None)


def _part_of(data: bytes, media: Media, max_pixels: int) -> tuple[bytes | Image.Image, PageFacts | None]:
    """The part of an image that is no document."""
    options, kind = media.options, image_kind(data[:HEAD_BYTES]) or video_kind(data[:HEAD_BYTES]) or "no PDF"
    if options.dpi is not None:
        raise _contradicted("dpi: the page of a PDF is rendered at it", kind)
    if options.page is not None:
        raise _contradicted("page: an image has no pages, a PDF or a TIFF file has", kind)
    if not options.changes_pixels:
        return data, None
    image = options.part_of(options.resized(open_image(data, max_source_pixels=max_pixels), max_pixels))
    return image, _facts(image, None)


def _facts(image: Image.Image, has_text: bool | None, renderer: Mapping[str, str] | None = None) -> PageFacts:
    ranges: Any = image.getextrema()
    is_blank = all(highest - lowest <= _BLANK_RANGE for lowest, highest in ranges)
    return PageFacts(is_blank=is_blank, width=image.width, height=image.height, has_text=has_text, renderer=renderer)


def _check_version(media: Media, version: str) -> None:
    if media.options.version != version:
        raise RequestError(f"the file is not the one that the row was made of: its version is {version}, the row's "
                           f"{media.options.version}; put the file back, or make the rows again", "document_changed")


def _contradicted(field: str, kind: str) -> RequestError:
    """`field`: its name and its use. `npu-runner rows` adds it where a file is named as a document."""
    return RequestError(f"{field}, and the content of this file is {kind}, whatever its name; give the file the suffix "
                        f"of its content and make the rows again, or leave {field.partition(':')[0]} out of a row made "
                        "by hand", "invalid_value")
