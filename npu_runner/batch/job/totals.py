"""What all runs of a job add up to, for programs and for people.

Rows are those that stand in the output; what they took is the sum over the runs in the record. Knows no file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from npu_runner import __version__
from npu_runner.batch.files.answer_file import RowCounts
from npu_runner.batch.files.run_record import Line
from npu_runner.batch.job.summary import JobRecord, Tally
from npu_runner.request.outputs import EngineStats

FINISHED, INTERRUPTED = "finished", "interrupted"


def line_of(record: JobRecord, end: str | None) -> Line:
    """A run as the record beside the output has it. `end`: FINISHED, INTERRUPTED or its error; None: it goes on."""
    engine = record.stats.engine
    seconds = {
        "start": record.start_seconds,
        "serve": record.serve_seconds,
        "device": record.device_seconds,
        "prefill": engine.prefill_seconds,
        "decode": engine.decode_seconds,
        "preprocessing_wait": record.stats.wait_seconds,
    }
    return {
        "run": record.run_id,
        "started": int(record.started_at),
        "npu_runner": __version__,
        "platform": record.platform,
        "devices": record.num_devices,
        "rows": record.num_rows,
        # Errors name files, whose names may be no UTF-8.
        "end": None if end is None else end.encode(errors="backslashreplace").decode(),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "computed": {"prefill": engine.num_prefill_tokens, "decode": engine.num_decode_tokens, **_drafts(engine)},
        "tally": dict(vars(record.tally)),
    }


def _drafts(stats: EngineStats) -> dict[str, int]:
    """Empty where nothing was drafted."""
    if not stats.num_drafts:
        return {}
    return {"draft_proposed": stats.num_draft_tokens, "draft_accepted": stats.num_accepted_tokens}


def has_served(run: Line) -> bool:
    """False: it was still loading, or was ended before its first row."""
    return bool(run["seconds"]["serve"] or run["tally"]["num_answered"] or run["tally"].get("num_failed"))


def tally_of(runs: Sequence[Line], rows: RowCounts) -> Tally:
    """`rows` as they stand, and what the runs have counted beside that. A version may know fewer names than a line has,
    or more."""
    found = {**_added(run["tally"] for run in runs), **vars(rows), "num_failed": rows.num_failed}
    # Lines of earlier versions do not say that they are unparsed: only the record of their run does.
    found["num_unparsed"] += sum(run["tally"].get("num_unparsed", 0) for run in runs
                                 if "num_not_whole" not in run["tally"])
    return Tally(**{field.name: found[field.name] for field in fields(Tally) if field.name in found})


def _added(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums by name; a mapping is added by its own names."""
    sums: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, Mapping):
                sums[name] = _added([sums.get(name, {}), value])
            else:
                sums[name] = sums.get(name, 0) + value
    return sums


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Of all runs of a job, the one under way among them."""

    output: str
    num_rows: int | None
    """Of the input; None: nobody has said."""
    rows: RowCounts
    """In the output and its error file."""
    runs: Sequence[Line]
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
        return None if self.num_rows is None else max(0, self.num_rows - self.rows.num_rows)

    @property
    def num_unrecorded(self) -> int:
        """Answers of runs without a record, and of killed ones after their last line: their tokens are not counted."""
        return max(0, self.rows.num_answered - sum(run["tally"]["num_answered"] for run in self.runs))

    @property
    def _seconds(self) -> dict[str, float]:
        return _added(run["seconds"] for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        counts = {name.removeprefix("num_"): count for name, count in vars(tally_of(self.runs, self.rows)).items()}
        codes, num_not_whole = counts.pop("failures_by_code"), counts.pop("not_whole")
        tokens = {name.removesuffix("_tokens"): counts.pop(name) for name in list(counts) if name.endswith("_tokens")}
        computed = _added(run["computed"] for run in self.runs)
        return {
            "output": self.output,
            "state": self.state,
            "rows": {"total": self.num_rows, **counts, "whole": counts["answered"] - num_not_whole,
                     "unfinished": self.num_unfinished, "unrecorded": self.num_unrecorded,
                     "failures_by_code": dict(sorted(codes.items()))},
            "tokens": {**tokens, **{name if name.startswith("draft_") else f"{name}_computed": count
                                    for name, count in computed.items()}},
            "seconds": {name: round(value, 3) for name, value in self._seconds.items()},
            "runs": list(self.runs),
        }

    def to_lines(self) -> list[str]:
        """For a person who looks at the job from outside."""
        unfinished = "" if self.num_unfinished is None else f", {self.num_unfinished} not finished"
        lines = [f"{self.output}: {self.state}", f"rows      {self._rows}{unfinished}"]
        if not self.runs:
            return [*lines, "runs      none is recorded"]
        last = self.runs[-1]
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last["started"]))
        ended = last["end"] or "no end is recorded"
        where = "" if last["platform"] is None else f", {last['platform']} x {last['devices']}"
        lines += [
            f"took      {self._cost}",
            f"runs      {len(self.runs)}; the last one began at {began}, npu-runner {last['npu_runner']}{where}: "
            f"{ended}",
        ]
        if self.num_unrecorded:
            lines.append(f"          {self.num_unrecorded} answers came without a record of their tokens and seconds")
        return lines

    def to_line(self) -> str:
        """For a person who has read of the last run."""
        cost = f"; {self._cost}; runs {len(self.runs)}" if self.runs else ""
        return f"in all    {self._rows}{cost}"

    @property
    def _rows(self) -> str:
        tally = tally_of(self.runs, self.rows)
        return ", ".join([f"{tally.num_answered} answered", *tally.shortcomings()])

    @property
    def _cost(self) -> str:
        tally, seconds = tally_of(self.runs, self.rows), self._seconds
        return (f"{tally.num_prompt_tokens} prompt and {tally.num_completion_tokens} completion tokens, "
                f"{seconds['start']:.1f} s to start and {seconds['serve']:.1f} s to serve, {seconds['device']:.1f} "
                "device seconds")
