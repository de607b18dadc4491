"""Reads the passwords of PDFs and finds a document's. They are in no record. Knows no PDF."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from npu_runner.errors import ConfigError

_ALL = "*"


def read_passwords(file: Path | str | None) -> dict[str, str]:
    """Passwords by address, of a file with one JSON object; none without a file. Raises ConfigError."""
    if file is None:
        return {}
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"  # which may quote a password
        raise ConfigError(f"pdf_passwords: {str(file)!r} cannot be read ({reason})") from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError(f"pdf_passwords: {str(file)!r} is no JSON object of paths, or {_ALL}, and passwords")
    return found


def password_of(passwords: Mapping[str, str], address: str, folder: Path | str | None) -> str | None:
    """The password of the document with this address, which may begin at `folder`; None: none is given."""
    if not passwords:
        return None
    path = os.path.normpath(address.removeprefix("file://"))
    below = os.path.relpath(path, folder) if folder is not None and os.path.isabs(path) else path
    return next((passwords[name] for name in (address, path, below, _ALL) if name in passwords), None)
