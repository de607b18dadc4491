"""The answers of a job as they lie in its output and its error file, at work or not: each row once, by its name.

24 bytes a row are held, never the rows. Knows nothing of what an answer says.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from npu_runner.batch.files.input_file import keys_array
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.rows.input_row import row_key
from npu_runner.tables.lines import LinesFile

Answer = dict[str, Any]


class AnswerFiles:
    """Open until left. `look` is called with each result row while they are read, and returns how many rows of a table
    it becomes; a row that raises one of `_FAULTS` there is no result row."""

    # A answers
    keys_A: np.ndarray
    """Of each answer, in the order of the files; each key once."""
    failed_A: np.ndarray
    counts_A: np.ndarray
    """What `look` has returned."""

    def __init__(self, output: str, max_row_bytes: int):
        self.name = output
        self.manifest = Manifest.load(Path(os.path.realpath(output)))
        self._files = [LinesFile(f"answers {output}", output, max_row_bytes)]
        self.num_broken_lines = 0
        """Whole lines that are no result rows."""
        self.num_repeated = 0
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
        keys, failed, starts, counts, files = bytearray(), bytearray(), array("Q"), array("I"), bytearray()
        for number, file in enumerate(self._files):
            for start, line in file.lines(may_be_torn=True):
                found = _looked_at(line, look)
                if found is None:
                    self.num_broken_lines += bool(line.strip())
                    continue
                keys += found[0]
                failed.append(found[1])
                counts.append(found[2])
                starts.append(start)
                files.append(number)
        self.keys_A, self.failed_A = keys_array(keys), np.frombuffer(failed, dtype=bool)
        self.counts_A = np.frombuffer(counts, dtype=np.uint32) if counts else np.zeros(0, np.uint32)
        self._starts_A = np.frombuffer(starts, dtype=np.uint64) if starts else np.zeros(0, np.uint64)
        self._files_A = np.frombuffer(files, dtype=np.uint8)
        if has_twins(self.keys_A):
            self._keep(_first_of_each(self.keys_A, self.failed_A))

    def _keep(self, places: np.ndarray) -> None:
        self.num_repeated = len(self.keys_A) - len(places)
        self.keys_A, self.failed_A, self.counts_A = self.keys_A[places], self.failed_A[places], self.counts_A[places]
        self._starts_A, self._files_A = self._starts_A[places], self._files_A[places]

    def line(self, place: int) -> bytes:
        """The answer with this number, as it stands in its file."""
        return self._files[self._files_A[place]].line_at(int(self._starts_A[place]))

    def answer(self, place: int) -> Answer:
        answer: Answer = json.loads(self.line(place))
        return answer


_FAULTS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What a line raises that is no result row."""


def _looked_at(line: bytes, look: Callable[[Answer], int]) -> tuple[bytes, bool, int] | None:
    try:
        answer = json.loads(line)
        return key_of(answer), has_failed(answer), look(answer)
    except _FAULTS:
        return None


def key_of(answer: Answer) -> bytes:
    custom_id = answer["custom_id"]
    return row_key(None, int(answer["error"]["line"])) if custom_id is None else row_key(custom_id, 0)


def has_failed(answer: Answer) -> bool:
    return answer["error"] is not None or answer["response"]["status_code"] != 200


def has_twins(keys: np.ndarray) -> bool:
    ordered = np.sort(keys)
    return bool((ordered[1:] == ordered[:-1]).any())


def _first_of_each(keys: np.ndarray, failed: np.ndarray) -> np.ndarray:
    """Places of the rows that count, in order: of several with one name an answered one, else the first."""
    order = np.lexsort((np.arange(len(keys)), failed, keys))
    ordered = keys[order]
    is_first = np.ones(len(keys), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return np.sort(order[is_first])
