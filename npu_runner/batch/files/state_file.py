"""The state of an output while a run holds its lock: read once, then replaced as a whole. Knows nothing of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from npu_runner.batch.files.durable import FileErrors, clear_file_errors, late_file_errors
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.older_formats import read_older_runs, remove_older_files
from npu_runner.batch.files.runs import Runs


class StateFile:
    """The state beside `output`. Without an output file it lasts as long as the job."""

    def __init__(self, output: Path | None):
        self._output = output
        self.manifest: Manifest | None = None
        self.runs = Runs()
        """The runs that the state has."""
        self.is_begun = False
        """This run has begun to write."""
        self._is_loaded = False

    def load(self) -> None:
        """Read what earlier runs have left, once. Raises ConfigError where that is no state."""
        if self._output is not None and not self._is_loaded:
            self.manifest, self.runs = read_state(self._output)
            self._is_loaded = True

    def clear(self) -> None:
        """The file is removed with the output that it belongs to."""
        self.manifest, self.runs = None, Runs()

    def save(self, manifest: Manifest, file_errors: FileErrors = clear_file_errors) -> None:
        """Have this state on disk from here on. Older files, which it takes the place of, go after it."""
        if self._output is not None:
            manifest.save(self._output, earlier=self.manifest, file_errors=file_errors)
            if not self.is_begun:
                remove_older_files(self._output)
        self.manifest, self.runs, self.is_begun = manifest, manifest.runs, True

    def update(self, **changes: Any) -> None:
        """Replace these fields of the state, once the run has begun to write. Raises JobError."""
        if self.manifest is not None and self.is_begun:
            changed = replace(self.manifest, **changes)
            if changed != self.manifest:
                self.save(changed, late_file_errors)


def read_state(output: Path) -> tuple[Manifest | None, Runs]:
    """The state, and the runs that it has. Those of an older version may be there before there is a manifest."""
    manifest = Manifest.load(output)
    return manifest, read_older_runs(output, has_manifest=False) if manifest is None else manifest.runs
