"""`npu-runner doctor --operators`: each operator by itself, then layers, in processes that may crash; and a report.

Knows no operator and no vendor. Imports no torch.
"""

from __future__ import annotations

import html
import json
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from npu_runner import __version__
from npu_runner.cli import doctor_layers
from npu_runner.errors import ConfigError
from npu_runner.platforms.cases import Finding, run_cases
from npu_runner.platforms.examination import Examination
from npu_runner.platforms.host import Check, Outcome, run_command

_ORDER = ("crashed", "wrong", "refused", "slow", "left out", "right")


def run(examination: Examination, only: Sequence[str], minutes: float, soak_minutes: float, out: Path) -> int:
    """Print a line for each case as soon as it is known; write `out`/operators.json, operators.html and a .tar.gz
    of both with the vendor's logs. Returns 1 if a case is neither right nor slow.

    Raises ConfigError for a platform that has no such cases, and for a folder that cannot be written.
    """
    if not examination.operator_cases:
        raise ConfigError(f"--operators: platform {examination.platform.name} has no list of operators; leave it out")
    logs = out / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error
    host = examination.host
    if examination.log_variable:
        host = replace(host, environment={**host.environment, examination.log_variable: str(logs.resolve())})
    checks = list(examination.examine())
    for check in checks:
        if check.status != "ok":
            print(f"{check.status:8} {check.name}: {check.found}", flush=True)
    end, name = time.monotonic() + 60 * (minutes + soak_minutes), examination.platform.name
    findings: list[Finding] = []
    parts: list[tuple[str, object, Sequence[str]]] = [
        (examination.operator_cases, 0.0, only), (doctor_layers.SOURCE, doctor_layers.cases(examination), only)]
    if soak_minutes:
        parts.append((examination.operator_cases, soak_minutes, ["replays with changing lengths"]))
    for source, asked, words in parts:
        findings += run_cases(host, name, source, asked, max(1.0, end - time.monotonic()), _print, words)
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in _ORDER}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no case has such a name"
    remedies = {each.case: examination.explain(Outcome([], each.message, each.message), "") for each in findings
                if not each.is_right}
    (out / "operators.json").write_text(json.dumps({
        "npu_runner": __version__, "platform": name, "minutes": minutes, "only": list(only), "counts": counts,
        "checks": [asdict(check) for check in checks],
        "cases": [{**asdict(each), "remedy": remedies.get(each.case, ""), "logs": _logs(logs, each)}
                  for each in findings]}, indent=1))
    (out / "operators.html").write_text(_page(name, summary, checks, findings, remedies))
    for title, command in examination.reports.items():
        (out / f"{title}.txt").write_text(run_command(command))
    archive = out.with_name(f"{out.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(out, out.name)
    print(f"\n{summary}\nreport: {out / 'operators.html'}; to be sent: {archive}")
    return 0 if findings and all(each.is_right for each in findings) else 1


def _logs(folder: Path, finding: Finding) -> list[str]:
    """The vendor's log files of the process that ran the case: their names have its number."""
    return sorted(str(path.relative_to(folder.parent)) for path in folder.rglob(f"*[-_]{finding.process}[-_.]*")
                  if path.is_file())


def _print(finding: Finding) -> None:
    print(_line(finding), flush=True)


def _line(finding: Finding) -> str:
    errors = "" if finding.largest_error is None else (
        f"{100 * finding.largest_error:7.3f} % {100 * (finding.median_error or 0.0):7.3f} %")
    took = "" if finding.microseconds is None else f"{finding.microseconds:8.0f} us"
    return f"{finding.verdict:8} {errors:19} {took:11} " + ": ".join(filter(None, (finding.case, finding.message)))


def _page(platform: str, summary: str, checks: Sequence[Check], findings: Sequence[Finding],
          remedies: dict[str, str]) -> str:
    """One page of HTML that needs nothing else."""
    rows = [(each.verdict, each.case, "" if each.largest_error is None else f"{100 * each.largest_error:.3f}",
             "" if each.median_error is None else f"{100 * each.median_error:.3f}",
             "" if each.microseconds is None else f"{each.microseconds:.0f}",
             "; ".join(filter(None, (each.message, remedies.get(each.case)))))
            for each in sorted(findings, key=lambda each: _ORDER.index(each.verdict))]
    heads = ("verdict", "case", "largest error, %", "median error, %", "us", "message and remedy")
    host = [(check.status, check.name, check.found, check.remedy) for check in checks]
    return ("<!doctype html><meta charset=utf-8><title>Operators</title><style>body{font:14px sans-serif;margin:2em}"
            "td,th{border-bottom:1px solid #ccc;padding:3px 8px;text-align:left;vertical-align:top}</style>"
            f"<h1>Operators of platform {html.escape(platform)}</h1><p>npu-runner {__version__}. {html.escape(summary)}"
            f"</p>{_table(heads, rows)}<h2>Host</h2>{_table(('status', 'check', 'found', 'remedy'), host)}")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>" + "\n".join(lines) + "</table>"
