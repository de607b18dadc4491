"""Opens a PDF or a TIFF file and renders its pages. Knows no requests and no addresses.

pypdfium2 is imported with the first PDF. PDFium may be called by one thread at a time, so each call holds a lock.
A document reads its file while it is open, and only the parts that a page needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, ClassVar, Literal

from PIL import Image

from npu_runner.errors import RequestError
from npu_runner.prompts.media.file_kinds import HEAD_BYTES, Kind, document_kind
from npu_runner.prompts.media.image_formats import is_big_tiff, tiff_pages
from npu_runner.prompts.media.images import open_image, opening
from npu_runner.prompts.media.page_options import AS_IT_IS, PageOptions
from npu_runner.prompts.media.pdf_fonts import require_fonts
from npu_runner.request.limits import LIMITS

_VERSION_BYTES = 4096
PDFIUM_LOCK = threading.RLock()


@dataclass(frozen=True)
class RenderedPage:
    """`has_text`: the page has a text layer; None: its file's kind has none."""

    image: Image.Image
    has_text: bool | None


class Document(ABC):
    """An open document. Its methods raise RequestError: media_unreadable where the file cannot be read, else a code
    that names the document's or the page's fault. Pages are counted from 0."""

    kind: ClassVar[Kind]
    num_pages: int
    is_encrypted = False

    def __init__(self, file: BinaryIO):
        self._file = _File(file)

    @cached_property
    def version(self) -> str:
        with reading():
            return document_version(self._file.raw)

    @abstractmethod
    def size(self, index: int, options: PageOptions, max_pixels: int = 1 << 80) -> tuple[int, int]:
        """Width and height in pixels with these options, before `box`."""

    @abstractmethod
    def render(self, index: int, options: PageOptions = AS_IT_IS,
               max_pixels: int = LIMITS.max_source_pixels) -> RenderedPage:
        """The page as RGB, at its size before `box`. It is refused before it is rendered if it has more than
        `max_pixels`. `PageOptions.part_of` cuts a part out of it, because PDFium gives other pixels to letters and
        lines at the edge of a smaller bitmap."""

    def _check(self, index: int) -> None:
        """Raises RequestError for a page that is not there."""
        if not 0 <= index < self.num_pages:
            pages = "1 page" if self.num_pages == 1 else f"{self.num_pages} pages"
            raise RequestError(f"page {index + 1}: the document has {pages}", "pdf_page_missing")

    def close(self) -> None:
        self._file.raw.close()

    def __enter__(self) -> Document:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_document(file: BinaryIO, *, password: str | None = None, name: str = "") -> Document:
    """The document in a file, which it owns from now on. `name`: with the suffix of a PDF it is opened as one without a
    PDF's mark.

    Raises RequestError: pdf_broken, pdf_password, media_unreadable, an error of images for a TIFF file, and
    image_not_recognised for any other file.
    """
    try:
        with reading():
            file.seek(0)
            head = file.read(HEAD_BYTES)
        kind = document_kind(head, name)
        if kind == "PDF":
            return PdfDocument(file, password)
        if kind == "TIFF":
            return TiffDocument(file, head)
        raise RequestError("the file is neither a PDF nor a TIFF file", "image_not_recognised")
    except BaseException:
        file.close()
        raise


def document_version(file: Any) -> str:
    """Digest of a file's size, its first and its last 4 KiB, in hexadecimal digits."""
    num_bytes = file.seek(0, os.SEEK_END)
    digest = hashlib.blake2b(num_bytes.to_bytes(8, "little"), digest_size=16)
    for start in (0, max(0, num_bytes - _VERSION_BYTES)):
        file.seek(start)
        digest.update(file.read(_VERSION_BYTES))
    return digest.hexdigest()


