"""Reads the bytes behind an address of an image or a video: inline data, or a file in the allowed folder.

An address may also name a page of the file.

Addresses are counted and measured first; each different one is then read once. Knows nothing of what the bytes are. No
network: a job reads only files that its owner put on this machine.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote_to_bytes, urlsplit

from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.media.allowed_folder import AllowedFolder, OutsideError
from npu_runner.prompts.media.file_kinds import DOCUMENT_SUFFIXES
from npu_runner.prompts.media.page_options import AS_IT_IS, PageOptions, split_page
from npu_runner.prompts.media.pdf_passwords import password_of, read_passwords
from npu_runner.request.limits import LIMITS, field_error

KINDS = {"image_url": "image", "video_url": "video", "image": "image", "video": "video"}
"""The types of parts with an image or a video, and the kind of each."""
DETAILS = (None, "auto", "high", "low")


@dataclass(frozen=True, kw_only=True)
class MediaRules:
    """Which addresses may be read, and how much behind them."""

    allowed_dir: Path | str | None = None
    max_bytes: int = LIMITS.max_media_bytes
    """The limit for one file or decoded data: URL."""
    max_total_bytes: int = LIMITS.max_prompt_media_bytes
    """The limit for all different files of a prompt. Documents are read in parts, and count in neither."""
    pdf_passwords: Mapping[str, str] = field(default_factory=dict, repr=False)
    """As `read_passwords` gives them."""

    def with_passwords(self, file: Path | str | None) -> MediaRules:
        """With the passwords in a file, if there is one. Raises ConfigError."""
        return replace(self, pdf_passwords=read_passwords(file))


@dataclass(frozen=True, kw_only=True)
class Media:
    """An image or a video that is still an address. `where`: the field that it stood in first."""

    url: str
    where: str
    rules: MediaRules
    detail: str | None = None
    """OpenAI's: "low" has few tokens."""
    options: PageOptions = AS_IT_IS
    """The page of a document, and the part and the size of an image."""

    def load(self) -> bytes:
        """Its bytes, read now. Raises RequestError naming the field, as `load_media` does."""
        with _named(self.where):
            return load_media(self.url, self.rules.allowed_dir, max_bytes=self.rules.max_bytes)

    @property
    def name(self) -> str:
        """The file's address, for messages; empty for a data: URL."""
        if self.is_inline:
            return ""
        return f"{_shown(self.url if self.options.page is None else f'{self.url}#page={self.options.page}')}: "

    @property
    def is_inline(self) -> bool:
        """Its bytes are in the address."""
        return self.url.strip()[:5].lower() == "data:"

    @property
    def password(self) -> str | None:
        """The password of the file, if it is a PDF that needs one."""
        return password_of(self.rules.pdf_passwords, self.url, self.rules.allowed_dir)

    @property
    def page(self) -> tuple[str, int] | None:
        """(document, page), if it seems to be one by its name."""
        is_one = self.options.page is not None or self.url[-5:].lower().endswith(DOCUMENT_SUFFIXES)
        return (self.url, self.options.page or 1) if is_one else None

    def open(self) -> BinaryIO:
        """The file, opened now. Raises RequestError naming the field, as `load_media` does."""
        with _named(self.where), _file(self.url, self.rules.allowed_dir) as (folder, path):
            return folder.open(path)

    def num_bytes(self) -> int:
        """The bytes that `load` gives, without reading a file; an upper bound for a data: URL. 0 for a document, of
        which parts are read, and for an image that is named like one: `load_image` bounds it."""
        rules = self.rules if self.page is None else replace(self.rules, max_bytes=sys.maxsize)
        with _named(self.where):
            num_bytes = _num_bytes(self.url, rules)
        return num_bytes if self.page is None else 0


