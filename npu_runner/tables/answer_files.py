"""The answers of a job as they lie in its output and its error file, at work or not: each row once, by its name.

24 bytes a row are held, never the rows. Knows nothing of what an answer says.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npu_runner.batch.files.input_file import keys_array
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.output_scan import places_that_count
from npu_runner.batch.rows.openai_response import FAULTS, has_failed, key_of_answer
from npu_runner.batch.rows.shape import parse_json
from npu_runner.errors import ConfigError
from npu_runner.tables.lines import LinesFile

Answer = dict[str, Any]


class Line(NamedTuple):
    """A whole line of one of the files. `number`: from 1; 0 where it is not kept."""

    file: int
    start: int
    number: int = 0


class AnswerFiles:
    """Open until left. `look` is called with each result row while they are read, and returns how many lines of a table
    it becomes; a row for which it raises one of FAULTS is no result row."""

    # A answers
    keys_A: np.ndarray
    """Of each answer, in the order of the files; each key once."""
    failed_A: np.ndarray
    counts_A: np.ndarray
    """The numbers that `look` has returned."""

    def __init__(self, output: str, max_row_bytes: int):
        self.name = output
        self.manifest = Manifest.load(Path(os.path.realpath(output)))
        self._files = [LinesFile(f"answers {output}", output, max_row_bytes)]
        self.broken: list[Line] = []
        """Whole lines that are no result rows."""
        self.torn: list[Line] = []
        """Last lines without an end: a job writes them now, or was killed while it did."""
        self.repeated: list[Line] = []
        """Rows that stand there more than once, or failed and were answered since."""
        errors = self._error_file()
        if errors is not None and errors.is_file():
            self._files.append(LinesFile(f"error file {errors}", str(errors), max_row_bytes))

    def _error_file(self) -> Path | None:
        name = None if self.manifest is None else self.manifest.error_file
        return None if name is None else Path(os.path.realpath(self.name)).parent / name

    @property
    def read_names(self) -> list[tuple[str, str | Path | None]]:
        """What is read, for the check of places."""
        return [("answers", self.name), ("error file", self._error_file())]

    def __enter__(self) -> AnswerFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def scan(self, look: Callable[[Answer], int]) -> None:
        """Read all of them once. Raises ConfigError for a file that has lines, and no result row among them."""
        keys, failed, starts, counts, files = bytearray(), bytearray(), array("Q"), array("I"), bytearray()
        for number, file in enumerate(self._files):
            num_broken = len(self.broken)
            for line_number, (start, line) in enumerate(file.lines(), 1):
                is_whole = line.endswith(b"\n")
                found = _looked_at(line, look) if is_whole else None
                if found is None:
                    lines = self.broken if is_whole else self.torn
                    lines += [Line(number, start, line_number)] if line.strip() else []
                    continue
                keys += found[0]
                failed.append(found[1])
                counts.append(found[2])
                starts.append(start)
                files.append(number)
            num_broken = len(self.broken) - num_broken
            if num_broken and number not in files:
                raise ConfigError(f"{file.title}: none of its {num_broken} lines is a result row; name the output of a "
                                  "job")
        self.keys_A, self.failed_A = keys_array(keys), np.frombuffer(failed, dtype=bool)
        self.counts_A = np.frombuffer(counts, dtype=np.uint32) if counts else np.zeros(0, np.uint32)
        self._starts_A = np.frombuffer(starts, dtype=np.uint64) if starts else np.zeros(0, np.uint64)
        self._files_A = np.frombuffer(files, dtype=np.uint8)
        if has_twins(self.keys_A):
            self._keep(places_that_count(self.keys_A, self.failed_A))

    def _keep(self, places: np.ndarray) -> None:
        is_left = np.ones(len(self.keys_A), dtype=bool)
        is_left[places] = False
        self.repeated = list(map(self.place, np.flatnonzero(is_left).tolist()))
        self.keys_A, self.failed_A, self.counts_A = self.keys_A[places], self.failed_A[places], self.counts_A[places]
        self._starts_A, self._files_A = self._starts_A[places], self._files_A[places]

    def place(self, number: int) -> Line:
        """Where the answer with this number stands."""
        return Line(int(self._files_A[number]), int(self._starts_A[number]))

    def bytes_of(self, line: Line) -> bytes:
        return self._files[line.file].line_at(line.start)

    def line(self, place: int) -> bytes:
        """The answer with this number, as it stands in its file."""
        return self.bytes_of(self.place(place))

    def answer(self, place: int) -> Answer:
        answer: Answer = parse_json(self.line(place).decode())
        return answer

    def title_of(self, line: Line) -> str:
        """The words that messages have for the line's file."""
        return self._files[line.file].title


def _looked_at(line: bytes, look: Callable[[Answer], int]) -> tuple[bytes, bool, int] | None:
    try:
        answer = parse_json(line.decode())
        return key_of_answer(answer), has_failed(answer), look(answer)
    except FAULTS:
        return None


def has_twins(keys: np.ndarray) -> bool:
    ordered = np.sort(keys)
    return bool((ordered[1:] == ordered[:-1]).any())
