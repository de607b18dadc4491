"""Rows that wait until an equal row is answered, and are then written with its answer.

The first open row of a group is served, unless an earlier run has answered one: then that line is read. Whether an
answer may be copied is known by its replica. Knows nothing of queues or of how rows are served.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.row_book import InputScan, RowBook
from npu_runner.batch.rows.attempt import ATTEMPTS
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.endpoints import answer_of, flaws_of
from npu_runner.batch.rows.equal import renamed_answer
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.batch.rows.openai_format import parse_row, read_json
from npu_runner.batch.rows.openai_response import FAULTS, is_as_expected
from npu_runner.batch.rows.preprocessing import has_one_answer
from npu_runner.batch.rows.shape import name_of, parse_json
from npu_runner.errors import RequestError
from npu_runner.serving.replica import FinishedRow

_NO_ROWS = np.zeros(0, dtype=np.int64)


class _Answer(NamedTuple):
    """An answer that is copied. `text`: what a row's `expected` is compared with; None: this is compared with none."""

    data: bytes
    name: str
    text: str | None
    counts: Counts
    """The counts of a copy of it, but for what the copy's row expects."""

    @classmethod
    def from_line(cls, data: bytes) -> _Answer | None:
        """None: it is the row's own, or this version knows no such answer."""
        try:
            fields: dict[str, Any] = parse_json(data.decode())
            flaws, body = flaws_of(fields), fields["response"]["body"]
            usage = body["usage"]
            details, num_tokens = usage.get("completion_tokens_details", {}), usage["prompt_tokens"]
            counts = Counts(
                num_answered=1, num_not_whole=int(flaws != 0), num_cut_off=int(Flaw.CUT_OFF in flaws),
                num_repetition=int(Flaw.REPETITION in flaws), num_unparsed=int(Flaw.UNPARSED in flaws),
                num_prompt_tokens=num_tokens, num_cached_tokens=num_tokens,
                num_completion_tokens=usage.get("completion_tokens", 0),
                num_reasoning_tokens=details.get("reasoning_tokens", 0), num_copied=1)
            # Later attempts have seeds of the row's name.
            is_own = Flaw.ERRORS in flaws or ATTEMPTS in fields
            return None if is_own else cls(data, fields["custom_id"], answer_of(body), counts)
        except FAULTS:
            return None


