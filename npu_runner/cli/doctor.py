"""`npu-runner doctor`: is this host ready, and if not, what is to be done. Prints the checks and decides the status.

Imports no torch: on the hosts that need a doctor that may fail. Knows nothing of what is looked at, and how.
"""

from __future__ import annotations

import argparse
import json
import platform as python_platform
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from npu_runner import __version__
from npu_runner.cli.doctor_generation import check_generation
from npu_runner.cli.doctor_layers import check_layers
from npu_runner.errors import ConfigError
from npu_runner.platforms import AUTO, check_name, find_platform, platforms
from npu_runner.platforms.examination import Examination, Findings, examination_of
from npu_runner.platforms.host import Check, Host


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is looked at. platform "auto": the first of which anything is seen, highest priority first."""

    platform: str = AUTO
    graph_modes: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    generation: bool = True
    timeout_seconds: float = 900.0


def run(arguments: argparse.Namespace) -> int:
    """Print every check. Returns 1 if one of them failed."""
    options = DoctorOptions(
        platform=arguments.platform, graph_modes=tuple(arguments.graph_mode or ()),
        tensor_parallel_size=arguments.tensor_parallel_size, generation=not arguments.skip_generation,
        timeout_seconds=arguments.timeout)
    check_name(options.platform)
    checks = []
    if not arguments.json:
        print(f"npu-runner {__version__}, Python {python_platform.python_version()}, {python_platform.platform()}")
    for check in examine_host(Host(), options):
        checks.append(check)
        if not arguments.json:
            print(_as_text(check), flush=True)
    counts = {status: sum(check.status == status for check in checks) for status in ("failed", "warning", "ok")}
    if arguments.json:
        print(json.dumps({"ok": not counts["failed"], "npu_runner": __version__, "checks": list(map(asdict, checks))},
                         indent=1))
    else:
        print(f"\n{counts['failed']} failed, {counts['warning']} warnings, {counts['ok']} ok")
    return 1 if counts["failed"] else 0


def examine_host(host: Host, options: DoctorOptions) -> Iterator[Check]:
    """Every check, as soon as it is done."""
    examination, why = _choose(Findings.from_host(host), options.platform)
    name, num_ranks = examination.platform.name, options.tensor_parallel_size
    yield Check("platform", "ok", f"{name}: {why}")
    is_hopeless = False
    for check in examination.examine(num_ranks, is_eager=set(options.graph_modes) == {"eager"}):
        # Any other failure may still let a generation through.
        is_hopeless |= check.name in examination.needs and check.status != "ok"
        yield check
    if examination.checks_layers and options.generation and not is_hopeless:
        yield from check_layers(examination, options.timeout_seconds)
    for mode in options.graph_modes or examination.graph_modes:
        if not options.generation:
            yield Check(f"generation ({name}, {mode})", "skipped", "not asked for")
        elif is_hopeless:
            yield Check(f"generation ({name}, {mode})", "skipped", "cannot start before what failed above works")
        elif reason := examination.why_no_embedded():
            yield Check(f"generation ({name}, {mode})", "skipped", reason)
        else:
            yield from check_generation(examination, mode, num_ranks, options.timeout_seconds)


def _choose(findings: Findings, asked: str) -> tuple[Examination, str]:
    """What is to be examined, and why that."""
    if asked != AUTO:
        return examination_of(find_platform(asked), findings), "as asked for"
    missing: list[str] = []
    for platform in platforms():
        examination = examination_of(platform, findings)
        signs = examination.signs()
        if signs.are_there:
            return examination, "; ".join([signs.text, *missing])
        missing.append(f"no {platform.name} on this host ({signs.text})")
    raise ConfigError(f"platform auto: {'; '.join(missing)}")


def _as_text(check: Check) -> str:
    lines = textwrap.wrap(check.found, 88, break_long_words=False, break_on_hyphens=False) or [""]
    text = f"{check.status:8} {check.name:34} {lines[0]}"
    for line in lines[1:]:
        text += f"\n{'':44}{line}"
    if check.remedy:
        for index, line in enumerate(textwrap.wrap(check.remedy, 85, break_long_words=False, break_on_hyphens=False)):
            text += f"\n{'':44}{'-> ' if index == 0 else '   '}{line}"
    return text
