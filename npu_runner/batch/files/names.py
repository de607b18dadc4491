"""The names of what a job keeps beside the files it was given: one table. Knows nothing of what is in them."""

from __future__ import annotations

from pathlib import Path


def lock_path(file: Path) -> Path:
    return file.with_name(file.name + ".lock")


def manifest_path(output: Path) -> Path:
    return output.with_name(output.name + ".manifest.json")


def rows_path(output: Path) -> Path:
    return output.with_name(output.name + ".rows")


def suspects_path(output: Path) -> Path:
    return output.with_name(output.name + ".suspects.json")


def runs_path(output: Path) -> Path:
    return output.with_name(output.name + ".runs.jsonl")


def status_path(output: Path) -> Path:
    return output.with_name(output.name + ".status.json")


def new_version_path(file: Path) -> Path:
    # Always the same name: what a killed process leaves is found by the next one.
    return file.with_name(f".{file.name}.new")


def own_files(option: str, file: Path) -> dict[Path, str]:
    """What a job makes beside the file that this option names, and what each is called."""
    found = {new_version_path(file): "next version"}
    if option in ("output", "error_file"):
        found[lock_path(file)] = "lock"
    if option == "output":
        others = ((manifest_path(file), "manifest"), (rows_path(file), "rows"), (suspects_path(file), "suspects"),
                  (runs_path(file), "record of runs"), (status_path(file), "status"))
        for path, name in others:
            found |= {path: name, new_version_path(path): f"next version of the {name}"}
    return found
