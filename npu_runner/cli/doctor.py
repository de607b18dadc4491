"""`npu-runner doctor`: is this host ready, and if not, what is to be done. Prints the checks and decides the status.

Imports no torch: on the hosts that need a doctor that may fail. Knows nothing of what a check does.
"""

from __future__ import annotations

import argparse
import json
import platform as python_platform
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from npu_runner import __version__
from npu_runner.cli.doctor_generation import check_generation
from npu_runner.cli.doctor_layers import check_layers
from npu_runner.cli.options import add_some_options, read_size
from npu_runner.cli.parser import Commands, add_command
from npu_runner.config import GRAPH_MODES, RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.platforms import AUTO, BUILT_IN, check_name, find_platform, platforms
from npu_runner.platforms.examination import Examination, Findings, examination_of
from npu_runner.platforms.host import Check, Host, run_program

_MEMORY_OPTIONS = {
    "revision", "runner", "task", "dtype", "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "async_scheduling", "block_size", "kv_cache_dtype", "kv_cache_bytes", "memory_utilization", "enable_prefix_caching",
    "max_state_snapshots", "vision_cache_bytes", "image_min_pixels", "image_max_pixels", "enforce_eager",
    "graph_batch_sizes", "enable_expert_parallel", "speculative_config", "lora"}


def add(commands: Commands) -> None:
    parser = add_command(
        commands, "doctor", run, "check whether this host is ready, and name a remedy for each problem",
        "Looks at drivers, versions, devices and variables, then answers questions about drawn images. "
        "Exit status 1: something failed; its remedy is printed.")
    parser.add_argument("--platform", default=AUTO, metavar="NAME",
                        help=f"what to look at: {', '.join(BUILT_IN)}, or an installed package's; auto: the first of "
                        "which anything is seen, in this order")
    parser.add_argument("--graph-mode", choices=[mode for mode in GRAPH_MODES if mode != "auto"], action="append",
                        help="a mode to generate in; may be repeated (default: eager, and the platform's default)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="generate with N ranks")
    parser.add_argument("--skip-generation", action="store_true", help="look at the host only; takes seconds")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="for each generation")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    operators = parser.add_argument_group("the first hour on a device")
    operators.add_argument("--operators", action="store_true", help="compute each operator by itself, then layers, on "
                           "the device and on the CPU, each time in a process that may crash; prints a line for each, "
                           "writes a report. Exit status 1: not all are right")
    operators.add_argument("--only", action="append", metavar="NAME", help="cases whose name has this in it; may be "
                           "repeated")
    operators.add_argument("--minutes", type=float, default=10.0, metavar="N", help="what has not begun by then is "
                           "listed as left out (default: 10)")
    operators.add_argument("--soak", type=float, nargs="?", const=20.0, default=0.0, metavar="N", help="then replay a "
                           "graph with ever other lengths for N minutes more (20 where N is left out)")
    operators.add_argument("--out", type=Path, default=Path("npu-runner-operators"), metavar="FOLDER",
                           help="for the report and the vendor's logs; FOLDER.tar.gz has all of it (default: "
                           "npu-runner-operators)")
    fits = parser.add_argument_group("would a model fit?")
    fits.add_argument("--fits", metavar="MODEL", help="estimate what a checkpoint folder, a hub id or a bare "
                      "config.json takes of a device, and look at nothing else. With --platform auto, an NPU is "
                      "assumed. Exit status 0: it fits, 1: it does not")
    fits.add_argument("--device-memory", type=read_size, metavar="SIZE", help="memory of one device, like 64G")
    add_some_options(parser, RunnerConfig, "settings that --fits counts with", _MEMORY_OPTIONS)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The checks to run. platform "auto": the first one with any sign of a device, highest priority first."""

    platform: str = AUTO
    graph_modes: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    generation: bool = True
    timeout_seconds: float = 900.0


def run(arguments: argparse.Namespace) -> int:
    """Print every check. Returns 1 if one of them failed."""
    if arguments.fits is not None:
        from npu_runner.cli.doctor_fits import run as run_fits

        return run_fits(arguments)
    for name in ("device_memory", *sorted(_MEMORY_OPTIONS)):
        if getattr(arguments, name, None) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is for --fits alone; name a model with --fits, or leave it "
                              "out")
    options = DoctorOptions(
        platform=arguments.platform, graph_modes=tuple(arguments.graph_mode or ()),
        tensor_parallel_size=arguments.tensor_parallel_size, generation=not arguments.skip_generation,
        timeout_seconds=arguments.timeout)
    check_name(options.platform)
    if arguments.operators:
        from npu_runner.cli.doctor_operators import run as run_operators

        examination, _ = _choose(Findings.from_host(Host()), options.platform)
        return run_operators(examination, arguments.only or (), arguments.minutes, arguments.soak,
                             arguments.out)
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
    yield _check_pdf_fonts(examination)
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


def _check_pdf_fonts(examination: Examination) -> Check:
    name = "pages of PDFs"
    if examination.packages.get("pypdfium2") is None:
        return Check(name, "skipped", "pypdfium2 is not installed; pip install 'pypdfium2>=5.15' adds PDFs")
    outcome = run_program(examination.host, "npu_runner.prompts.media.pdf_fonts", [])
    if outcome.error is not None:
        return Check(name, "failed", outcome.error, "pip install --force-reinstall 'pypdfium2>=5.15'")
    (fonts,) = outcome.reports
    if not fonts["missing"]:
        return Check(name, "ok", f"PDFium {fonts['pdfium']}; Chinese, Japanese and Korean text has fonts")
    return Check(name, "warning", f"PDFium {fonts['pdfium']}; pages with text in fonts that are not embedded fail: no "
                 f"font for {fonts['languages']}", "apt install fonts-noto-cjk")


def _choose(findings: Findings, name: str) -> tuple[Examination, str]:
    """The examination of the platform, and the reason for this one."""
    if name != AUTO:
        return examination_of(find_platform(name), findings), "as asked for"
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
