"""Where answers go: a file that can be resumed, or a stream that cannot. Knows nothing of the engine."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, sync_folder
from npu_runner.batch.files.input_file import InputScan
from npu_runner.batch.files.manifest import Manifest, manifest_path
from npu_runner.batch.files.output_file import RowsFile
from npu_runner.batch.files.output_scan import RowCounts, counts_of, read_row, rows_in_order, scan_output
from npu_runner.batch.files.place import Place
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

    def __enter__(self) -> StreamDestination:
        self._place.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._place.__exit__()

    def look(self) -> None:
        """There is nothing to see."""

    def finished(self, rows: InputScan) -> np.ndarray:
        return np.zeros(rows.num_rows, dtype=bool)

    def num_failed(self) -> int:
        return 0

    def kept_counts(self) -> RowCounts:
        return RowCounts()

    def begin(self, manifest: Manifest) -> Writers:
        return Writers(AnswerWriter(os.dup(self._place.descriptor), self.name))

    def finish(self, rows: InputScan, *, is_ordered: bool) -> None:
        """Rows went out in order already, if that was asked for."""

    def counts_now(self) -> RowCounts:
        """What went out cannot be looked at again."""
        return RowCounts()


class FileDestination:
    """A file of answers with its lock and its manifest, and with `errors` a second one, where failed rows go instead.

    Nothing is changed before `begin`. A row is in one of the two; both are looked at, repaired and put in order alike.
    """

    def __init__(self, place: Place, *, overwrite: bool, retry_errors: bool, errors: Place | None = None):
        self._answers = RowsFile(place)
        self._errors = None if errors is None else RowsFile(errors)
        self.path: Path = self._answers.path
        self.error_path = None if self._errors is None else self._errors.path
        self.name = place.name
        self.earlier: Manifest | None = None
        self._overwrite = overwrite
        self._retry_errors = retry_errors

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
        if self._overwrite:
            self._kept = self._answers.scan.keys[:0]
            return
        for file in self._files:
            file.try_to_append()
        self.earlier = Manifest.load(self.path)
        if self.earlier is None and self._answers.scan.num_bytes:
            raise ConfigError(
                f"output {self.name}: the file has content but no {manifest_path(self.path).name}, so it is no job's "
                "output to resume; choose another name, or --overwrite to replace it")
        self._refuse_another_error_file()
        scan = self._answers.scan
        answered = scan.keys[~scan.failed]
        self._kept = answered if self._retry_errors else np.union1d(answered, self._failed_keys())

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

    def _failed_keys(self) -> np.ndarray:
        """Of failed rows, wherever they are: a job that was killed while it moved them has left some in both files."""
        found = [file.scan.keys[file.scan.failed] for file in self._files]
        return np.setdiff1d(np.concatenate(found), self._answers.scan.keys[~self._answers.scan.failed])

    def finished(self, rows: InputScan) -> np.ndarray:
        """Which of the input's rows need no work any more."""
        return np.isin(rows.keys, self._kept)

    def answered(self, rows: InputScan) -> np.ndarray:
        """Which of the input's rows have an answer."""
        return np.isin(rows.keys, self._answers.scan.keys[~self._answers.scan.failed])

    def custom_id(self, name: bytes) -> str | None:
        """Of the row in the files whose key begins with this; None: there is none, or it has none."""
        for file in self._files:
            (found,) = np.nonzero(np.char.startswith(file.scan.keys, name))
            if len(found):
                with clear_file_errors(file.title), open(file.path, "rb") as rows:
                    custom_id: str | None = read_row(rows, int(file.scan.starts[found[0]]))["custom_id"]
                    return custom_id
        return None

    def num_failed(self) -> int:
        """Failed rows of earlier runs."""
        return 0 if self._overwrite else len(self._failed_keys())

    def kept_counts(self) -> RowCounts:
        """Of the rows that stay as they are."""
        counts = RowCounts() if self._overwrite else counts_of([file.scan for file in self._files])
        return replace(counts, failures_by_code=Counter()) if self._retry_errors else counts

    def begin(self, manifest: Manifest) -> Writers:
        """Leave what is kept, whole, and open the files for more."""
        with clear_file_errors(f"output {self.name}"):
            for file in self._files:
                if self._overwrite:
                    file.replace()
                else:
                    file.refuse_changes()
            if self._overwrite:
                manifest_path(self.path).unlink(missing_ok=True)
                sync_folder(self.path.parent)
            elif self._retry_errors:
                # First: an input and settings that are new on disk never have failures of the old ones beside them.
                self._repair()
            replace(manifest, error_file=self._error_name).save(self.path)
            if not (self._overwrite or self._retry_errors):
                # Second: the manifest knows the error file before a row is in it.
                self._repair()
            answers = self._answers.open()
            try:
                errors = None if self._errors is None else self._errors.open()
            except BaseException:
                answers.close()
                raise
        return Writers(answers, errors)

    def _repair(self) -> None:
        """Whole rows alone, failed ones where they belong: in the other file before they leave this one."""
        failed = self._answers.scan.failed
        if self._errors is not None:
            scan = self._errors.scan
            # Who was answered since, or is tried again, has failed no more.
            stays = np.isin(scan.keys, self._kept) & scan.failed
            stays &= ~np.isin(scan.keys, self._answers.scan.keys[~failed])
            self._errors.keep(stays)
            if not self._retry_errors:
                self._errors.append_from(self._answers, failed & ~np.isin(self._answers.scan.keys, scan.keys[stays]))
        drop_failed = self._retry_errors or self._errors is not None
        self._answers.keep(~failed if drop_failed else np.ones(len(failed), dtype=bool))

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

    def counts_now(self) -> RowCounts:
        """Of the rows that are in the files now."""
        with late_file_errors(f"output {self.name}"):
            return counts_of([scan_output(file.path) for file in self._files])


Destination = StreamDestination | FileDestination
"""Entered while a job runs. First `look` (`earlier`, `finished`), then write (`begin`), then `finish`."""


def open_destination(output: Place, *, overwrite: bool, retry_errors: bool, errors: Place | None = None) -> Destination:
    """`errors`: where failed rows go instead."""
    if output.is_stream:
        if errors is not None:
            raise ConfigError(f"{errors.title}: the output is a stream, and who resumes the one cannot resume the "
                              "other; name a file as output, or leave it out")
        return StreamDestination(output)
    return FileDestination(output, overwrite=overwrite, retry_errors=retry_errors, errors=errors)