def load_media(url: str, allowed_media_dir: Path | str | None, *, max_bytes: int = LIMITS.max_media_bytes) -> bytes:
    """The bytes behind a data: URL, a file:// URL or a plain path; a relative path starts at `allowed_media_dir`.

    Files must lie below `allowed_media_dir` once links are resolved; None refuses all files. Raises RequestError with
    code media_scheme, media_bad_data_url, media_not_allowed, media_missing, media_unreadable or media_too_large. Its
    message repeats the given address and the folder at most, never where a link leads or whether something outside
    exists.
    """
    kind, rest = _kind_of(url)
    if kind == "data":
        return _decode_data_url(rest, max_bytes)
    with _file(url, allowed_media_dir) as (folder, path):
        return bounded(folder.read(path, max_bytes + 1), max_bytes, _shown(rest))


def _kind_of(url: Any) -> tuple[str, str]:
    """("data", what follows the colon) or ("file", its path)."""
    if not isinstance(url, str):
        raise RequestError(f"a URL must be text, not {type(url).__name__}", code="invalid_type")
    if not url.isascii() and _has_lone_surrogate(url):
        raise RequestError("a URL must be valid Unicode", code="invalid_unicode")
    stripped = url.strip()  # a file's own name may begin with a space
    if stripped[:5].lower() == "data:":
        return "data", stripped[5:]
    if len(url) > LIMITS.max_path_chars:
        raise RequestError(
            f"the address has {len(url)} characters, a file's name at most {LIMITS.max_path_chars}: {_shown(url)}",
            code="media_unreadable")
    if stripped[:5].lower() == "file:":
        return "file", _path_of_file_url(stripped)
    if "://" in url:
        scheme = url.split("://", 1)[0][:20]
        raise RequestError(
            f"{scheme}:// addresses are not fetched; download them and give a path, or a data: URL", code="media_scheme"
        )
    return "file", url


def _num_bytes(url: str, rules: MediaRules) -> int:
    kind, rest = _kind_of(url)
    if kind == "data":
        return len(rest)
    with _file(url, rules.allowed_dir) as (folder, path):
        size = folder.num_bytes(path)
    if size > rules.max_bytes:
        raise _too_large(rules.max_bytes, _shown(rest))
    return size


def _with_page(url: str, options: PageOptions, where: str, rules: MediaRules) -> tuple[str, PageOptions]:
    """The address of a file without the page that it names, and `options` with this. A file of this literal name goes
    first."""
    found = split_page(url)
    if found is None:
        return url, options
    if url.strip()[:5].lower() not in ("file:", "data:"):
        with contextlib.suppress(RequestError), _file(url, rules.allowed_dir) as (folder, path):
            folder.num_bytes(path)
            return url, options
    named = PageOptions.from_fields({"page": found[1]}, where)
    if options.page not in (None, named.page):
        raise field_error(f"{where}.page", f"it is {options.page}, and the address names page {named.page}; give one")
    return found[0], replace(options, page=named.page)


class Addresses:
    """The images and videos of one request that are addresses. The same address is the same Media.

    Text may come from anywhere, so it is held to `rules`. A Path is made by a program alone: the file that it names is
    read wherever it lies.
    """

    def __init__(self, rules: MediaRules):
        self._rules = rules
        self._known: dict[tuple[str, str, str | None, PageOptions], Media] = {}

    def media(self, part: Mapping[str, Any], where: str) -> Media | None:
        """The image or video of a part of KINDS, not read yet; None where the part holds the image or video itself.
        Raises RequestError naming the field."""
        name = part["type"]
        value, where = part.get(name), f"{where}.{name}"
        if not name.endswith("_url") and not isinstance(value, (str, Path)):
            return None
        detail = value.get("detail") if isinstance(value, Mapping) else None
        if detail not in DETAILS if KINDS[name] == "image" else detail is not None:
            raise field_error(f"{where}.detail", f"{str(detail)[:40]!r} is not supported; of images low, high and auto "
                              "are", "unsupported_field")
        url, rules = value.get("url") if isinstance(value, Mapping) else value, self._rules
        if isinstance(url, Path):
            found = None if os.path.exists(url) else split_page(str(url))
            url = os.path.realpath(url) if found is None else f"{os.path.realpath(found[0])}#page={found[1]}"
            rules = replace(rules, allowed_dir=os.path.dirname(url))
        options = AS_IT_IS
        if isinstance(url, str) and KINDS[name] == "image":
            options = PageOptions.from_fields(value, where) if isinstance(value, Mapping) else options
            url, options = _with_page(url, options, where, rules)
        with _named(where):
            _kind_of(url)
        assert isinstance(url, str), "_kind_of has refused all else"
        low = detail if detail == "low" else None
        media = Media(url=url, where=where, rules=rules, detail=low, options=options)
        return self._known.setdefault((url, str(rules.allowed_dir), low, options), media)

    def check_sizes(self, where: str) -> None:
        """Raises RequestError for files that are missing or too large, before any of them is read. `where`: the field
        that has all of them."""
        total = sum({media.url: media.num_bytes() for media in self._known.values()}.values())
        if total > self._rules.max_total_bytes:
            raise field_error(where, f"the {len(self._known)} different images and videos have {total} bytes together, "
                              f"at most {self._rules.max_total_bytes} are allowed (max_prompt_media_bytes); scale them "
                              "down", "media_too_large")


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise field_error(where, error.message, error.code) from error


