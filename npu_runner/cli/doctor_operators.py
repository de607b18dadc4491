"""`npu-runner doctor --operators`: each operator by itself, then layers, in processes that may crash; and a report.

Knows no operator and no vendor. Imports no torch.
"""

from __future__ import annotations

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
from npu_runner.platforms.host import Outcome, run_command

_ORDER = ("crashed", "wrong", "refused", "slow", "left out", "right")


def run(examination: Examination, only: Sequence[str], minutes: float, soak_minutes: float, out: Path) -> int:
    """Print a line for each case as soon as it is known; write `out`/operators.json, operators.txt and a .tar.gz
    of both with the vendor's logs. Returns 1 if a case is neither right nor slow.

    Raises ConfigError for a platform that has no such cases, and for a folder that cannot be written.
    """
    if examination.operator_cases is None:
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
    alone, graphs_and_ranks = examination.operator_cases
    parts: list[tuple[str, object, Sequence[str]]] = [
        (alone, None, only), (doctor_layers.SOURCE, doctor_layers.cases(examination), only),
        (graphs_and_ranks, 0.0, only)]
    if soak_minutes:
        parts.append((graphs_and_ranks, soak_minutes, ["replays with changing lengths"]))
    for source, asked, words in parts:
        findings += run_cases(host, name, source, asked, max(1.0, end - time.monotonic()),
                              lambda finding: print(_line(finding), flush=True), words)
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in _ORDER}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "no case has such a name"
    remedies = {each.case: examination.explain(Outcome([], each.message, each.message), "") for each in findings
                if not each.is_right}
    (out / "operators.json").write_text(json.dumps({
        "npu_runner": __version__, "platform": name, "minutes": minutes, "only": list(only), "counts": counts,
        "checks": [asdict(check) for check in checks],
        "cases": [{**asdict(each), "remedy": remedies.get(each.case, ""), "logs": _logs(logs, each)}
                  for each in findings]}, indent=1))
    (out / "operators.txt").write_text("\n".join([
        f"npu-runner {__version__}, operators of platform {name}: {summary}", "",
        *("; ".join(filter(None, (_line(each), remedies.get(each.case), *([] if each.is_right else _logs(logs, each)))))
          for each in sorted(findings, key=lambda each: _ORDER.index(each.verdict))), "",
        *("; ".join(filter(None, (f"{check.status:8} {check.name}: {check.found}", check.remedy))) for check in checks),
        ""]))
    for title, command in examination.reports.items():
        (out / f"{title}.txt").write_text(run_command(command))
    archive = out.with_name(f"{out.name}.tar.gz")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(out, out.name)
    print(f"\n{summary}\nreport: {out / 'operators.txt'}; to be sent: {archive}")
    return 0 if findings and all(each.is_right for each in findings) else 1


def _logs(folder: Path, finding: Finding) -> list[str]:
    """The vendor's log files of the process that ran the case: their names have its number."""
    return sorted(str(path.relative_to(folder.parent)) for path in folder.rglob(f"*[-_]{finding.process}[-_.]*")
                  if path.is_file())


def _line(finding: Finding) -> str:
    errors = "" if finding.largest_error is None else (
        f"{100 * finding.largest_error:7.3f} % {100 * (finding.median_error or 0.0):7.3f} %")
    took = "" if finding.microseconds is None else f"{finding.microseconds:8.0f} us"
    return f"{finding.verdict:8} {errors:19} {took:11} " + ": ".join(filter(None, (finding.case, finding.message)))
