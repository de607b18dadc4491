"""What prompts are made of: text files of the checkpoint, and packages. Tells whether they are still the same.

Knows nothing of what is in them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path

from npu_runner.errors import JobError

FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""All that a ChatProcessor may read."""


def file_digests(folder: Path) -> dict[str, str | None]:
    """One for each of FILES; None: it is not there, or cannot be read. 11 MB, as a tokenizer has them, take 30 ms."""
    return {name: _digest_of(folder / name) for name in FILES}


def package_versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Without importing them; None: it is not there."""
    return {package: _installed_version(package) for package in packages}


def refuse_changes(folder: Path, digests: Mapping[str, str | None], versions: Mapping[str, str | None]) -> None:
    """Raises JobError unless files and packages are what they were when these digests and versions were taken."""
    files, packages = file_digests(folder), package_versions(list(versions))
    changed = [name for name in digests if files[name] != digests[name]]
    changed += [f"the package {name}" for name in versions if packages[name] != versions[name]]
    if changed:
        raise JobError(
            f"model {folder}: {', '.join(changed)} changed after the model was opened, and a preprocessing worker that "
            "starts now would make other prompts than those before it; put back what was there and run the same "
            "again, or begin anew with what is there now"
        )


def _digest_of(path: Path) -> str | None:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
