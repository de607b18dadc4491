"""The file of answers: what it holds already, how it is repaired, and how rows are added so that none is lost.

Knows nothing of what an answer says, beyond its name, whether it is an error, and how it ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.durable import (
    clear_file_errors,
    explain_file_error,
    remove_torn_version,
    replacing,
    sync_folder,
)
from npu_runner.batch.files.input_file import keys_array
from npu_runner.batch.files.names import lock_path
from npu_runner.batch.files.place import Place
from npu_runner.batch.rows.openai_response import FAULTS, is_cut_off, is_repetition, key_of_answer
from npu_runner.errors import ConfigError, JobError, OutputLostError

_UNNAMED = "unknown"
# A process that is gone may have left a child that is not another program yet and holds what it held.
_LEAVING_SECONDS = 5.0
_LOOKING_SECONDS = 0.1


@dataclass(frozen=True)
class OutputScan:
    """The rows of an output file. `starts`: where each row begins, in bytes; `failed`: which are errors."""

    keys: np.ndarray
    starts: np.ndarray
    failed: np.ndarray
    num_broken_lines: int
    """Lines that are no result row, or repeat one. A crash tears at most the last line; a power cut may leave more."""
    num_bytes: int
    codes: list[str]
    """Of the failed rows, in order."""
    num_cut_off: int
    """Answers of which a completion ended at its limit of tokens."""
    num_repetition: int
    """Answers of which a completion ended because it repeated itself."""

    @property
    def num_rows(self) -> int:
        return len(self.keys)

    @property
    def num_failed(self) -> int:
        return int(self.failed.sum())


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """What the rows of an output are."""

    num_answered: int = 0
    num_cut_off: int = 0
    num_repetition: int = 0
    failures_by_code: Counter[str] = field(default_factory=Counter)

    @property
    def num_failed(self) -> int:
        return self.failures_by_code.total()

    @property
    def num_rows(self) -> int:
        return self.num_answered + self.num_failed


def counts_of(scans: Sequence[OutputScan]) -> RowCounts:
    """Of an output, and of its error file behind it, where it has one.

    A failed row that stands in both, because a job was killed while it moved them, counts once; one that is answered
    does not count as failed.
    """
    answered = scans[0].keys[~scans[0].failed]
    codes = [code for scan in scans for code in scan.codes]
    failed, places = np.unique(np.concatenate([scan.keys[scan.failed] for scan in scans]), return_index=True)
    return RowCounts(
        num_answered=len(answered), num_cut_off=scans[0].num_cut_off, num_repetition=scans[0].num_repetition,
        failures_by_code=Counter(codes[place] for place in places[~np.isin(failed, answered)]))


class OutputLock:
    """Holds `<output>.lock` while a job runs; a second job on the output gets a ConfigError with the holder's pid.

    One whose holder is gone is waited for, for seconds.
    """

    def __init__(self, output: Path):
        self._path = lock_path(output)
        self._output = output
        self._descriptor = -1

    def __enter__(self) -> OutputLock:
        began = time.monotonic()
        while self._descriptor < 0:
            descriptor = _open_lock(self._path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(descriptor)
                os.close(descriptor)
                # A job that looks from outside (job_at_work) has a lock for a moment, too.
                patience = _LEAVING_SECONDS if _is_gone(holder) else _LOOKING_SECONDS
                if time.monotonic() < began + patience:
                    time.sleep(0.01)
                    continue
                raise ConfigError(
                    f"output {self._output}: another job (pid {holder}) is writing it; wait or choose another output"
                ) from None
            # The holder before us may have removed the file between our open and our lock.
            if _is_still_there(self._path, descriptor):
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        try:
            with clear_file_errors(f"lock {self._path}"):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._descriptor)


def job_at_work(output: Path) -> str | None:
    """The pid of the job that holds the lock of this output; None: none does. Nothing is made or changed."""
    try:
        descriptor = os.open(lock_path(output), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    finally:
        os.close(descriptor)
    return None


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"


def _is_gone(holder: str) -> bool:
    try:
        os.kill(int(holder), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OverflowError, PermissionError):
        return False
    return False


def scan_output(path: Path, end: int | None = None) -> OutputScan:
    """Read an output file once, to its end or so many bytes. One that does not exist has no rows."""
    keys, starts, failed = bytearray(), array("Q"), bytearray()
    codes: list[str] = []
    seen: set[bytes] = set()
    position = num_broken = num_cut_off = num_repetition = 0
    for line in _lines_of(path):
        if end is not None and position + len(line) > end:
            break
        row = _row_of(line)
        if row is None or row.key in seen:
            num_broken += 1
        else:
            seen.add(row.key)
            keys += row.key
            starts.append(position)
            failed.append(row.code is not None)
            codes += [] if row.code is None else [row.code]
            num_cut_off += row.is_cut_off
            num_repetition += row.is_repetition
        position += len(line)
    return OutputScan(
        keys_array(keys), np.frombuffer(starts, dtype=np.uint64) if starts else np.zeros(0, np.uint64),
        np.frombuffer(failed, dtype=bool), num_broken, position, codes, num_cut_off, num_repetition)


def keep_rows(path: Path, scan: OutputScan, wanted: np.ndarray) -> None:
    """Leave only these rows in the file, and whole ones."""
    if scan.num_broken_lines or not wanted.all():
        rewrite_rows(path, scan, np.flatnonzero(wanted))


def rewrite_rows(path: Path, scan: OutputScan, order: Iterable[int]) -> None:
    """Replace the file by these of its rows in this order. Killed at any moment, the old or the new file is there."""
    with open(path, "rb") as file, replacing(path) as copy:
        for index in order:
            file.seek(int(scan.starts[index]))
            row = file.readline()
            if not row.endswith(b"\n"):
                raise OutputLostError(f"output {path}: was cut while it was rewritten; run the same command again")
            copy.write(row)


def rows_in_order(scan: OutputScan, keys: np.ndarray) -> np.ndarray:
    """For every key the number of its row in the output; -1 where there is none."""
    return places_of(keys, scan.keys)


def places_of(keys: np.ndarray, among: np.ndarray) -> np.ndarray:
    """For every key its place among others, each of which is there once; -1 where it is not."""
    if not len(among):
        return np.full(len(keys), -1, dtype=np.int64)
    by_key = np.argsort(among, kind="stable")
    places = np.searchsorted(among, keys, sorter=by_key)
    found = by_key[np.minimum(places, len(among) - 1)]
    return np.where(among[found] == keys, found, -1)


def read_row(file: BinaryIO, start: int) -> dict[str, Any]:
    """The result row that begins there."""
    file.seek(start)
    row: dict[str, Any] = json.loads(file.readline())
    return row


def _open_lock(path: Path) -> int:
    """Raises ConfigError where something else has the name: the pid is written into it, wherever a link leads."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _no_lock(path) from error
        raise explain_file_error(f"lock {path}", error) from error
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise _no_lock(path)


