"""Images as bytes, also written by hand."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def photo(width: int = 60, height: int = 40) -> Image.Image:
    """A smooth image with something different in every corner."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), (x + y) % 256]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, *, bits: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    """A PNG file written by hand, whatever it claims."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def tiff_of_kinds(*kinds: int, big: bool = False) -> bytes:
    """A page of each of these NewSubfileTypes, the first in red. Pillow before 11.3 writes the kind of the first alone,
    and one page of a BigTIFF."""
    (entry, end), size = ("<HHQQ", "<Q") if big else ("<HHLL", "<L"), 32 * 32 * 3
    data = bytearray(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 16) if big else struct.pack("<2sHL", b"II", 42, 8))
    for number, kind in enumerate(kinds):
        tags = {254: kind, 256: 32, 257: 32, 258: 8, 259: 1, 262: 2, 273: 0, 277: 3, 278: 32, 279: size}
        head = struct.pack("<Q" if big else "<H", len(tags))
        pixels_at = len(data) + len(head) + len(tags) * struct.calcsize(entry) + struct.calcsize(end)
        tags[273] = pixels_at
        data += head + b"".join(struct.pack(entry, tag, 4, 1, value) for tag, value in tags.items())
        data += struct.pack(end, 0 if number == len(kinds) - 1 else pixels_at + size)
        data += Image.new("RGB", (32, 32), ("red", "blue", "lime")[number]).tobytes()
    return bytes(data)
