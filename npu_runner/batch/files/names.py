"""The names of the files that a job keeps beside those it was given: one table. Knows nothing of their content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def _beside(ending: str, beginning: str = "") -> Callable[[Path], Path]:
    return lambda file: file.with_name(f"{beginning}{file.name}{ending}")


lock_path = _beside(".lock")
manifest_path = _beside(".manifest.json")
rows_path = _beside(".rows")
status_path = _beside(".status.json")
replaced_path = _beside(".replaced.jsonl")
# Versions before format 4 of the manifest kept these.
suspects_path = _beside(".suspects.json")
runs_path = _beside(".runs.jsonl")
# Always the same name: what a killed process leaves is found by the next one.
new_version_path = _beside(".new", ".")


def own_files(option: str, file: Path) -> dict[Path, str]:
    """The files that a job makes beside the file of this option, each with its name in messages."""
    found = {new_version_path(file): "next version"}
    if option in ("output", "error_file"):
        found[lock_path(file)] = "lock"
    if option == "output":
        others = ((manifest_path(file), "manifest"), (rows_path(file), "rows"), (status_path(file), "status"),
                  (replaced_path(file), "replaced answers"))
        for path, name in others:
            found |= {path: name, new_version_path(path): f"next version of the {name}"}
        found |= {suspects_path(file): "suspects", runs_path(file): "record of runs"}
    return found
