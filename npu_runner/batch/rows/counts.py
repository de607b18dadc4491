"""The counts of rows: one row, a run, an output and all runs of a job have this shape. Knows nothing of files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from npu_runner.batch.rows.openai_response import is_as_expected, is_json
from npu_runner.request.outputs import EngineStats, RequestOutput

_MOST_CODES = 6


@dataclass(kw_only=True)
class Counts:
    """The counts of some rows, and of the work that answers took.

    Rows can be counted again in the output at any time. Work is counted by the run that did it, and added over runs.
    """

    num_answered: int = 0
    num_not_whole: int = 0
    """Answers that have at least one of the three flaws that follow."""
    num_cut_off: int = 0
    num_repetition: int = 0
    num_unparsed: int = 0
    failures_by_code: dict[str, int] = field(default_factory=dict)

    # Work, which an output does not show.
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    """Completion tokens that are reasoning."""
    num_expected: int = 0
    """Answered rows whose metadata holds the expected answer."""
    num_as_expected: int = 0
    num_copied: int = 0
    """Answers that were copied from an equal row."""
    num_retried: int = 0
    """Rows with more than one attempt."""
    num_attempts: int = 0
    """Attempts after the first ones."""
    num_best_of: int = 0
    """Rows whose attempts all had a fault, and one of them counts."""
    attempts_by_reason: dict[str, int] = field(default_factory=dict)
    num_attempt_prompt_tokens: int = 0
    """Tokens of attempts that do not count; those above are of the others."""
    num_attempt_cached_tokens: int = 0
    num_attempt_completion_tokens: int = 0

    @classmethod
    def from_failure(cls, code: str) -> Counts:
        return cls(failures_by_code={code: 1})

    @classmethod
    def from_answer(cls, output: RequestOutput, answer: str, expected: str | None, *, has_json_rule: bool) -> Counts:
        """`answer` is compared with `expected`. With `has_json_rule` every completion is to be JSON."""
        completions = output.completions
        is_cut_off = any(completion.is_cut_off for completion in completions)
        is_repetition = any(completion.is_repetition for completion in completions)
        is_unparsed = has_json_rule and not all(is_json(completion.text) for completion in completions)
        return cls(
            num_answered=1, num_not_whole=int(is_cut_off or is_repetition or is_unparsed),
            num_cut_off=int(is_cut_off), num_repetition=int(is_repetition), num_unparsed=int(is_unparsed),
            num_prompt_tokens=output.num_prompt_tokens, num_cached_tokens=output.num_cached_tokens,
            num_completion_tokens=sum(len(completion.token_ids) for completion in completions),
            num_reasoning_tokens=sum(completion.num_reasoning_tokens for completion in completions),
            num_expected=int(expected is not None),
            num_as_expected=int(expected is not None and is_as_expected(answer, expected)))

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Counts:
        """The counts that `to_json` of this or another version wrote: other names are left out."""
        return cls(**{name: value for name, value in found.items() if name in _NAMES})

    @property
    def answered_shown(self) -> str:
        """The answers, for a person."""
        return f"{self.num_answered} answered" + (f" ({self.num_copied} copied)" if self.num_copied else "")

    @property
    def num_failed(self) -> int:
        return sum(self.failures_by_code.values())

    @property
    def num_done(self) -> int:
        return self.num_answered + self.num_failed

    @property
    def num_whole(self) -> int:
        return self.num_answered - self.num_not_whole

    def add(self, other: Counts) -> None:
        mine, others = vars(self), vars(other)
        for name in _NUMBERS:
            mine[name] += others[name]
        for name in _BY_KIND:
            for kind, count in others[name].items():
                mine[name][kind] = mine[name].get(kind, 0) + count

    def __add__(self, other: Counts) -> Counts:
        total = replace(self, failures_by_code=dict(self.failures_by_code),
                        attempts_by_reason=dict(self.attempts_by_reason))
        total.add(other)
        return total

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "num_failed": self.num_failed}

    def rows_json(self) -> dict[str, Any]:
        """The rows under the names of the summary and the status."""
        return {
            "answered": self.num_answered, "failed": self.num_failed, "cut_off": self.num_cut_off,
            "repetition": self.num_repetition, "unparsed": self.num_unparsed, "whole": self.num_whole,
            "copied": self.num_copied, "failures_by_code": dict(sorted(self.failures_by_code.items())),
            **({"attempts": self.attempts_json()} if self.num_retried else {})}

    def attempts_json(self) -> dict[str, Any]:
        return {"rows": self.num_retried, "more": self.num_attempts, "best_of": self.num_best_of,
                "by_reason": dict(sorted(self.attempts_by_reason.items())),
                "prompt_tokens": self.num_attempt_prompt_tokens, "cached_tokens": self.num_attempt_cached_tokens,
                "completion_tokens": self.num_attempt_completion_tokens}

    def tokens_json(self) -> dict[str, int]:
        return {"prompt": self.num_prompt_tokens, "cached": self.num_cached_tokens,
                "completion": self.num_completion_tokens, "reasoning": self.num_reasoning_tokens}

    def shortcomings(self, *, with_codes: bool = True) -> list[str]:
        """The counts to show: "3 failed (2 media_missing, 1 not_json)", "cut off 4", "unparsed 1", "whole 9"."""
        common = Counter(self.failures_by_code).most_common() if with_codes else []
        codes = [f"{count} {code}" for code, count in common[:_MOST_CODES]] + ["..."] * (len(common) > _MOST_CODES)
        flaws = (("cut off", self.num_cut_off), ("repetition", self.num_repetition), ("unparsed", self.num_unparsed))
        shown = [f"{name} {count}" for name, count in flaws if count]
        return [f"{self.num_failed} failed" + (f" ({', '.join(codes)})" if codes else ""), *shown,
                *([f"whole {self.num_whole}"] if shown else [])]

    def seconds_left(self, num_left: int, stats: EngineStats, seconds: float) -> float | None:
        """The seconds for the other `num_left` rows at the pace of these rows' `seconds`; None: no row is answered, or
        none is left.

        Rows in flight count for the pace: without them, a first batch of hundreds of rows would count as a single row
        when the first of them ends. They count by their tokens over the mean of the answered rows, and at most half a
        row each, as short answers end first. They still count as left, because the last rows run in a batch that
        shrinks.
        """
        if not num_left or not self.num_answered:
            return None
        tokens_in_flight = max(0, stats.num_decode_tokens - self.num_completion_tokens
                               - self.num_attempt_completion_tokens)
        tokens_of_a_row = self.num_completion_tokens / self.num_answered
        partly = min(stats.num_running / 2, tokens_in_flight / tokens_of_a_row) if tokens_of_a_row else 0.0
        return num_left * seconds / (self.num_done + min(partly, num_left))


_NAMES = {each.name for each in fields(Counts)}
_NUMBERS = tuple(name for name in _NAMES if name.startswith("num_"))
_BY_KIND = ("failures_by_code", "attempts_by_reason")
ROWS = ("num_answered", "num_not_whole", "num_cut_off", "num_repetition", "num_unparsed", "failures_by_code")
"""The fields that an output shows."""


def attempts_lines(rows: Mapping[str, Any]) -> list[str]:
    """The line about the attempts in `rows_json`; none, if no row has had several."""
    found: Mapping[str, Any] = rows.get("attempts") or {}
    if not found:
        return []
    reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(found["by_reason"]).most_common())
    return [f"attempts  {found['more']} more of {found['rows']} rows ({reasons}), {found['best_of']} best_of; "
            f"those that do not count: {found['prompt_tokens']} prompt tokens ({found['cached_tokens']} from the "
            f"prefix cache), {found['completion_tokens']} completion tokens"]
