"""What a job has done: counts while it runs. Knows nothing of how it was done."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from npu_runner.request.outputs import RequestOutput


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one row adds to the tally once it is in the output."""

    failure_code: str | None = None
    """None: it is answered."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    is_as_expected: bool | None = None
    """None: nobody said what to expect."""


def answered(output: RequestOutput, expected: str | None) -> Outcome:
    return Outcome(
        num_prompt_tokens=output.num_prompt_tokens,
        num_cached_tokens=output.num_cached_tokens,
        num_completion_tokens=sum(len(completion.token_ids) for completion in output.completions),
        num_reasoning_tokens=sum(completion.num_reasoning_tokens for completion in output.completions),
        is_as_expected=None if expected is None else is_as_expected(output.text, expected),
    )


@dataclass
class Tally:
    """Running counts of this run of the job (not of runs that it resumes). A row counts once it is written."""

    num_answered: int = 0
    num_failed: int = 0
    failures_by_code: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    """Those of the completion tokens that are reasoning."""
    num_expected: int = 0
    """Answered rows whose metadata holds the expected answer."""
    num_as_expected: int = 0

    @property
    def num_done(self) -> int:
        return self.num_answered + self.num_failed

    def add(self, outcome: Outcome) -> None:
        if outcome.failure_code is not None:
            self.num_failed += 1
            self.failures_by_code[outcome.failure_code] += 1
            return
        self.num_answered += 1
        self.num_prompt_tokens += outcome.num_prompt_tokens
        self.num_cached_tokens += outcome.num_cached_tokens
        self.num_completion_tokens += outcome.num_completion_tokens
        self.num_reasoning_tokens += outcome.num_reasoning_tokens
        if outcome.is_as_expected is not None:
            self.num_expected += 1
            self.num_as_expected += outcome.is_as_expected


def is_as_expected(answer: str, expected: str) -> bool:
    """Equal but for case, white space around and a full stop at the end."""
    return answer.strip().removesuffix(".").casefold() == expected.strip().removesuffix(".").casefold()
