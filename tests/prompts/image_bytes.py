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
