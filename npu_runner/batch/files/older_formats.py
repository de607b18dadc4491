"""The files that versions before format 4 of the manifest kept beside an output: a record of runs, and suspects.

They are read until a run begins to write; the manifest then has what they say, and they are removed. Knows nothing of
rows.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, NoReturn

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.names import runs_path, suspects_path
from npu_runner.batch.files.runs import Runs, has_served
from npu_runner.batch.files.suspects import Suspicion
from npu_runner.errors import ConfigError

_FORMAT_OF_SUSPECTS = 1


def read_older_runs(output: Path, *, has_manifest: bool) -> Runs:
    """The last whole line of each run. Without a manifest no run of this output has served a row: runs that have were
    of another output of that name.

    Raises ConfigError for a file of whole lines none of which is a run's: no job has left it so.
    """
    path = runs_path(output)
    with clear_file_errors(f"record of runs {path}"):
        # What follows the last line end is torn.
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found: list[Any] = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line, parse_constant=_refuse))
    # A run that ended has no later line.
    runs = Runs.from_json(found)
    if lines and not runs.last:
        raise ConfigError(f"record of runs {path}: no line of it can be read, so no job has left it so; move it away, "
                          "and earlier runs are not counted")
    return Runs(tuple(run for run in runs.last if has_manifest or not has_served(run)), runs.older)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def read_older_suspects(output: Path) -> dict[str, Suspicion]:
    """The rows under suspicion, by custom_id."""
    path = suspects_path(output)
    try:
        with clear_file_errors(f"suspects {path}"):
            if not path.exists():
                return {}
            fields = json.loads(path.read_bytes())
        if fields["format"] != _FORMAT_OF_SUSPECTS:
            raise ValueError("it is of another version of this program")
        return {str(name): Suspicion(**row) for name, row in fields["rows"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"suspects {path}: cannot be read ({error}); without it all rows run together") from error


def remove_older_files(output: Path) -> None:
    """Once the manifest that has what they say is on disk."""
    for path in (runs_path(output), suspects_path(output)):
        with clear_file_errors(str(path)):
            path.unlink(missing_ok=True)
