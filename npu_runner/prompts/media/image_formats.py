"""Opens the supported kinds of image files, with the settings that Pillow's decoders need. Knows nothing of pixels.

Plugins are imported by name: nothing outside this list ever sees the bytes. A declared size is bounded before decoding,
also in formats that contain another file (icons) or state their size twice (JPEG 2000, HEIC).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import struct
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import PIL
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    IcoImagePlugin,
    Image,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TgaImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from npu_runner.errors import RequestError

# None before Pillow 11.3. SUPPORTED is false where Pillow was built without AVIF.
_AVIF: Any = importlib.import_module("PIL.AvifImagePlugin") if find_spec("PIL.AvifImagePlugin") else None
READS_AVIF = _AVIF is not None and bool(_AVIF.SUPPORTED)
FORMATS = tuple(
    plugin.format
    for plugin in (
        PngImagePlugin.PngImageFile,
        JpegImagePlugin.JpegImageFile,  # also MPO, which phones write
        WebPImagePlugin.WebPImageFile,
        GifImagePlugin.GifImageFile,
        BmpImagePlugin.BmpImageFile,
        TiffImagePlugin.TiffImageFile,
        PpmImagePlugin.PpmImageFile,
        *([_AVIF.AvifImageFile] if READS_AVIF else []),
        Jpeg2KImagePlugin.Jpeg2KImageFile,
        IcoImagePlugin.IcoImageFile,
        TgaImagePlugin.TgaImageFile,  # the last: it has no mark of its own, only a header that makes sense
    )
)
_ICON = b"\0\0\1\0"
_CODESTREAM = b"\xff\x4f\xff\x51"
_PNG = b"\x89PNG\r\n\x1a\n"
_TEXTS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
# Texts of these names may say how an image is turned.
_TURNING_TEXTS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
_MAX_TURNING_BYTES = 1 << 16
_MAX_UNPACKED_BYTES = 1 << 20  # Pillow refuses a longer one
_SUBFILE_TYPE = 254  # TIFF's NewSubfileType, of bits
_REDUCED_OR_MASK = 1 | 4


def open_encoded(data: bytes | bytearray | memoryview, max_source_pixels: int) -> Image.Image:
    """The image with its header read and nothing decoded, but for an icon that is a bitmap. Raises RequestError for
    one that declares too much, and whatever Pillow raises."""
    head = bytes(data[:12])
    if head.startswith(_PNG):
        data = _without_texts(data)
    if head.startswith(_ICON):
        return _open_icon(bytes(data), max_source_pixels)
    if head[4:8] == b"jP  " or head.startswith(_CODESTREAM):
        _check_codestream(bytes(data), max_source_pixels)
    if is_heif(head):
        _check_extents(bytes(data), max_source_pixels)
    with _one_thread():
        image = Image.open(io.BytesIO(data), formats=[*FORMATS, *_heif_format(head)])
    if image.format == "TIFF":
        _check_pages(bytes(data))
    return image


def is_heif(head: bytes) -> bool:
    """Whether a file with these first bytes is of the family of HEIC and AVIF."""
    return head[4:8] == b"ftyp"


def missing_decoder(head: bytes) -> str | None:
    """The name of a format without an installed decoder, and the remedy; None for all other files."""
    if not is_heif(head):
        return None
    if head[8:11] == b"avi":
        remedy = f"this Pillow ({PIL.__version__}) does not read it, the wheels of 11.3 and newer do"
        return None if READS_AVIF else f"AVIF; {remedy}"
    return None if _heif_format(head) else "HEIC; pip install 'pillow-heif>=1.0' adds a decoder"


def check_pixels(width: int, height: int, max_source_pixels: int) -> None:
    """Raises RequestError for an image that is too large."""
    if width * height > max_source_pixels:
        raise RequestError(
            f"the image declares {width}x{height} pixels, more than the {max_source_pixels} allowed "
            f"(max_source_pixels); scale it down",
            code="image_too_large")


def _open_icon(data: bytes, max_source_pixels: int) -> Image.Image:
    """Pillow decodes icons as it opens them. The largest image in one is a PNG file, opened as any other, or a bitmap
    whose declared size is looked at first."""
    icon = IcoImagePlugin.IcoFile(io.BytesIO(data))
    if not icon.entry:
        raise SyntaxError("an icon without images")
    frame = data[icon.entry[0].offset:]
    if frame.startswith(b"\x89PNG"):
        return Image.open(io.BytesIO(_without_texts(frame)), formats=["PNG"])
    width, height = BmpImagePlugin.DibImageFile(io.BytesIO(frame)).size
    check_pixels(width, height // 2, max_source_pixels)  # a mask as high as the image lies behind it
    return Image.open(io.BytesIO(data), formats=["ICO"])


def _without_texts(data: bytes | bytearray | memoryview) -> bytes | bytearray | memoryview:
    """A PNG file without its texts and colour profile: Pillow would unpack them, and refuse the file for a large one.
    The texts that may turn the image stay, up to `_MAX_TURNING_BYTES`."""
    view, kept = memoryview(data), []
    begin = at = len(_PNG)
    room = _MAX_TURNING_BYTES
    while at + 12 <= len(view):
        length, kind = struct.unpack_from(">I4s", view, at)
        end = at + 12 + length
        if kind in _TEXTS and end <= len(view):
            text = bytes(view[at + 8 : end - 4]) if length <= room else b""
            if text.startswith(_TURNING_TEXTS) and _unpacks(kind, text):
                room -= length
            else:
                kept.append(view[begin:at])
                begin = end
        at = end
    return b"".join([_PNG, *kept, view[begin:]]) if begin > len(_PNG) else data


def _unpacks(kind: bytes, text: bytes) -> bool:
    """Whether this chunk's text is short once it is unpacked."""
    _, _, body = text.partition(b"\0")
    if kind == b"tEXt" or (kind == b"iTXt" and not body.startswith(b"\1")):
        return True
    packed = body[1:] if kind == b"zTXt" else body[2:].split(b"\0", 2)[-1]
    unpacker = zlib.decompressobj()
    try:
        unpacker.decompress(packed, _MAX_UNPACKED_BYTES)
    except zlib.error:
        return False
    return not unpacker.unconsumed_tail


