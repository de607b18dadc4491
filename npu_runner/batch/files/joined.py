"""The rows of an input beside their answers in the output, read where they stand. Knows nothing of what a page shows.

Without an input, answers stand alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.row_book import InputScan
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.batch.rows.flaws import flaws_of_row
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.errors import RequestError


class Joined:
    """`file` and `rows`: the input, None where it is not there. `answers` were scanned, and stay open as long as pairs
    are read. A request above `max_row_bytes` is not read."""

    def __init__(self, file: InputFile | None, rows: InputScan | None, answers: AnswerFile, max_row_bytes: int):
        self._file = file
        self._answers = answers
        self._max_row_bytes = max_row_bytes
        # R rows of the input, or all answers
        self.answers_R = np.arange(answers.num_rows) if rows is None else answers.find(rows.keys)
        """The place of each row's answer; -1: it has none."""
        self.num_rows = len(self.answers_R)
        self.places = np.flatnonzero(self.answers_R >= 0)
        """Numbers of the rows that have an answer."""

    @property
    def has_input(self) -> bool:
        return self._file is not None

    def pairs(self, places: np.ndarray) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Request and result of these rows, which rise; an unreadable request is empty."""
        wanted_R = np.zeros(self.num_rows, dtype=bool)
        wanted_R[places] = True
        requests: Iterable[dict[str, Any]] = itertools.repeat({}, len(places))
        if self._file is not None:
            requests = requests_in(self._file, self._max_row_bytes, wanted_R)
        for request, answer in zip(requests, self.answers_R[places].tolist(), strict=True):
            yield request, self._answers.row(answer)


def requests_in(file: InputFile, max_row_bytes: int, wanted_R: np.ndarray | None = None) -> Iterator[dict[str, Any]]:
    """The requests of an input, or those that are True; one that the job refuses to read is empty."""
    for row in file.rows(wanted_R):
        try:
            yield {} if row.num_bytes > max_row_bytes else read_json(file.source.read(row))
        except (RequestError, RecursionError):
            yield {}


def unparsed_keys(joined: Joined, rows: InputScan, has_rule_of_job: bool) -> np.ndarray:
    """Keys of the answers that a rule asked to be JSON and that are none, whether their lines say so or not."""
    found = [place for place, (request, answer) in zip(joined.places, joined.pairs(joined.places), strict=True)
             if Flaw.UNPARSED in flaws_of_row(request, answer, has_rule_of_job=has_rule_of_job)]
    return rows.keys[found]
