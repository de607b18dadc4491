"""All runs of a job in words, for a person who looks at it from outside. Knows no file."""

from __future__ import annotations

import time

from npu_runner.batch.job.totals import Totals


def summary_lines(totals: Totals) -> list[str]:
    unfinished = "" if totals.num_unfinished is None else f", {totals.num_unfinished} not finished"
    lines = [f"{totals.output}: {totals.state}", f"rows      {totals.rows_shown}{unfinished}"]
    if not totals.runs.last:
        return [*lines, "runs      none is recorded"]
    last = totals.runs.last[-1]
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last["started"]))
    where = "" if last["platform"] is None else f", {last['platform']} x {last['devices']}"
    lines += [
        f"took      {totals.cost}",
        f"runs      {len(totals.runs)}; the last one began at {began}, npu-runner {last['npu_runner']}{where}: "
        f"{last['end'] or 'no end is recorded'}",
    ]
    if totals.num_unrecorded:
        lines.append(f"          {totals.num_unrecorded} answers came without a record of their tokens and seconds")
    return lines
