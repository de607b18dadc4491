"""How many rows may fail before a job ends early: `max_failures`. Knows nothing of how rows are counted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from npu_runner.errors import ConfigError

ROWS_BEFORE_A_SHARE = 200
"""Finished rows from which a share counts."""
_FORM = re.compile(r"([0-9]{1,12})|([0-9]{1,3}(?:\.[0-9]{1,6})?)%", re.ASCII)


@dataclass(frozen=True)
class FailureLimit:
    """`num_rows`: the most failed rows, or None; `percent`: their most percent of all finished rows, or None."""

    num_rows: int | None
    percent: Fraction | None

    @classmethod
    def parse(cls, text: str) -> FailureLimit:
        """`25` or `2.5%`. Raises ConfigError for anything else."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(f"max_failures: {text!r} is neither a number of rows like 25 nor a share like 2.5%")
        if found[1] is not None:
            return cls(int(found[1]), None)
        percent = Fraction(found[2])
        if percent > 100:
            raise ConfigError(f"max_failures: {text} is more than all rows; 100% is the most")
        return cls(None, percent)

    def is_exceeded(self, num_failed: int, num_finished: int, num_begun: int = 0) -> bool:
        """Whether more rows have failed than may.

        `num_begun`: rows that the engines have, which count as finished and not failed in a share. A row that
        preprocessing refuses is finished long before those that are answered, so without them the first share of a job
        would be too high.
        """
        if self.num_rows is not None:
            return num_failed > self.num_rows
        assert self.percent is not None, "one of the two is given"
        return num_finished >= ROWS_BEFORE_A_SHARE and num_failed * 100 > self.percent * (num_finished + num_begun)
