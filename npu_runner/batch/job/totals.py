"""All runs of a job together, for programs and for the line at the end of a run.

Rows are those that stand in the output; the work is the sum over the runs. Knows no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from npu_runner.batch.files.runs import FINISHED, Runs
from npu_runner.batch.rows.counts import Counts


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The runs of a job, the one under way among them."""

    output: str
    num_rows: int | None
    """Rows of the input; None: it is not known."""
    rows: Counts
    """The rows in the output and its error file."""
    runs: Runs
    is_under_way: bool = False

    @property
    def state(self) -> str:
        if self.is_under_way:
            return "under way"
        if self.num_rows is None:
            return "unknown"
        return "unfinished" if self.num_unfinished else FINISHED

    @property
    def num_unfinished(self) -> int | None:
        return None if self.num_rows is None else max(0, self.num_rows - self.rows.num_done)

    @property
    def num_unrecorded(self) -> int:
        """Answers of runs that are not known, and of killed ones after their last status: their tokens are not
        counted."""
        return max(0, self.rows.num_answered - self.runs.sums("tally").get("num_answered", 0))

    @property
    def counts(self) -> Counts:
        return self.runs.counts(self.rows)

    def to_json(self) -> dict[str, Any]:
        counts, older = self.counts, self.runs.older
        return {
            "output": self.output,
            "state": self.state,
            "rows": {"total": self.num_rows, **counts.rows_json(), "expected": counts.num_expected,
                     "as_expected": counts.num_as_expected, "unfinished": self.num_unfinished,
                     "unrecorded": self.num_unrecorded},
            "tokens": {**counts.tokens_json(), **{name if name.startswith("draft_") else f"{name}_computed": count
                                                  for name, count in self.runs.sums("computed").items()}},
            "seconds": {name: round(value, 3) for name, value in self.runs.sums("seconds").items()},
            "runs": list(self.runs.last),
            **({"older_runs": older} if older else {}),
        }

    def to_line(self) -> str:
        """The line for a person who has read of the last run."""
        cost = f"; {self.cost}; runs {len(self.runs)}" if len(self.runs) else ""
        return f"in all    {self.rows_shown}{cost}"

    @property
    def rows_shown(self) -> str:
        counts = self.counts
        return ", ".join([f"{counts.num_answered} answered", *counts.shortcomings()])

    @property
    def cost(self) -> str:
        counts, seconds = self.counts, self.runs.sums("seconds")
        return (f"{counts.num_prompt_tokens} prompt and {counts.num_completion_tokens} completion tokens, "
                f"{seconds['start']:.1f} s to start and {seconds['serve']:.1f} s to serve, {seconds['device']:.1f} "
                "device seconds")
