"""The rows of an input beside their answers in the output, read where they stand. Knows nothing of what a page shows.

Without an input, answers stand alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.batch.rows.flaws import flaws_of_row
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.errors import RequestError
from npu_runner.serving.replica import RawRow


class Joined:
    """`file` and `rows`: the input, None where it is not there. `answers` were scanned, and stay open as long as pairs
    are read. A request above `max_row_bytes` is not read."""

    def __init__(self, file: InputFile | None, rows: InputScan | None, answers: AnswerFile, max_row_bytes: int):
        self._file = file
        self._answers = answers
        self._max_row_bytes = max_row_bytes
        # R rows of the input, or all answers
        self._answers_R = np.arange(answers.num_rows) if rows is None else answers.find(rows.keys)
        self.num_rows = len(self._answers_R)
        self.places = np.flatnonzero(self._answers_R >= 0)
        """Numbers of the rows that have an answer."""

    @property
    def has_input(self) -> bool:
        return self._file is not None

    def pairs(self, places: np.ndarray) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Request and result of these rows, which rise; an unreadable request is empty."""
        wanted = np.zeros(self.num_rows, dtype=bool)
        wanted[places] = True
        rows: Iterable[RawRow | None] = itertools.repeat(None, len(places))
        for place, row in zip(places, rows if self._file is None else self._file.rows(wanted), strict=True):
            yield self._request(row), self._answers.row(int(self._answers_R[place]))

    def _request(self, row: RawRow | None) -> dict[str, Any]:
        if self._file is None or row is None or row.num_bytes > self._max_row_bytes:
            return {}
        try:
            return read_json(self._file.source.read(row))
        except RequestError:
            return {}


def unparsed_keys(joined: Joined, rows: InputScan, has_rule_of_job: bool) -> np.ndarray:
    """Keys of the answers that a rule asked to be JSON and that are none, whether their lines say so or not."""
    found = [place for place, (request, answer) in zip(joined.places, joined.pairs(joined.places), strict=True)
             if Flaw.UNPARSED in flaws_of_row(request, answer, has_rule_of_job=has_rule_of_job)]
    return rows.keys[found]