def _decode_data_url(rest: str, max_bytes: int) -> bytes:
    head, comma, body = rest.partition(",")
    if not comma:
        raise RequestError("the data: URL has no comma before its data", code="media_bad_data_url")
    if not "".join(head.split()).lower().endswith(";base64"):
        return bounded(unquote_to_bytes(body), max_bytes)
    if len(body) > 4 * max_bytes:  # even percent-encoded, that is more than max_bytes
        raise _too_large(max_bytes)
    text = b"".join(unquote_to_bytes(body).split())
    text += b"=" * (-len(text) % 4)  # browsers accept missing padding, so people write it
    try:
        return bounded(base64.b64decode(text, validate=True), max_bytes)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the data: URL is not valid base64 ({error})", code="media_bad_data_url") from error


def _path_of_file_url(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise RequestError(f"{_shown(url)}: not a file URL ({error})", code="media_scheme") from error
    if parts.netloc not in ("", "localhost"):
        raise RequestError(f"{_shown(url)}: names another host; use file:///path", code="media_scheme")
    if parts.query or parts.fragment:
        raise RequestError(f"{_shown(url)}: write ? and # in file names as %3F and %23", code="media_scheme")
    return os.fsdecode(unquote_to_bytes(parts.path))


@contextlib.contextmanager
def _file(url: str, allowed_media_dir: Path | str | None) -> Iterator[tuple[AllowedFolder, str]]:
    """The folder and the path of a file in it. Within, errors become a RequestError that names the file."""
    _, given = _kind_of(url)
    if allowed_media_dir is None:
        raise RequestError("files are not allowed here; name their folder: allowed_media_dir (--allowed-media-dir)",
                           code="media_not_allowed")
    try:
        folder = AllowedFolder(allowed_media_dir)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"allowed_media_dir {str(allowed_media_dir)!r} is not a folder") from error
    try:
        with folder:
            yield folder, given
    except OutsideError as error:
        raise RequestError(f"{_shown(given)}: outside the folder {_shown(str(allowed_media_dir))} "
                           "(allowed_media_dir)", "media_not_allowed") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RequestError(f"{_shown(given)}: no such file below {_shown(str(allowed_media_dir))} "
                           "(allowed_media_dir)", code="media_missing") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else "not a file name"
        raise RequestError(f"{_shown(given)}: cannot be read ({reason})", code="media_unreadable") from error


def bounded(data: bytes, max_bytes: int, name: str = "the file") -> bytes:
    """`data`. Raises RequestError for more than `max_bytes`."""
    if len(data) > max_bytes:
        raise _too_large(max_bytes, name)
    return data


def _too_large(max_bytes: int, name: str = "the file") -> RequestError:
    return RequestError(f"{name} is larger than {max_bytes} bytes; scale it down", code="media_too_large")


def _has_lone_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _shown(address: str) -> str:
    return repr(address if len(address) <= 200 else address[:197] + "...")
