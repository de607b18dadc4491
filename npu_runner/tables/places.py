"""Where `rows`, `table` and `merge` write: never over what they read, a job's output or what a job keeps beside it.

Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.names import manifest_path, own_files
from npu_runner.batch.files.place import Named, Place, find_places

_MANIFEST = manifest_path(Path("x")).name.removeprefix("x")


def find_outputs(written: Iterable[Named], read: Iterable[Named]) -> list[Place]:
    """The places of the files that are named. Raises ConfigError for one that is something else already, and for two
    names of one file."""
    return list(find_places(written, read, _files_of_jobs).values())


def _files_of_jobs(folder: Path) -> dict[Path, str]:
    """The output of each job in the folder, and all that belongs to it, as its manifest says."""
    found: dict[Path, str] = {}
    with clear_file_errors(f"folder {folder}"), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(_MANIFEST) and entry.name != _MANIFEST]
    for name in names:
        output = folder / name.removesuffix(_MANIFEST)
        files = {output: "output", **own_files("output", output)}
        error_file = _error_file(folder / name)
        if error_file is not None:
            path = Path(os.path.normpath(folder / error_file))
            files |= {path: "error file", **own_files("error_file", path)}
        found |= {path: f"{what} of the job of {output.name}" for path, what in files.items()}
    return found


def _error_file(manifest: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, RecursionError):  # whatever has that name and is no manifest
        fields = json.loads(manifest.read_bytes())
        found = fields.get("error_file") if isinstance(fields, dict) else None
        return found if isinstance(found, str) else None
    return None
