"""Compressed inputs: known by their first bytes, unpacked into a file where rows can be read anywhere.

Knows nothing of rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, Protocol

from npu_runner.errors import ConfigError

NUM_HEAD_BYTES = 6
# A piece of what is packed; a piece of zstd may be 30,000 times as large unpacked.
_PIECE_BYTES = 4096


class _Broken(Exception):
    """What a library says of data that it cannot unpack."""


@dataclass(frozen=True)
class Packing:
    """A format of compressed files. `command` writes the content to standard output; `library` is None where only that
    unpacks it."""

    name: str
    first_bytes: bytes
    command: str
    library: Callable[[], _Library] | None = None


class Target(Protocol):
    """The file that receives the unpacked bytes."""

    def write(self, piece: bytes, /) -> object: ...


class _Library(NamedTuple):
    """`make` makes an object with `decompress`, `eof` and `unused_data` for one member of a file; `error`: what it
    raises where the data are broken."""

    make: Callable[[], Any]
    error: type[Exception]


def _gzip() -> _Library:
    return _Library(lambda: zlib.decompressobj(wbits=31), zlib.error)


def _zstd() -> _Library:
    """Python's own from 3.14 on, before that the package of the extra `zstd`."""
    try:
        from compression.zstd import ZstdDecompressor, ZstdError
    except ModuleNotFoundError:
        import zstandard

        return _Library(lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
                        zstandard.ZstdError)
    return _Library(ZstdDecompressor, ZstdError)


# No line of JSON begins with any of these.
_PACKINGS = (
    Packing("gzip", b"\x1f\x8b\x08", "gunzip -c", _gzip),
    Packing("zstd", b"\x28\xb5\x2f\xfd", "unzstd -c", _zstd),
    Packing("xz", b"\xfd7zXZ\x00", "xz -dc"),
    Packing("zip", b"PK\x03\x04", "unzip -p"),
)


def packing_of(head: bytes) -> Packing | None:
    """Of a file that begins with `head`, at least NUM_HEAD_BYTES of it; None: it is not compressed."""
    return next((packing for packing in _PACKINGS if head.startswith(packing.first_bytes)), None)


def unpack(packing: Packing, source: BinaryIO, target: Target, name: str) -> None:
    """Write what `source` holds to `target`. `name`: what messages call the source, or - for standard input.

    Raises ConfigError where it is broken or cut short, and for a format that is not unpacked here.
    """
    remedy = f"unpack it: {packing.command} {'FILE' if name == '-' else name} > rows.jsonl"
    if packing.library is None:
        raise ConfigError(f"input {name}: it is {packing.name}, and compressed inputs may be gzip or zstd; {remedy}")
    try:
        library = packing.library()
    except ModuleNotFoundError as error:
        raise ConfigError(f"input {name}: it is {packing.name}, and {error.name} is not installed; pip install "
                          f"{error.name}, or {remedy}") from error
    try:
        for piece in _pieces(library, source):
            target.write(piece)
    except _Broken as error:
        raise ConfigError(f"input {name}: it is {packing.name}, and {error}; write it again") from error


def _pieces(library: _Library, source: BinaryIO) -> Iterator[bytes]:
    """Members of a file follow one another; zeros behind the last one are padding."""
    member, is_begun, num_read = library.make(), False, 0
    while packed := source.read(_PIECE_BYTES):
        num_read += len(packed)
        packed = packed if is_begun else packed.lstrip(b"\0")
        while packed:
            try:
                yield member.decompress(packed)
            except library.error as error:
                raise _Broken(f"its data are broken, within its first {num_read} bytes ({error})") from error
            is_begun, packed = True, b""
            if member.eof:
                packed = member.unused_data.lstrip(b"\0")
                member, is_begun = library.make(), False
    if is_begun:
        raise _Broken(f"it ends too early, after {num_read} bytes")
