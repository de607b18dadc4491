"""The files of `rows`, `table` and `merge`: the answers of a job that they read, and the places where they write.

They never write over a file that they read, a job's output or the files that a job keeps beside it. Knows nothing of
what is written.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.names import manifest_path, own_files
from npu_runner.batch.files.place import Named, Place, find_places
from npu_runner.errors import ConfigError

_MANIFEST = manifest_path(Path("x")).name.removeprefix("x")


class JobOutput(AnswerFile):
    """The answers of a job, at work or not: its output, and the error file that its manifest names. Raises ConfigError
    where there is no such file."""

    def __init__(self, name: str, max_row_bytes: int):
        output = Path(os.path.realpath(name))
        self.name = name
        self.manifest = Manifest.load(output)
        error_file = None if self.manifest is None else self.manifest.error_file
        errors = None if error_file is None else output.parent / error_file
        self.read_names: list[tuple[str, str | Path | None]] = [("answers", name), ("error file", errors)]
        """The files that are read, for the check of places."""
        with clear_file_errors(f"answers {name}"):
            if not output.is_file():
                raise ConfigError(f"answers {name}: there is no such file")
        super().__init__([output, *([] if errors is None else [errors])], max_row_bytes=max_row_bytes,
                         titles=[f"answers {name}", f"error file {errors}"])


def find_outputs(written: Iterable[Named], read: Iterable[Named]) -> list[Place]:
    """The places of the files that are named. Raises ConfigError for one that is something else already, and for two
    names of one file."""
    return list(find_places(written, read, _files_of_jobs).values())


def _files_of_jobs(folder: Path) -> dict[Path, str]:
    """The output of each job in the folder, and all files that belong to it, as its manifest says."""
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
    with contextlib.suppress(OSError, ValueError, RecursionError):  # a file of that name need not be a manifest
        fields = json.loads(manifest.read_bytes())
        found = fields.get("error_file") if isinstance(fields, dict) else None
        return found if isinstance(found, str) else None
    return None
