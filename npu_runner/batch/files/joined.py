"""The rows of an input beside their answers in the output, read where they stand. Knows nothing of what a page shows.

Without an input, answers stand alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.output_scan import OutputScan, read_row, rows_in_order, scan_output
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.batch.rows.flaws import flaws_of_row
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.errors import RequestError
from npu_runner.serving.replica import RawRow


class Joined:
    """`file` and `rows`: the input, None where it is not there. `outputs`: the file of answers, and that of failed
    rows behind it, where there is one. Of requests above `max_row_bytes` nothing is read. `ends`: bytes of
    each output that are read; None: all."""

    def __init__(self, file: InputFile | None, rows: InputScan | None, outputs: Sequence[Path], max_row_bytes: int,
                 ends: Sequence[int] | None = None):
        self._file = file
        self._outputs = outputs
        self._max_row_bytes = max_row_bytes
        scans = [scan_output(output, None if ends is None else ends[number]) for number, output in enumerate(outputs)]
        keys = _keys_of(scans) if rows is None else rows.keys
        self.num_rows = len(keys)
        self._starts = np.zeros(len(keys), dtype=np.int64)
        self._output_of = np.full(len(keys), -1, dtype=np.int8)
        failed = np.zeros(len(keys), dtype=bool)
        for number, scan in enumerate(scans):
            found = rows_in_order(scan, keys)
            here = np.flatnonzero(found >= 0)
            # Of a row in both files an answer counts more than a failure, else the first.
            here = here[(self._output_of[here] < 0) | (failed[here] & ~scan.failed[found[here]])]
            self._starts[here] = scan.starts[found[here]]
            self._output_of[here] = number
            failed[here] = scan.failed[found[here]]
        self.places = np.flatnonzero(self._output_of >= 0)
        """Numbers of the rows that have an answer."""

    @property
    def has_input(self) -> bool:
        return self._file is not None

    def pairs(self, places: np.ndarray) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Request and result of these rows, which rise; an unreadable request is empty."""
        wanted = np.zeros(len(self._starts), dtype=bool)
        wanted[places] = True
        rows: Iterable[RawRow | None] = itertools.repeat(None, len(places))
        with ExitStack() as opened:
            answers = [opened.enter_context(open(output, "rb")) for output in self._outputs]
            for place, row in zip(places, rows if self._file is None else self._file.rows(wanted), strict=True):
                yield self._request(row), read_row(answers[self._output_of[place]], int(self._starts[place]))

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


def _keys_of(scans: list[OutputScan]) -> np.ndarray:
    """Each row once: a job that was killed while it moved failed rows leaves some in both files."""
    first = scans[0].keys
    return np.concatenate([first, *(scan.keys[~np.isin(scan.keys, first)] for scan in scans[1:])])
