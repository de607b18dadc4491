"""Images of AVIF, HEIF, ICO, JPEG 2000 and TGA, and small ones that declare many pixels."""

from __future__ import annotations

import struct
from typing import Any

import pillow_heif
from PIL import Image

from npu_runner.prompts.media.image_formats import READS_AVIF
from tests.prompts.image_bytes import encoded, photo, png

pillow_heif.register_heif_opener()
LOSSLESS: dict[str, dict[str, Any]] = {
    "AVIF": {"quality": 100, "subsampling": "4:4:4", "speed": 10}, "HEIF": {"quality": -1, "chroma": 444},
    "ICO": {"sizes": [(32, 32)]}, "JPEG2000": {"irreversible": False}, "TGA": {},
}  # fmt: skip
KINDS = [kind for kind in LOSSLESS if READS_AVIF or kind != "AVIF"]
BOXED = [kind for kind in ("AVIF", "HEIF") if kind in KINDS]


def made(image: Image.Image, kind: str, **options: Any) -> bytes:
    return encoded(image, kind, **{**LOSSLESS[kind], **options})


def in_boxes(data: bytes, box: bytes, width: int, height: int) -> bytes:
    """A file of boxes with other sizes in all boxes of this name, which begin with four bytes and the sizes."""
    changed, at = bytearray(data), data.find(box)
    assert at > 0
    while at >= 0:
        struct.pack_into(">II", changed, at + 8, width, height)
        at = data.find(box, at + 4)
    return bytes(changed)


def in_codestream(data: bytes, width: int, height: int) -> bytes:
    at = data.index(b"\xff\x4f\xff\x51")
    return data[: at + 8] + struct.pack(">II", width, height) + data[at + 16 :]


def icon(frame: bytes) -> bytes:
    return struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(frame), 22) + frame


def bitmap(width: int, height: int) -> bytes:
    return struct.pack("<IiiHHIIiiII", 40, width, 2 * height, 1, 32, 0, 0, 0, 0, 0, 0) + bytes(64)


def bombs(side: int) -> dict[str, bytes]:
    """Small files that declare `side` x `side` pixels somewhere."""
    jp2, targa = made(photo(), "JPEG2000"), bytearray(made(photo(), "TGA"))
    struct.pack_into("<HH", targa, 12, min(side, 65535), min(side, 65535))
    at = jp2.index(b"ihdr") + 4
    return {
        **{kind: in_boxes(made(photo(), kind), b"ispe", side, side) for kind in BOXED},
        "JP2 header": jp2[:at] + struct.pack(">II", side, side) + jp2[at + 8 :],
        "JP2 codestream": in_codestream(jp2, side, side),
        "codestream": in_codestream(made(photo(), "JPEG2000", no_jp2=True), side, side),
        "ICO of PNG": icon(png(side, side)),
        "ICO of a bitmap": icon(bitmap(side, side)),
        "TGA": bytes(targa),
    }