def is_big_tiff(head: bytes) -> bool:
    """Whether the offsets in a TIFF file with these first bytes have 64 bits."""
    return head[2:4] in (b"+\0", b"\0+")


def tiff_pages(file: Any) -> Iterator[int]:
    """The offset of the directory of each page, from the first on. Reduced copies of a page, and masks, are none. Each
    step raises what Pillow raises."""
    file.seek(0)
    head = file.read(16)
    directory = TiffImagePlugin.ImageFileDirectory_v2(head if is_big_tiff(head) else head[:8])
    first, num_pages, seen = directory.next, 0, set[int]()
    while directory.next and directory.next not in seen:
        offset = file.seek(directory.next)
        seen.add(offset)
        directory.load(file)
        kind = directory.get(_SUBFILE_TYPE, 0)
        if not (isinstance(kind, int) and kind & _REDUCED_OR_MASK):
            num_pages += 1
            yield offset
    if first and not num_pages:
        yield first


def _check_pages(data: bytes) -> None:
    """TIFF, as faxes and scanners write it: one of several pages would be read, and the others never missed."""
    pages = tiff_pages(io.BytesIO(data))
    next(pages, None)
    if next(pages, None) is not None:
        raise several_pages("TIFF file")


def several_pages(what: str) -> RequestError:
    return RequestError(f"the {what} has several pages, and an image is one; name the page: #page=1 behind the "
                        "address, or the field page", code="image_several_pages")


def _check_codestream(data: bytes, max_source_pixels: int) -> None:
    """The container's size is what Pillow goes by, the codestream's what the decoder makes room for."""
    at = data.find(_CODESTREAM)
    if at >= 0 and len(data) >= at + 24:
        x1, y1, x0, y0 = struct.unpack_from(">4I", data, at + 8)
        check_pixels(max(0, x1 - x0), max(0, y1 - y0), max_source_pixels)


def _check_extents(data: bytes, max_source_pixels: int) -> None:
    """HEIC and AVIF: the image is often cut out of larger ones, which are decoded whole. All that the file's list of
    properties declares count."""
    meta = _box(data, b"meta")
    at = meta.find(b"ispe")
    while at >= 0 and len(meta) >= at + 16:
        width, height = struct.unpack_from(">II", meta, at + 8)
        check_pixels(width, height, max_source_pixels)
        at = meta.find(b"ispe", at + 4)


def _box(data: bytes, kind: bytes) -> bytes:
    """The content of the first box of this kind on the file's outermost level; empty if there is none."""
    at = 0
    while at + 8 <= len(data):
        size, found = struct.unpack_from(">I4s", data, at)
        if found == kind:
            return data[at : at + size] if size else data[at:]
        if size < 8:  # to the end of the file, or 64 bits long, which no box before this one is
            return b""
        at += size
    return b""


def _heif_format(head: bytes) -> tuple[str, ...]:
    """HEIF, where the optional package is installed; loaded for the first such file."""
    if not is_heif(head):
        return ()
    try:
        heif = importlib.import_module("pillow_heif")
    except ImportError:
        return ()
    heif.options.DECODE_THREADS = 1  # a worker has a core
    heif.register_heif_opener(thumbnails=False)
    return ("HEIF",)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """AVIF decoders take all cores otherwise; a worker process has one."""
    if _AVIF is None:
        yield
        return
    before = _AVIF.DEFAULT_MAX_THREADS
    _AVIF.DEFAULT_MAX_THREADS = 1
    try:
        yield
    finally:
        _AVIF.DEFAULT_MAX_THREADS = before