class PdfDocument(Document):
    """A PDF."""

    kind = "PDF"

    def __init__(self, file: BinaryIO, password: str | None):
        super().__init__(file)
        try:
            import pypdfium2
        except ImportError as error:
            raise RequestError("the file is a PDF, and pypdfium2 is not installed here; pip install 'pypdfium2>=5.15'",
                               "image_not_recognised") from error
        self._pdfium, self._raw = pypdfium2, pypdfium2.raw
        with self._calls("pdf_broken", "the PDF cannot be opened; write it again, for instance with qpdf"):
            self._pdf = self._opened(password)
            self._pdf.init_forms()  # before any page is loaded: filled-in values are not rendered otherwise
            self.is_encrypted = self._raw.FPDF_GetSecurityHandlerRevision(self._pdf) != -1
            self.num_pages = len(self._pdf)

    def _opened(self, password: str | None) -> Any:
        """The password is tried only if the document does not open without one."""
        for given in dict.fromkeys((None, password)):
            # A document without pages loads, which leaves PDFium's last error as it was, and pypdfium2 reports that
            # one. A path that is not there sets an error that no document in an open file has.
            self._raw.FPDF_LoadDocument(b"", None)
            try:
                return self._pdfium.PdfDocument(self._file, password=given)
            except self._pdfium.PdfiumError as error:
                self._file.raise_error()
                if error.err_code == self._raw.FPDF_ERR_FILE:
                    raise RequestError("the PDF has no pages", "pdf_broken") from error
                if error.err_code != self._raw.FPDF_ERR_PASSWORD:
                    raise
        which = "needs a password" if password is None else "has another password than the given one"
        raise RequestError(f"the PDF {which}; name it in the file of --pdf-passwords (pdf_passwords)", "pdf_password")

    def size(self, index: int, options: PageOptions, max_pixels: int = 1 << 80) -> tuple[int, int]:
        self._check(index)
        with self._calls_for(index):
            width, height = self._pdf.get_page_size(index)
        if not (math.isfinite(width * height) and min(width, height) > 0):
            raise RequestError(f"page {index + 1} of the PDF has no size ({width:g} x {height:g} points)",
                               "pdf_page_broken")
        return options.size_of_points(width, height, max_pixels)

    def render(self, index: int, options: PageOptions = AS_IT_IS,
               max_pixels: int = LIMITS.max_source_pixels) -> RenderedPage:
        width, height = self.size(index, options, max_pixels)
        with self._calls_for(index):
            page = self._pdf[index]
            try:
                has_text = self._has_text(page)
                bitmap = self._pdfium.PdfBitmap.new_native(width, height, self._raw.FPDFBitmap_BGR)
                bitmap.fill_rect((255, 255, 255, 255), 0, 0, width, height)
                # Not the helper of pypdfium2: it takes a scale, and this size is exact.
                arguments = (bitmap, page, 0, 0, width, height, 0, self._raw.FPDF_ANNOT)
                self._raw.FPDF_RenderPageBitmap(*arguments)
                if self._pdf.formenv:
                    self._raw.FPDF_FFLDraw(self._pdf.formenv, *arguments)
                image = bitmap.to_pil()
                bitmap.close()
            finally:
                page.close()
        return RenderedPage(image, has_text)

    def _has_text(self, page: Any) -> bool:
        """Raises RequestError for text that would be missing in the image."""
        textpage = page.get_textpage()
        try:
            text = textpage.get_text_range()
            require_fonts(self._raw, textpage, text)
            return bool(text.strip())
        finally:
            textpage.close()

    def close(self) -> None:
        with PDFIUM_LOCK:
            self._pdf.close()
        super().close()

    @contextlib.contextmanager
    def _calls(self, code: str, what: str) -> Iterator[None]:
        """Calls of PDFium, whose failure is a RequestError with this code."""
        with PDFIUM_LOCK:
            try:
                yield
            except MemoryError as error:
                cannot = what.partition(";")[0]
                raise RequestError(f"{cannot}: it needs more memory than there is; lower dpi or longest",
                                   "image_out_of_memory") from error
            except (self._pdfium.PdfiumError, OverflowError, ValueError) as error:
                self._file.raise_error()
                raise RequestError(f"{what} ({error})"[:500], code) from error
            self._file.raise_error()

    def _calls_for(self, index: int) -> contextlib.AbstractContextManager[None]:
        return self._calls("pdf_page_broken", f"page {index + 1} of the PDF cannot be rendered")


class TiffDocument(Document):
    """A TIFF file, whose pages are its images. Reduced copies of a page, and masks, are none."""

    kind = "TIFF"

    def __init__(self, file: BinaryIO, head: bytes):
        super().__init__(file)
        self._head = head
        with self._reads():
            self._offsets = opening(lambda: list(tiff_pages(self._file)), head[:32], LIMITS.max_source_pixels)
            """Offsets of the directories of pages."""
        self.num_pages = len(self._offsets)

    def _open(self, index: int, max_pixels: int) -> Image.Image:
        """The page as the first one of the file: Pillow's own `seek` keeps the pixels of the last one."""
        self._check(index)
        order: Literal["little", "big"] = "little" if self._head[:2] == b"II" else "big"
        start, size = (8, 8) if is_big_tiff(self._head) else (4, 4)
        self._file.header = self._head[:start] + self._offsets[index].to_bytes(size, order)
        file: Any = self._file
        with self._reads():
            image: Image.Image = opening(lambda: Image.open(file, formats=["TIFF"]), self._head[:32], max_pixels)
            return image

    @contextlib.contextmanager
    def _reads(self) -> Iterator[None]:
        """A fault of the disk goes before the faults that Pillow then finds."""
        try:
            yield
        finally:
            self._file.raise_error()

    def size(self, index: int, options: PageOptions, max_pixels: int = 1 << 80) -> tuple[int, int]:
        return options.size_of_pixels(*self._open(index, max_pixels).size, max_pixels)

    def render(self, index: int, options: PageOptions = AS_IT_IS,
               max_pixels: int = LIMITS.max_source_pixels) -> RenderedPage:
        with self._reads():
            image = open_image(self._open(index, max_pixels), max_source_pixels=max_pixels)
        image.info = {}  # XMP that the orientation of the file's own tags overrides
        return RenderedPage(options.resized(image, max_pixels), None)


class _File:
    """A file that keeps its first error, which libraries hide. Reads give no bytes from then on."""

    def __init__(self, file: BinaryIO):
        self.raw = file
        self.header = b""
        """Bytes in place of the first ones."""
        self._error: OSError | None = None
        self.seek, self.tell, self.fileno = file.seek, file.tell, file.fileno

    def raise_error(self) -> None:
        if self._error is not None:
            raise _unreadable(self._error) from self._error

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read(self, num_bytes: int = -1) -> bytes:
        try:
            start, data = self.raw.tell(), b"" if self._error is not None else self.raw.read(num_bytes)
            return self.header[start : start + len(data)] + data[max(0, len(self.header) - start) :]
        except OSError as error:
            self._error = error
            return b""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unreadable(error) from error


def _unreadable(error: OSError) -> RequestError:
    return RequestError(f"the file cannot be read ({error.strerror or error})", "media_unreadable")
