"""Where answers go: a file that can be resumed, or a stream that cannot. Knows nothing of the engine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, sync_folder
from npu_runner.batch.files.input_file import InputScan
from npu_runner.batch.files.manifest import Manifest, manifest_path
from npu_runner.batch.files.names import replaced_path
from npu_runner.batch.files.output_file import RowsFile
from npu_runner.batch.files.output_scan import has_any, read_row, rows_in_order, rows_of, scan_output
from npu_runner.batch.files.place import Place
from npu_runner.batch.files.state_file import StateFile
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.errors import ConfigError, OutputLostError


class Writers(NamedTuple):
    """Where rows go: failed ones to `errors`, where there is such a file."""

    answers: AnswerWriter
    errors: AnswerWriter | None = None

    def close(self) -> None:
        """Both of them, whatever becomes of the first. Raises what AnswerWriter.close does."""
        try:
            self.answers.close()
        finally:
            if self.errors is not None:
                self.errors.close()


class StreamDestination:
    """Rows go out as they come; there is nothing to resume from."""

    path: Path | None = None
    error_path: Path | None = None
    earlier: Manifest | None = None

    def __init__(self, place: Place):
        self.name = place.name
        self._place = place
        self.state = StateFile(None)

    def __enter__(self) -> StreamDestination:
        self._place.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._place.__exit__()

    def look(self) -> None:
        """There is nothing to see."""

    def retry(self, asked: Flaw, rows: InputScan) -> Flaw:
        """There is no row to be tried again."""
        return Flaw(0)

    def decide(self, flaws: Flaw, unparsed: np.ndarray | None = None) -> None:
        """Likewise."""

    def finished(self, rows: InputScan) -> np.ndarray:
        return np.zeros(rows.num_rows, dtype=bool)

    def num_retried_failures(self) -> int:
        return 0

    def num_replaced(self) -> int:
        return 0

    def kept_counts(self) -> Counts:
        return Counts()

    def begin(self, manifest: Manifest) -> Writers:
        self.state.save(manifest)
        return Writers(AnswerWriter(os.dup(self._place.descriptor), self.name))

    def finish(self, rows: InputScan, *, is_ordered: bool) -> None:
        """Rows went out in order already, if that was asked for."""

    def counts_now(self) -> Counts:
        """What went out cannot be looked at again."""
        return Counts()


class FileDestination:
    """A file of answers with its lock and its manifest, and with `errors` a second one, where failed rows go instead.

    Nothing is changed before `begin`. A row is in one of the two; both are looked at, repaired and put in order alike.
    """

    def __init__(self, place: Place, *, overwrite: bool, errors: Place | None = None):
        self._answers = RowsFile(place)
        self._errors = None if errors is None else RowsFile(errors)
        self.path: Path = self._answers.path
        self.error_path = None if self._errors is None else self._errors.path
        self.name = place.name
        self.state = StateFile(self.path)
        self._overwrite = overwrite
        self._retry = Flaw(0)

    @property
    def earlier(self) -> Manifest | None:
        """The state that earlier runs have left."""
        return self.state.manifest

    @property
    def _files(self) -> list[RowsFile]:
        return [self._answers] if self._errors is None else [self._answers, self._errors]

    def __enter__(self) -> FileDestination:
        with ExitStack() as entered:
            for file in self._files:
                entered.enter_context(file)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def look(self) -> None:
        for file in self._files:
            file.look()
        if not self._overwrite:
            self._look_at_earlier()
        scans = [] if self._overwrite else [file.scan for file in self._files]
        self._rows = rows_of(scans)
        self._is_retried = np.zeros(self._rows.num_rows, dtype=bool)

    def _look_at_earlier(self) -> None:
        for file in self._files:
            file.try_to_append()
        self.state.load()
        if self.earlier is None and self._answers.scan.num_bytes:
            raise ConfigError(
                f"output {self.name}: the file has content but no {manifest_path(self.path).name}, so it is no job's "
                "output to resume; choose another name, or --overwrite to replace it")
        self._refuse_another_error_file()

    def _refuse_another_error_file(self) -> None:
        begun_with = None if self.earlier is None else self.earlier.error_file
        if begun_with is not None and begun_with != self._error_name:
            given = "none is given" if self._errors is None else f"{self._errors.name} is given"
            raise ConfigError(
                f"output {self.name}: was begun with --error-file {begun_with} (as seen from its folder), and {given}; "
                "failed rows would be in two places. Give that one again, or --overwrite to start afresh")
        if self._errors is not None and begun_with is None and self._errors.scan.num_bytes:
            raise ConfigError(f"{self._errors.title}: has content, and is not what the output was begun with; choose "
                              "another name, or --overwrite to replace both")

    @property
    def _error_name(self) -> str | None:
        """As the manifest has it: both files may be moved together."""
        return None if self._errors is None else os.path.relpath(self._errors.path, self.path.parent)

    def retry(self, asked: Flaw, rows: InputScan) -> Flaw:
        """The flaws in `asked` for which no earlier run has chosen rows: rows with one of them are tried again by
        `decide`.

        The manifest names those of a run that was cut short. Their rows have left the files, and those that have a line
        since are not tried once more. That holds while the input is the same, or has grown.
        """
        earlier = self.earlier
        if earlier is None:
            return asked
        standing = earlier.retry if rows.continues_earlier else Flaw(0)
        self._retry = standing | asked
        return asked & ~standing

    def decide(self, flaws: Flaw, unparsed: np.ndarray | None = None) -> None:
        """Have rows with one of these flaws tried again. `unparsed`: keys of more that are, though their lines do not
        say so."""
        self._is_retried |= has_any(self._rows.flaws, flaws)
        if unparsed is not None:
            self._is_retried |= np.isin(self._rows.keys, unparsed)

    @property
    def _kept(self) -> np.ndarray:
        """Keys of the rows that stay as they are."""
        return self._rows.keys[~self._is_retried]

    def finished(self, rows: InputScan) -> np.ndarray:
        """Which of the input's rows need no work any more."""
        return np.isin(rows.keys, self._kept)

    def flaws_of(self, key: bytes) -> Flaw | None:
        """The flaws of the row with this key in the files; None: there is no such row."""
        (found,) = np.nonzero(self._rows.keys == np.bytes_(key))
        return Flaw(int(self._rows.flaws[found[0]])) if len(found) else None

    def custom_id(self, name: bytes) -> str | None:
        """Of the row in the files whose key begins with this; None: there is none, or it has none."""
        for file in self._files:
            (found,) = np.nonzero(np.char.startswith(file.scan.keys, name))
            if len(found):
                with clear_file_errors(file.title), open(file.path, "rb") as rows:
                    custom_id: str | None = read_row(rows, int(file.scan.starts[found[0]]))["custom_id"]
                    return custom_id
        return None

    def num_retried_failures(self) -> int:
        """Failed rows of earlier runs that are tried again."""
        return int((self._rows.failed & self._is_retried).sum())

    def num_replaced(self) -> int:
        """Answers of earlier runs that are tried again."""
        return int((~self._rows.failed & self._is_retried).sum())

    def kept_counts(self) -> Counts:
        """Of the rows that stay as they are."""
        return self._rows.only(np.flatnonzero(~self._is_retried)).counts()

    def begin(self, manifest: Manifest) -> Writers:
        """Leave what is kept, whole, and open the files for more."""
        with clear_file_errors(f"output {self.name}"):
            for file in self._files:
                if self._overwrite:
                    file.replace()
                else:
                    file.refuse_changes()
            if self._overwrite:
                for path in (manifest_path(self.path), replaced_path(self.path)):
                    path.unlink(missing_ok=True)
                self.state.clear()
                sync_folder(self.path.parent)
            else:
                # First: an input and settings that are new on disk never have rows of the old ones beside them.
                self._drop_retried()
            self.state.save(replace(manifest, error_file=self._error_name, retry=self._retry))
            if not self._overwrite:
                # Second: the manifest knows the error file before a row is in it.
                self._move_failed()
            answers = self._answers.open()
            try:
                errors = None if self._errors is None else self._errors.open()
            except BaseException:
                answers.close()
                raise
        return Writers(answers, errors)

    def _drop_retried(self) -> None:
        """Leave whole rows alone that are not tried again. Answers that leave are copied before."""
        files, rows = self._files, self._rows
        stays = [np.ones(file.scan.num_rows, dtype=bool) for file in files]
        if self._is_retried.any():
            replaced = rows.keys[self._is_retried & ~rows.failed]
            for number, file in enumerate(files):
                file.copy_rows(replaced_path(self.path), np.isin(file.scan.keys, replaced) & ~file.scan.failed)
                stays[number] = np.isin(file.scan.keys, self._kept)
        if self._errors is not None:
            # A failure may stand beside its answer, in either file: the answer counts.
            answered = rows.keys[~rows.failed]
            for number, file in enumerate(files):
                stays[number] &= ~(file.scan.failed & np.isin(file.scan.keys, answered))
        self._answers.keep(stays[0])
        if self._errors is not None:
            errors = self._errors.scan
            moved = stays[1] & ~errors.failed & ~np.isin(errors.keys, self._answers.scan.keys)
            if moved.any():
                self._answers.append_from(self._errors, moved)
                self._answers.look()
            self._errors.keep(stays[1] & errors.failed)

    def _move_failed(self) -> None:
        """Failed rows go where they belong: they are in the other file before they leave this one."""
        failed = self._answers.scan.failed
        if self._errors is not None and failed.any():
            self._errors.append_from(self._answers, failed & ~np.isin(self._answers.scan.keys, self._errors.scan.keys))
            self._answers.keep(~failed)

    def finish(self, rows: InputScan, *, is_ordered: bool) -> None:
        """Bring the files, in which every row is, into the order of the input where that was asked for.

        Rows are always written as they finish. Killed here, a file is whole in one of both orders, and the same
        command comes here again.
        """
        if not is_ordered:
            return
        with late_file_errors(f"output {self.name}, being put in order"):
            scans = [scan_output(file.path) for file in self._files]
            places = [rows_in_order(scan, rows.keys) for scan in scans]
            is_missing = np.all([found < 0 for found in places], axis=0)
            if is_missing.any():
                raise OutputLostError(
                    f"output {self.name}: {int(is_missing.sum())} of {rows.num_rows} rows have gone from it since "
                    "they were written; the same command answers them again")
            for file, scan, found in zip(self._files, scans, places, strict=True):
                file.put_in_order(scan, found)

    def counts_now(self) -> Counts:
        """Of the rows that are in the files now."""
        with late_file_errors(f"output {self.name}"):
            return rows_of([scan_output(file.path) for file in self._files]).counts()


Destination = StreamDestination | FileDestination
"""Entered while a job runs. First `look` and `retry` (`earlier`, `finished`), then write (`begin`), then `finish`."""


def open_destination(output: Place, *, overwrite: bool, errors: Place | None = None) -> Destination:
    """`errors`: where failed rows go instead."""
    if output.is_stream:
        if errors is not None:
            raise ConfigError(f"{errors.title}: the output is a stream, and who resumes the one cannot resume the "
                              "other; name a file as output, or leave it out")
        return StreamDestination(output)
    return FileDestination(output, overwrite=overwrite, errors=errors)
