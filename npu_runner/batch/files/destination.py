"""Where answers go: a file that can be resumed, or a stream that cannot. Knows nothing of the engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, remove_torn_version, sync_folder
from npu_runner.batch.files.input_file import STANDARD_STREAM, InputScan
from npu_runner.batch.files.manifest import Manifest, manifest_path
from npu_runner.batch.files.output_file import OutputLock, repair_output, rewrite_rows, rows_in_order, scan_output
from npu_runner.errors import ConfigError, JobError, OutputLostError

_SYNC_ROWS = 64
_SYNC_SECONDS = 2.0


class Destination(Protocol):
    """Entered while a job runs. First `look` (`earlier`, `finished`), then write (`begin`), then `finish`."""

    name: str
    earlier: Manifest | None

    @property
    def path(self) -> Path | None: ...
    def __enter__(self) -> Destination: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def look(self) -> None: ...
    def finished(self, rows: InputScan) -> np.ndarray: ...
    def num_failed_kept(self) -> int: ...
    def begin(self, manifest: Manifest) -> AnswerWriter: ...
    def finish(self, rows: InputScan, *, is_ordered: bool) -> None: ...
    def num_there(self, rows: InputScan) -> tuple[int, int]: ...


def open_destination(output: str, *, overwrite: bool, retry_errors: bool) -> Destination:
    """Standard output and devices are streams; everything else is a file."""
    if output == STANDARD_STREAM:
        return StreamDestination(output)
    path = Path(output)
    if path.exists() and not path.is_file() and not path.is_dir():
        return StreamDestination(output)
    return FileDestination(path, overwrite=overwrite, retry_errors=retry_errors)


class StreamDestination:
    """Rows go out as they come; there is nothing to resume from."""

    path: Path | None = None
    earlier: Manifest | None = None

    def __init__(self, output: str):
        self.name = "standard output" if output == STANDARD_STREAM else output
        self._output = output
        self._descriptor = -1

    def __enter__(self) -> StreamDestination:
        if self._output != STANDARD_STREAM:
            with clear_file_errors(f"output {self._output}"):
                self._descriptor = os.open(self._output, os.O_WRONLY)
            return self
        # Whatever prints meanwhile (a library, a compiler) must not end up among the answers.
        sys.stdout.flush()
        self._descriptor = os.dup(1)
        os.dup2(2, 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._output == STANDARD_STREAM:
            sys.stdout.flush()
            os.dup2(self._descriptor, 1)
        os.close(self._descriptor)

    def look(self) -> None:
        """There is nothing to see."""

    def finished(self, rows: InputScan) -> np.ndarray:
        return np.zeros(rows.num_rows, dtype=bool)

    def num_failed_kept(self) -> int:
        return 0

    def begin(self, manifest: Manifest) -> AnswerWriter:
        return AnswerWriter(os.dup(self._descriptor), self.name)

    def finish(self, rows: InputScan, *, is_ordered: bool) -> None:
        """Rows went out in order already, if that was asked for."""

    def num_there(self, rows: InputScan) -> tuple[int, int]:
        """What went out cannot be looked at again."""
        return 0, 0


class FileDestination:
    """A file of answers with its lock and its manifest. Nothing is changed before `begin`."""

    def __init__(self, path: Path, *, overwrite: bool, retry_errors: bool):
        # Through links, so that two names of one file share one lock, and a link stays a link.
        self.path: Path = path.resolve()
        self.name = str(path)
        self.earlier: Manifest | None = None
        self._overwrite = overwrite
        self._retry_errors = retry_errors
        self._lock = OutputLock(self.path)
        self._seen: tuple[int, ...] | None = None

    def __enter__(self) -> FileDestination:
        if self.path.is_dir():
            raise ConfigError(f"output {self.name}: is a folder; name a file in it")
        if not self.path.parent.is_dir():
            raise ConfigError(f"output {self.name}: the folder {self.path.parent} does not exist; make it first")
        self._lock.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.__exit__()

    def look(self) -> None:
        with clear_file_errors(f"output {self.name}"):
            self._seen = _state_of(self.path)
            self._scan = scan_output(self.path)
        if self._overwrite:
            self._kept = self._scan.keys[:0]
            return
        self.earlier = Manifest.load(self.path)
        if self.earlier is None and self._scan.num_bytes:
            raise ConfigError(
                f"output {self.name}: the file has content but no {manifest_path(self.path).name}, so it is no job's "
                "output to resume; choose another name, or --overwrite to replace it"
            )
        self._kept = self._scan.keys[~self._scan.failed] if self._retry_errors else self._scan.keys

    def finished(self, rows: InputScan) -> np.ndarray:
        """Which of the input's rows need no work any more."""
        return np.isin(rows.keys, self._kept)

    def num_failed_kept(self) -> int:
        """Failed rows that stay as they are."""
        return 0 if self._overwrite or self._retry_errors else self._scan.num_failed

    def begin(self, manifest: Manifest) -> AnswerWriter:
        """Leave what is kept, whole, and open the file for more."""
        with clear_file_errors(f"output {self.name}"):
            if self._overwrite:
                self.path.unlink(missing_ok=True)
                manifest_path(self.path).unlink(missing_ok=True)
            elif _state_of(self.path) != self._seen:
                raise JobError(f"output {self.name}: was changed while the model loaded; run the same command again")
            remove_torn_version(self.path)
            manifest.save(self.path)
            if not self._overwrite:
                repair_output(self.path, self._scan, drop_failed=self._retry_errors)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            sync_folder(self.path.parent)
        return AnswerWriter(descriptor, self.name, path=self.path, sync_rows=_SYNC_ROWS, sync_seconds=_SYNC_SECONDS)

    def finish(self, rows: InputScan, *, is_ordered: bool) -> None:
        """Bring the file, in which every row is, into the order of the input where that was asked for.

        Rows are always written as they finish. Killed here, the file is whole in one of both orders, and the same
        command comes here again.
        """
        if not is_ordered:
            return
        with late_file_errors(f"output {self.name}, being put in order"):
            scan = scan_output(self.path)
            order = rows_in_order(scan, rows.keys)
            if (order < 0).any():
                raise OutputLostError(
                    f"output {self.name}: {int((order < 0).sum())} of {rows.num_rows} rows have gone from it since "
                    "they were written; the same command answers them again"
                )
            if scan.num_broken_lines or not np.array_equal(order, np.arange(scan.num_rows)):
                rewrite_rows(self.path, scan, order)

    def num_there(self, rows: InputScan) -> tuple[int, int]:
        """How many rows of the input have an answer in the file now, and how many of these are failed ones."""
        with late_file_errors(f"output {self.name}"):
            scan = scan_output(self.path)
        found = rows_in_order(scan, rows.keys)
        found = found[found >= 0]
        return len(found), int(scan.failed[found].sum())


def _state_of(path: Path) -> tuple[int, ...] | None:
    """What changes when somebody writes to a file or puts another in its place; None: there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
