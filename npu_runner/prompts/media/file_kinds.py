"""Names what a file is by its first bytes, for messages: an image in a video's field, a video in an image's.

Knows nothing of what can be decoded; a decoder has the word before.
"""

from __future__ import annotations

from typing import Literal

GIF = "GIF"
Kind = Literal["PDF", "TIFF"]
DOCUMENT_SUFFIXES = (".pdf", ".tif", ".tiff")
HEAD_BYTES = 1024
"""The mark of a PDF lies in the first bytes, as far as this."""
_IMAGES = {
    b"\x89PNG": "PNG", b"\xff\xd8": "JPEG", b"GIF8": GIF, b"II*\0": "TIFF", b"MM\0*": "TIFF",
    b"\0\0\1\0": "ICO", b"BM": "BMP", b"\0\0\0\x0cjP  ": "JPEG 2000", b"\xff\x4f\xff\x51": "JPEG 2000"}
_VIDEOS = {
    b"\x1aE\xdf\xa3": "Matroska or WebM", b"OggS": "Ogg", b"FLV\1": "FLV", b"0&\xb2u": "ASF", b"\0\0\1\xba": "MPEG"}
_IMAGE_BRANDS = (b"hei", b"hev", b"mif", b"msf", b"mia", b"avi", b"avc", b"crx")
_QUICKTIME = (b"moov", b"mdat", b"wide")


def image_kind(head: bytes) -> str | None:
    """The kind of an image file by its first bytes, 12 or more."""
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WebP"
    if head[4:8] == b"ftyp":
        return "HEIC or AVIF" if _is_image_brand(head) else None
    return next((name for magic, name in _IMAGES.items() if head.startswith(magic)), None)


def video_kind(head: bytes) -> str | None:
    """The kind of a video file by its first bytes, 12 or more."""
    if head.startswith(b"RIFF") and head[8:12] == b"AVI ":
        return "AVI"
    if head[4:8] in _QUICKTIME or (head[4:8] == b"ftyp" and not _is_image_brand(head)):
        return "MP4 or MOV"
    return next((name for magic, name in _VIDEOS.items() if head.startswith(magic)), None)


def document_kind(head: bytes, name: str = "") -> Kind | None:
    """The kind of a document by its first bytes, `HEAD_BYTES` of them; None: it is none. A file with the suffix of a
    PDF, which is nothing else, is a PDF without its mark."""
    if head[:2] in (b"II", b"MM") and head[2:4] in (b"*\0", b"\0*", b"+\0", b"\0+"):
        return "TIFF"
    if image_kind(head) is not None or video_kind(head) is not None:
        return None
    return "PDF" if b"%PDF-" in head or name.lower().endswith(".pdf") else None


def _is_image_brand(head: bytes) -> bool:
    return head[8:11] in _IMAGE_BRANDS and head[8:12] != b"avc1"
