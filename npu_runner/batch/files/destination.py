"""Where a job writes its answers: a stream, or a file that can be resumed, with its lock, its manifest and perhaps an
error file. Knows nothing of the engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from npu_runner.batch.files.answer_file import AnswerFile, have_any, open_for_rows
from npu_runner.batch.files.answer_writer import AnswerWriter, Delivery
from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, remove_torn_version, sync_folder
from npu_runner.batch.files.manifest import Manifest, StateFile
from npu_runner.batch.files.names import manifest_path, replaced_path
from npu_runner.batch.files.output_lock import OutputLock
from npu_runner.batch.files.place import Place
from npu_runner.batch.files.row_book import InputScan
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.errors import ConfigError, OutputLostError


class Destination:
    """The output of a job, entered while it runs: first `scan`, `retry` and `decide`, then `open_writers`, then `sort`.

    Nothing is changed before `open_writers`. With `errors` each row is in one of two files. A stream has neither lock
    nor manifest, and no rows of earlier runs; nothing can be said about what it was given.
    """

    def __init__(self, output: Place, *, overwrite: bool = False, errors: Place | None = None):
        self._places = [output] if errors is None else [output, errors]
        # Links are followed, so that two names of one file share one lock, and a link stays a link.
        self.paths = [place.path for place in self._places if place.path is not None]
        self.path, self.error_path = output.path, None if errors is None else errors.path
        self.name = output.name
        self.state = StateFile(output.path)
        self.rows = AnswerFile([] if overwrite else self.paths, titles=[place.title for place in self._places])
        self._overwrite = overwrite
        self._retry = Flaw(0)

    @property
    def earlier(self) -> Manifest | None:
        """The state that earlier runs have left."""
        return self.state.manifest

    def __enter__(self) -> Destination:
        with ExitStack() as entered:
            for place in self._places:
                entered.enter_context(place if place.path is None else OutputLock(place.path))
            entered.enter_context(self.rows)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def scan(self) -> None:
        """Read what earlier runs have left. Raises ConfigError where that is no job's output, or takes no more rows."""
        self.rows.scan()
        self._is_retried = np.zeros(self.rows.num_rows, dtype=bool)
        if not self.rows.paths:
            return
        for place, path, state in zip(self._places, self.paths, self.rows.states, strict=True):
            if state is not None:
                with clear_file_errors(place.title):
                    os.close(open_for_rows(path))
        self.state.load()
        num_bytes = [0 if state is None else state.num_bytes for state in self.rows.states]
        if self.earlier is None and num_bytes[0]:
            raise ConfigError(
                f"output {self.name}: the file has content but no {manifest_path(self.paths[0]).name}, so it is no "
                "job's output to resume; choose another name, or --overwrite to replace it")
        begun_with = None if self.earlier is None else self.earlier.error_file
        if begun_with is not None and begun_with != self._error_name:
            given = "none is given" if self._error_name is None else f"{self._places[1].name} is given"
            raise ConfigError(
                f"output {self.name}: was begun with --error-file {begun_with} (as seen from its folder), and {given}; "
                "failed rows would be in two places. Give that one again, or --overwrite to start afresh")
        if begun_with is None and any(num_bytes[1:]):
            raise ConfigError(f"{self._places[1].title}: has content, and is not what the output was begun with; "
                              "choose another name, or --overwrite to replace both")

    @property
    def _error_name(self) -> str | None:
        """As the manifest has it: both files may be moved together."""
        return None if self.error_path is None else os.path.relpath(self.error_path, self.paths[0].parent)

    def retry(self, requested: Flaw, rows: InputScan) -> Flaw:
        """The flaws in `requested` for which no earlier run has chosen rows: rows with one of them are tried again by
        `decide`.

        The manifest names those of a run that was cut short. Their rows have left the files, and those that have a line
        since are not tried once more. That holds while the input is the same, or has grown.
        """
        if self.earlier is None:
            return requested
        standing = self.earlier.retry if rows.continues_earlier else Flaw(0)
        self._retry = standing | requested
        return requested & ~standing

    def decide(self, flaws: Flaw, unparsed: np.ndarray | None = None) -> None:
        """Have rows with one of these flaws tried again. `unparsed`: keys of more that are, though their lines do not
        say so."""
        self._is_retried |= have_any(self.rows.flaws_A, flaws)
        if unparsed is not None:
            self._is_retried |= np.isin(self.rows.keys_A, unparsed)

    def finished(self, rows: InputScan) -> np.ndarray:
        """Which of the input's rows need no work any more."""
        return np.isin(rows.keys, self.rows.keys_A[~self._is_retried])

    def answered(self, keys: np.ndarray) -> np.ndarray:
        """Which of these rows have an answer that stays."""
        return np.isin(keys, self.rows.keys_A[~self._is_retried & ~self.rows.failed_A])

    def flaws_of(self, key: bytes) -> Flaw | None:
        """The flaws of the row with this key in the files; None: there is no such row."""
        (found,) = np.nonzero(self.rows.keys_A == np.bytes_(key))
        return Flaw(int(self.rows.flaws_A[found[0]])) if len(found) else None

    def custom_id(self, name: bytes) -> str | None:
        """The custom_id of the row in the files whose key starts with `name`; None: there is none, or it has none."""
        (found,) = np.nonzero(np.char.startswith(self.rows.keys_A, name))
        custom_id: str | None = self.rows.row(int(found[0]))["custom_id"] if len(found) else None
        return custom_id

    def num_retried_failures(self) -> int:
        """Failed rows of earlier runs that are tried again."""
        return int((self.rows.failed_A & self._is_retried).sum())

    def num_replaced(self) -> int:
        """Answers of earlier runs that are tried again."""
        return int((~self.rows.failed_A & self._is_retried).sum())

    def kept_counts(self) -> Counts:
        """The counts of the rows that stay as they are."""
        return self.rows.counts(~self._is_retried)

    def open_writers(self, manifest: Manifest, tally: Counts, *, keeps_rows: bool = False) -> Delivery:
        """Leave what is kept, whole, and open the files for more, which are counted in `tally`. `keeps_rows`: `rows`
        can be read as before."""
        if self.path is None:
            self.state.save(manifest)
            return Delivery(tally, AnswerWriter(os.dup(self._places[0].descriptor), self.name))
        with clear_file_errors(f"output {self.name}"):
            if self._overwrite:
                self._remove_files(self.path)
            else:
                self.rows.refuse_changes()
                # First: an input and settings that are new on disk never have rows of the old ones beside them.
                self._drop_rows(self.path)
            self.state.save(replace(manifest, error_file=self._error_name, retry=self._retry))
            if self.error_path is not None:
                # Second: the manifest knows the error file before a row is in it.
                self._move_failed(self.error_path)
            if not keeps_rows:
                self.rows.close()
            descriptors = list(map(open_for_rows, self.paths))
            for path in self.paths:
                sync_folder(path.parent)
        return Delivery(tally, *(AnswerWriter(descriptor, place.name, path=place.path)
                                 for descriptor, place in zip(descriptors, self._places, strict=True)))

    def _remove_files(self, output: Path) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)
            remove_torn_version(path)
            sync_folder(path.parent)
        for path in (manifest_path(output), replaced_path(output)):
            path.unlink(missing_ok=True)
        self.state.clear()
        sync_folder(output.parent)

    def _drop_rows(self, output: Path) -> None:
        """Leave the lines that count and are not tried again, answers in the first file. Answers that are tried again
        are copied before."""
        rows, stays = self.rows, ~self._is_retried
        with clear_file_errors(f"replaced answers {replaced_path(output)}"):
            rows.append_to(replaced_path(output), self._is_retried & ~rows.failed_A)
        for path in self.paths:
            remove_torn_version(path)
        rows.rewrite(0, np.flatnonzero(stays & (rows.files_A == 0)))
        if self.error_path is not None:
            rows.append_to(output, stays & ~rows.failed_A & (rows.files_A == 1))
            rows.rewrite(1, np.flatnonzero(stays & rows.failed_A & (rows.files_A == 1)))

    def _move_failed(self, errors: Path) -> None:
        """Failed rows go where they belong: they are in the other file before they leave the first."""
        rows = self.rows
        if (rows.failed_A & ~self._is_retried & (rows.files_A == 0)).any():
            rows.scan()
            rows.append_to(errors, rows.failed_A & (rows.files_A == 0))
            rows.rewrite(0, np.flatnonzero(~rows.failed_A & (rows.files_A == 0)))

    def sort(self, rows: InputScan) -> None:
        """Bring the files, in which every row is, into the order of the input.

        Rows are always written as they finish. Killed here, a file is whole in one of both orders, and the same
        command comes here again.
        """
        with self._scanned_now("being put in order") as found:
            places = found.find(rows.keys)
            num_missing = int((places < 0).sum())
            if num_missing:
                raise OutputLostError(
                    f"output {self.name}: {num_missing} of {rows.num_rows} rows have gone from it since "
                    "they were written; the same command answers them again")
            for file in range(len(self.paths)):
                found.rewrite(file, places[found.files_A[places] == file])

    def counts_now(self) -> Counts:
        """The counts of the rows that are in the files now."""
        with self._scanned_now() as found:
            return found.counts()

    @contextmanager
    def _scanned_now(self, doing: str = "") -> Iterator[AnswerFile]:
        what = f"output {self.name}" + (f", {doing}" if doing else "")
        with late_file_errors(what), AnswerFile(self.paths, file_errors=late_file_errors) as found:
            yield found.scan()
