"""The addresses of images and videos in rows, which a job finds below its --allowed-media-dir.

Bytes that are embedded in records become files there, once, under a name made of their content. Nothing is written
outside of that folder: names are hashes, and no link is followed. Knows nothing of prompts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

from npu_runner.batch.files.durable import clear_file_errors, folder_below, replacing, sync_files, sync_folder
from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.media.file_kinds import image_kind, video_kind
from npu_runner.prompts.media.media import load_media
from npu_runner.request.limits import LIMITS

_ENDINGS = {"JPEG": "jpg", "JPEG 2000": "jp2", "TIFF": "tif", "HEIC or AVIF": "heic", "MP4 or MOV": "mp4",
            "Matroska or WebM": "mkv"}
NUM_CHECKED = 16


class MediaFolder:
    """`root`: the folder in which addresses start. `is_named`: the user named it, so embedded images may go there."""

    def __init__(self, root: str, *, is_named: bool):
        self.root = os.path.abspath(root)
        self.is_used = False
        """Some address leads to a file in it."""
        self.num_written = 0
        self.missing: list[str] = []
        """The missing ones among the first paths that records name."""
        self._num_checked = 0
        self._is_named = is_named
        self._used: set[str] = set()
        """Folders below the root with embedded images of these rows."""

    def address(self, path: str) -> str:
        """The path of a file below the root, or a file:// URL where the path would be read as something else. Raises
        ConfigError for a file that lies elsewhere."""
        self.is_used = True
        name = os.path.relpath(path, self.root)
        if name.split(os.sep)[0] == os.pardir:
            raise ConfigError(f"{path!r}: does not lie below --media-dir {self.root!r}, which the job will read; leave "
                              "that out, or name a folder above both")
        return name if _is_plain(name) else "file://" + quote_from_bytes(os.fsencode(os.path.join(self.root, name)))

    def addresses(self, value: Any, where: str) -> Iterator[str]:
        """The addresses in a cell: a path, a data: URL, bytes, a file of Hugging Face's datasets, or a list of these.
        None has no address. Raises ConfigError for any other value."""
        if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
            value = value["path"] if value["bytes"] is None else value["bytes"]
        if value is None or value == "":
            return
        if isinstance(value, (list, tuple)):
            for item in value:
                yield from self.addresses(item, where)
        elif isinstance(value, bytes):
            yield self._written(value, where)
        elif not isinstance(value, str):
            raise ConfigError(f"{where}: holds a {type(value).__name__}; a path, a data: URL or bytes are needed")
        elif value[:5].lower() == "data:":
            yield self._written(_decoded(value, where), where) if self._is_named else value
        else:
            self.is_used = True
            if self._num_checked < NUM_CHECKED and _is_plain(value) and "\0" not in value:
                self._num_checked += 1
                if not os.path.exists(os.path.join(self.root, value)):
                    self.missing.append(value)
            yield value

    def missing_line(self) -> str:
        """Empty where none of the first files is missing."""
        if not self.missing:
            return ""
        return (f"{len(self.missing)} of the first {self._num_checked} files that records name are not below "
                f"{self.root}, as {self.missing[0]!r}; the job looks for them below its --allowed-media-dir, so name "
                "their folder with --media-dir")

    def sync(self) -> None:
        """Embedded images and their names are on disk when this returns. The folders that rows name are synced whole,
        with the files of an earlier command: a killed one syncs nothing."""
        with clear_file_errors(f"media_dir {self.root}"):
            for part in sorted(self._used):
                sync_files(Path(self.root, part))
            if self._used:
                sync_folder(Path(self.root))

    def _written(self, data: bytes, where: str) -> str:
        if not self._is_named:
            raise ConfigError(f"{where}: holds the bytes of an image; name a folder for such images with --media-dir")
        if len(data) > LIMITS.max_media_bytes:
            raise ConfigError(f"{where}: has {len(data)} bytes, at most {LIMITS.max_media_bytes} are allowed; scale it "
                              "down")
        self.is_used = True
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        name = f"{digest[2:]}.{_ending(data)}"
        with clear_file_errors(f"media_dir {self.root}"), folder_below(self.root, [digest[:2]]) as folder:
            self._used.add(digest[:2])
            if not _is_there(folder, name, data):
                # By the open folder, since its name may be replaced by now. Another command may write the same image.
                with replacing(Path(f"/proc/self/fd/{folder}", name), is_synced=False, waits=True) as file:
                    file.write(data)
                self.num_written += 1
        return f"{digest[:2]}/{name}"


def _is_plain(name: str) -> bool:
    """Whether the address is read as this path."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return name[:5].lower() not in ("data:", "file:") and "://" not in name


def _decoded(url: str, where: str) -> bytes:
    try:
        return load_media(url, None)
    except RequestError as error:
        raise ConfigError(f"{where}: {error.message}") from error


def _ending(data: bytes) -> str:
    kind = image_kind(data[:32]) or video_kind(data[:32]) or "bin"
    return _ENDINGS.get(kind, kind.lower())


def _is_there(folder: int, name: str, data: bytes) -> bool:
    """Whether the whole file is there: a power cut may have left less under the name."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        return os.fstat(descriptor).st_size == len(data) and file.read(len(data)) == data
