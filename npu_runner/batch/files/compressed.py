"""Tells compressed files from rows by their first bytes. Knows nothing of rows."""

from __future__ import annotations

from npu_runner.errors import ConfigError

NUM_BYTES = 6
"""Of a file's beginning that say what it is."""
# Name, first bytes, and the command that writes the content to standard output. No line of JSON begins so.
_KINDS = (
    ("gzip", b"\x1f\x8b\x08", "gunzip -c"),
    ("zstd", b"\x28\xb5\x2f\xfd", "unzstd -c"),
    ("xz", b"\xfd7zXZ\x00", "xz -dc"),
    ("zip", b"PK\x03\x04", "unzip -p"),
)


def refuse_compressed(name: str, head: bytes) -> None:
    """Raises ConfigError for an input that begins with `head` as a compressed file does. `name`: the input's, or -."""
    for kind, beginning, command in _KINDS:
        if head.startswith(beginning):
            file = "FILE" if name == "-" else name
            raise ConfigError(f"input {name}: it is {kind}, and rows are read as they are; unpack it: "
                              f"{command} {file} > rows.jsonl")