# F rows that wait, E rows that equal another one
class EqualRows:
    """The groups of equal rows of a job that have work left. Rows are known by their places in the input."""

    def __init__(self, book: RowBook, followers_F: np.ndarray = _NO_ROWS, leaders_F: np.ndarray = _NO_ROWS,
                 earlier: Sequence[int] = ()):
        """`followers_F`: rows that wait; `leaders_F`: the row that each waits for, in order. `earlier`: leaders that
        earlier runs have answered."""
        self._book = book
        self._followers_F, self._leaders_F = followers_F, leaders_F
        self._earlier = deque(earlier)
        self._read: Callable[[int], _Answer | None] | None = None
        self._ready: deque[tuple[_Answer | None, deque[int]]] = deque()
        """Answers with the rows that waited for them; None: these have to be served themselves."""

    @classmethod
    def from_scan(cls, book: RowBook, scan: InputScan, is_answered_E: np.ndarray, max_row_bytes: int) -> EqualRows:
        """Rows of more than `max_row_bytes` are left out. `is_answered_E`: by earlier runs, under the same settings."""
        is_open_E = book.has(scan.equal_E)
        is_usable = (is_open_E | is_answered_E) & (scan.sizes[scan.equal_E] <= max_row_bytes)
        rows, groups, is_open = (each[is_usable] for each in (scan.equal_E, scan.groups_E, is_open_E))
        order = np.lexsort((rows, is_open, groups))  # an answered row leads its group
        rows, groups, is_open = rows[order], groups[order], is_open[order]
        is_first = np.ones(len(rows), dtype=bool)
        is_first[1:] = groups[1:] != groups[:-1]
        leads = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
        (waits,) = np.nonzero(~is_first & is_open)
        waits = waits[np.argsort(rows[leads[waits]], kind="stable")]
        leads = leads[waits]
        return cls(book, rows[waits], rows[leads], np.unique(rows[leads[~is_open[leads]]]).tolist())

    @property
    def has_earlier(self) -> bool:
        """Answers of earlier runs are to be read."""
        return bool(self._earlier)

    @property
    def is_all(self) -> bool:
        """Every row that is left waits. Rows that lead others do not wait, so earlier runs have answered these."""
        return 0 < len(self._followers_F) == self._book.num_rows

    @property
    def has_ready(self) -> bool:
        """Copies can be made now."""
        return bool(self._ready or (self._earlier and self._read))

    def waiting(self) -> bytes:
        """A byte per row of the book, 1 if it waits; nothing: no row does."""
        waits = np.zeros(self._book.num_rows if len(self._followers_F) else 0, dtype=np.uint8)
        waits[self._book.indices(self._followers_F)] = 1
        return waits.tobytes()

    def leave_out(self, index: int) -> None:
        """This row does not wait, and no copy is made for it."""
        stays = self._followers_F != self._book.place(index)
        self._followers_F, self._leaders_F = self._followers_F[stays], self._leaders_F[stays]

    def record(self, row: FinishedRow) -> None:
        """A row is done: those that wait for it are ready."""
        if followers := self._of(self._book.place(row.number)):
            self._ready.append((_Answer.from_line(row.data) if row.may_be_copied else None, followers))

    def read_earlier(self, output: AnswerFile, keys: np.ndarray, settings: Mapping[str, Any], *,
                     with_cached_tokens: bool) -> None:
        """Answers of earlier runs are read from `output`, one after the other, as their copies are made. `keys`: of
        the rows of the input. `settings`: those of the job. `with_cached_tokens`: JobStamp's."""
        lines = dict(zip(self._earlier, output.find(keys[list(self._earlier)]).tolist(), strict=True))
        prefix = "generation_defaults."
        defaults = {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}

        def read(place: int) -> _Answer | None:
            data, is_same = output.data(lines[place]), False
            if (b'"prompt_tokens_details":' in data) == with_cached_tokens:
                with contextlib.suppress(RequestError):  # an earlier version has answered the row
                    body = parse_row(read_json(self._book.data_at(place)))
                    is_same = has_one_answer(body, body.to_params(defaults, 0))
            return _Answer.from_line(data) if is_same else None

        self._read = read

    def copies(self, num_rows: int) -> Iterator[tuple[int, FinishedRow | None]]:
        """At most `num_rows` of the rows that are ready, by index, with their result row; None: the row has to be
        served itself."""
        for _ in range(num_rows):
            if not self._ready and self._earlier and self._read:
                place = self._earlier.popleft()
                if followers := self._of(place):
                    self._ready.append((self._read(place), followers))
            if not self._ready:
                return
            answer, followers = self._ready[0]
            place = followers.popleft()
            index = int(self._book.indices(np.array([place]))[0])
            yield index, None if answer is None else self._copy(answer, place, index)
            if not followers:
                self._ready.popleft()

    def _of(self, leader: int) -> deque[int]:
        first, end = np.searchsorted(self._leaders_F, [leader, leader + 1])
        return deque(self._followers_F[first:end].tolist())

    def _copy(self, answer: _Answer, place: int, index: int) -> FinishedRow | None:
        row, counts = self._book.data_at(place), answer.counts
        name = name_of(row)
        data = None if name is None else renamed_answer(answer.data, answer.name, name, counts.num_prompt_tokens)
        if data is None:
            return None
        if answer.text is not None and (b"expected" in row or b"\\u" in row):
            try:
                expected = parse_row(read_json(row)).expected
            except RequestError:
                return None
            is_right = expected is not None and is_as_expected(answer.text, expected)
            counts = replace(counts, num_expected=int(expected is not None), num_as_expected=int(is_right))
        return FinishedRow(index, counts, data)
