"""The attempts at the rows that a replica holds: which step of the ladder is next, and which attempt counts at last.

Nothing of it leaves the replica: a row that begins again, in another replica or run, begins with its first attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from npu_runner.batch.rows.attempt import Change, NoPlaceError
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.batch.rows.ladder import EMPTY, MOST_ATTEMPTS, ROTATED, UNPARSED, Ladder
from npu_runner.errors import RequestError
from npu_runner.readers.answers.block import AnswerError
from npu_runner.readers.answers.parsers import parse_answer
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PageFacts
from npu_runner.serving.endpoint import Prepared
from npu_runner.serving.replica import RawRow


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The end of an attempt. `prepared` has no prompt any more."""

    prepared: Prepared
    pages: list[PageFacts]
    result: RequestOutput | RequestError
    counts: Counts
    later: tuple[dict[str, Any], ...] = ()
    """Reason and step of each attempt after the first one, in the attempt that counts."""
    best_of: int = 0
    """The number of attempts, if each had a fault; 0: this one has none."""


@dataclass
class _Climb:
    """The attempts at a row so far."""

    first: Attempt
    """The first one without an error, else the first one."""
    last: Attempt
    reasons: set[str] = field(default_factory=set)
    rotation: int = 0
    used: set[int] = field(default_factory=set)
    """Steps, also those that had nothing to change in this row."""
    change: Change = field(default_factory=lambda: Change(0, {}))
    before: Change = field(default_factory=lambda: Change(0, {}))
    """The change of the last attempt."""
    later: list[dict[str, Any]] = field(default_factory=list)
    work: Counts = field(default_factory=Counts)
    """The tokens of all attempts."""

    def add(self, attempt: Attempt) -> None:
        self.work.add(attempt.counts)
        if isinstance(self.first.result, RequestError) and not isinstance(attempt.result, RequestError):
            self.first = attempt

    def ended(self, last: Attempt, *, is_good: bool) -> Attempt:
        """The attempt that counts, with the counts of the others."""
        counts, found = self.work, last if is_good else self.first
        is_best = bool(self.later) and not is_good and not isinstance(found.result, RequestError)
        chosen = found.counts
        return replace(found, later=tuple(self.later), best_of=(len(self.later) + 1) * is_best, counts=replace(
            chosen, num_retried=int(bool(self.later)), num_attempts=len(self.later), num_best_of=int(is_best),
            attempts_by_reason=dict(Counter(each["reason"] for each in self.later)),
            num_attempt_prompt_tokens=counts.num_prompt_tokens - chosen.num_prompt_tokens,
            num_attempt_cached_tokens=counts.num_cached_tokens - chosen.num_cached_tokens,
            num_attempt_completion_tokens=counts.num_completion_tokens - chosen.num_completion_tokens))


class Attempts:
    """`submit` has a row prepared again."""

    def __init__(self, ladder: Ladder, submit: Callable[[RawRow], None]):
        self._ladder = ladder
        self._submit = submit
        self._rows: dict[int, RawRow] = {}
        self._climbs: dict[int, _Climb] = {}

    def start(self, rows: Iterable[RawRow]) -> Iterator[RawRow]:
        """Pass rows on that come to the replica."""
        for row in rows:
            self._rows[row.number] = row
            yield row

    def forget(self, numbers: Iterable[int]) -> None:
        """These rows leave the replica without an answer."""
        for number in numbers:
            self._rows.pop(number, None)
            self._climbs.pop(number, None)

    def end(self, prepared: Prepared, result: RequestOutput | RequestError, counts: Counts) -> Attempt | None:
        """An attempt has ended. Returns the one that counts; None: the row was submitted again."""
        number = prepared.number
        attempt = Attempt(prepared=replace(prepared, prompt=()), pages=prepared.pages, result=result, counts=counts)
        climb = self._climbs.setdefault(number, _Climb(attempt, attempt))
        if isinstance(result, NoPlaceError):  # as if the step were not there
            climb.later.pop()
            climb.change = climb.before
        else:
            climb.add(attempt)
            climb.last, (climb.reasons, climb.rotation) = attempt, self._reasons(attempt)
        step = self._ladder.next_step(climb.reasons, climb.used, climb.rotation)
        if step is not None and number in self._rows and len(climb.later) + 1 < MOST_ATTEMPTS:
            climb.used.add(step.number)
            climb.later.append({"reason": step.reason, "step": step.number})
            climb.before, climb.change = climb.change, climb.change.plus(step.fields)
            self._submit(self._rows[number]._replace(change=climb.change))
            return None
        self.forget([number])
        # An error never counts instead of an answer, whether a step names it or not.
        is_good = not (isinstance(climb.last.result, RequestError) or self._ladder.wants_another(climb.reasons))
        return climb.ended(climb.last, is_good=is_good)

    def _reasons(self, attempt: Attempt) -> tuple[set[str], int]:
        """The reasons for another attempt, and the clockwise rotation that the answer asks for."""
        result, counts, rotation = attempt.result, attempt.counts, 0
        if isinstance(result, RequestError):
            return {f"error:{result.code}"}, rotation
        text, has_content = result.text.strip("\n"), bool(result.text.strip())
        found = {name for name in Flaw.all_names() if getattr(counts, f"num_{name}", 0)}
        if self._ladder.parser is not None and has_content:
            try:
                parsed = parse_answer(self._ladder.parser, text, label=attempt.prepared.form.label)
                has_content = any(block.text or block.box for block in parsed.blocks)
                rotation = parsed.rotation
            except AnswerError:
                found.add(UNPARSED)
        is_blank = bool(attempt.pages) and all(page.is_blank for page in attempt.pages)
        found |= {EMPTY} if not has_content and not is_blank else set()
        return found | ({ROTATED} if rotation else set()), rotation
