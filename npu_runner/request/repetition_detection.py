"""When an answer that repeats itself ends: vLLM's RepetitionDetectionParams. Knows no model and no text, nor numpy,
which `--help` need not import.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from npu_runner.errors import RequestError
from npu_runner.request.limits import LIMITS, field_error, given_fields, shown

NAME = "repetition_detection"


@dataclass(frozen=True, kw_only=True)
class RepetitionDetectionParams:
    """An answer ends when its last tokens are one pattern, `min_count` times or more.

    Raises RequestError naming the field for a value out of range.
    """

    max_pattern_size: int = 0
    """Most tokens of a pattern. 0: nothing is looked for."""
    min_pattern_size: int = 0
    """Fewest tokens of a pattern; 0 means 1."""
    min_count: int = 0
    """The number of copies of the pattern that ends the answer; 2 or more."""

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            object.__setattr__(self, name, _count(name, getattr(self, name)))
        if self.max_pattern_size > LIMITS.max_pattern_size:
            raise _error("max_pattern_size", f"{self.max_pattern_size} tokens, at most {LIMITS.max_pattern_size} are "
                                             "allowed")
        if self.min_pattern_size > self.max_pattern_size:
            raise _error("min_pattern_size", f"{self.min_pattern_size} is more than max_pattern_size "
                                             f"{self.max_pattern_size}; raise that, or lower this")
        if self.is_on and self.min_count < 2:
            raise _error("min_count", f"{self.min_count} is less than 2, and a pattern that stands once is no "
                                      "repetition; say 2 or more")

    @classmethod
    def from_value(cls, value: Any) -> RepetitionDetectionParams:
        """`value` itself, or one from a mapping of its fields. Raises RequestError for an unknown one."""
        known = [field.name for field in dataclasses.fields(cls)]
        return value if isinstance(value, cls) else cls(
            **given_fields(value, NAME, known, "invalid_sampling_parameter"))

    @property
    def is_on(self) -> bool:
        return self.max_pattern_size > 0

    def is_repetition(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of `token_ids` are such a pattern. This is the rule by its definition, for a whole list; an
        answer that grows has a RepetitionDetector."""
        longest = min(self.max_pattern_size, len(token_ids) // self.min_count)
        return any(
            all(token_ids[-place] == token_ids[-place - size] for place in range(1, size * (self.min_count - 1) + 1))
            for size in range(max(1, self.min_pattern_size), longest + 1))


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise _error(name, f"{shown(value)} is not an integer")
    if value < 0:
        raise _error(name, f"{value} is negative")
    return int(value)


def _error(name: str, what: str) -> RequestError:
    field = f"{NAME}.{name}"
    return field_error(field, f"{what}", "invalid_sampling_parameter")