def _no_lock(path: Path) -> ConfigError:
    return ConfigError(f"lock {path}: is a link, or no file, so no job has made it; remove it, or choose another name")


def _is_still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lines_of(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        yield from file


class _Row(NamedTuple):
    key: bytes
    code: str | None
    """Of its error; None: it is an answer."""
    is_cut_off: bool
    is_repetition: bool


def _row_of(line: bytes) -> _Row | None:
    """None where the line is not a whole result row."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
        key, error = key_of_answer(row), row["error"]
        if error is not None:
            return _Row(key, _code_of(error), is_cut_off=False, is_repetition=False)
        return _Row(key, None, _is_so(row, is_cut_off), _is_so(row, is_repetition))
    except FAULTS:
        return None


def _code_of(error: Any) -> str:
    code = error.get("code") if isinstance(error, dict) else None
    return sys.intern(code) if isinstance(code, str) else _UNNAMED  # a million failed rows have few codes


def _is_so(row: dict[str, Any], of_body: Callable[[Any], bool]) -> bool:
    with contextlib.suppress(KeyError, TypeError, AttributeError):  # no answer of ours
        return of_body(row["response"]["body"])
    return False


class RowsFile:
    """One file of result rows that a job owns: locked, looked at, repaired, opened for more, put in order.

    Entered while a job runs; nothing is changed before `open`. `scan` is what `look` has found. Raises ConfigError for
    a stream.
    """

    scan: OutputScan

    def __init__(self, place: Place):
        if place.path is None:
            raise ConfigError(f"{place.title}: is no file; a stream cannot be resumed")
        self._place = place
        # Through links, so that two names of one file share one lock, and a link stays a link.
        self.path = place.path
        self.name = place.name
        self._lock = OutputLock(self.path)
        self._seen: tuple[int, ...] | None = None

    @property
    def title(self) -> str:
        return self._place.title

    def __enter__(self) -> RowsFile:
        with clear_file_errors(self.title):
            self._place.try_own_names()
        self._lock.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()

    def look(self) -> None:
        with clear_file_errors(self.title):
            self._seen = _state_of(self.path)
            self.scan = scan_output(self.path)

    def try_to_append(self) -> None:
        """Raises ConfigError where rows could not be added to the file."""
        if self._seen is not None:
            with clear_file_errors(self.title):
                os.close(_open(self.path, 0))

    def refuse_changes(self) -> None:
        """Raises JobError where the file is not what `look` has found."""
        if _state_of(self.path) != self._seen:
            raise JobError(f"{self.title}: was changed while the model loaded; run the same command again")

    def replace(self) -> None:
        """Begin with nothing."""
        self.path.unlink(missing_ok=True)
        remove_torn_version(self.path)

    def keep(self, wanted: np.ndarray) -> None:
        """Leave only these of the rows that `look` has found, and whole ones."""
        remove_torn_version(self.path)
        keep_rows(self.path, self.scan, wanted)

    def append_from(self, other: RowsFile, wanted: np.ndarray) -> None:
        """Add these rows of another file, whole and on disk."""
        if not wanted.any():
            return
        with open(other.path, "rb") as source, open(_open(self.path), "ab") as target:
            for index in np.flatnonzero(wanted):
                source.seek(int(other.scan.starts[index]))
                target.write(source.readline())
            target.flush()
            os.fsync(target.fileno())

    def open(self) -> AnswerWriter:
        descriptor = _open(self.path)
        sync_folder(self.path.parent)
        return AnswerWriter(descriptor, self.name, path=self.path)

    def put_in_order(self, scan: OutputScan, found: np.ndarray) -> None:
        """`found`: for every row of the input its number in the file now (`scan`), -1 where it is not there."""
        order = found[found >= 0]
        if scan.num_broken_lines or not np.array_equal(order, np.arange(scan.num_rows)):
            rewrite_rows(self.path, scan, order)


def _open(path: Path, create: int = os.O_CREAT) -> int:
    """For more rows. Links were followed when the place was found: one that stands there now is somebody else's."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | create, 0o666)


def _state_of(path: Path) -> tuple[int, ...] | None:
    """What changes when somebody writes to a file or puts another in its place; None: there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
