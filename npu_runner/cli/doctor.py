"""`npu-runner doctor`: is this host ready, and if not, what is to be done. Prints the checks and decides the status.

Imports no torch: on the hosts that need a doctor that may fail. Knows nothing of what is looked at, and how.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform as python_platform
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from npu_runner import __version__
from npu_runner.cli.doctor_generation import check_generation
from npu_runner.cli.doctor_layers import check_layers
from npu_runner.platforms.npu.preflight.checks import examine, examine_without_npu, signs_of_an_npu, survey
from npu_runner.platforms.npu.preflight.host import Check, Host, run_function

# inductor needs most of a minute for a bucket on a CPU, so that is left to those who ask for it.
_MODES = {"npu": ("eager", "reduce-overhead"), "cuda": ("eager", "reduce-overhead"), "cpu": ("eager",)}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What is looked at. platform "auto": npu where anything hints at one, else cuda where it is usable, else cpu."""

    platform: str = "auto"
    graph_modes: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    generation: bool = True
    timeout_seconds: float = 900.0


def run(arguments: argparse.Namespace) -> int:
    """Print every check. Returns 1 if one of them failed."""
    options = DoctorOptions(
        platform=arguments.platform, graph_modes=tuple(arguments.graph_mode or ()),
        tensor_parallel_size=arguments.tensor_parallel_size, generation=not arguments.skip_generation,
        timeout_seconds=arguments.timeout,
    )  # fmt: skip
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
    found = survey(host)
    signs = signs_of_an_npu(found)
    platform, cuda = options.platform, None
    if platform == "auto":
        platform = "npu" if signs else "cuda"
    if platform == "cuda":
        cuda = _cuda(host)
        if options.platform == "auto" and cuda.status != "ok":
            platform, cuda = "cpu", None
    yield _what_is_here(platform, signs)
    is_hopeless = False
    is_eager = set(options.graph_modes) == {"eager"}
    examined = (examine(found, options.tensor_parallel_size, is_eager=is_eager) if platform == "npu"
                else examine_without_npu(found))
    for check in itertools.chain(examined, [cuda] if cuda else []):
        # Without these there is nothing to start; any other failure may still let a generation through.
        is_hopeless |= check.name in ("devices", "import torch", "cuda") and check.status != "ok"
        yield check
    if platform == "npu" and options.generation and not is_hopeless:
        yield from check_layers(host, platform, options.timeout_seconds)
    for mode in options.graph_modes or _MODES[platform]:
        if not options.generation:
            yield Check(f"generation ({platform}, {mode})", "skipped", "not asked for")
        elif is_hopeless:
            yield Check(f"generation ({platform}, {mode})", "skipped", "cannot start before what failed above works")
        else:
            yield from check_generation(host, platform, mode, options.tensor_parallel_size, options.timeout_seconds)


def _what_is_here(platform: str, signs: list[str]) -> Check:
    if platform == "npu":
        hints = "; ".join(signs) or "nothing hints at one, and --platform npu asks for it"
        return Check("platform", "ok", f"npu: {hints}")
    if signs:
        return Check("platform", "ok", f"{platform}, as asked for; the NPU is not looked at ({'; '.join(signs)})")
    instead = "" if platform == "cuda" else "Every command works here with --platform cpu, slowly; "
    return Check("platform", "ok", f"no NPU on this host: no torch_npu, no CANN, no /dev/davinci*. {instead}{platform} "
                 "is looked at now")


def _cuda(host: Host) -> Check:
    outcome = run_function(host, _why_not_cuda)
    reason = outcome.reports[-1] if outcome.reports else outcome.error
    if reason is None:
        return Check("cuda", "ok", "a device, and a torch and triton that can use it")
    return Check("cuda", "failed", str(reason), "take a torch that is built for CUDA, with triton; nvidia-smi says "
                 "which GPUs the driver sees, CUDA_VISIBLE_DEVICES which of them a process may use")


def _why_not_cuda(reports: str) -> None:
    import json

    from npu_runner.platforms import platform_class

    with open(reports, "a") as file:
        file.write(json.dumps(platform_class("cuda").why_unavailable()) + "\n")


def _as_text(check: Check) -> str:
    lines = textwrap.wrap(check.found, 88, break_long_words=False, break_on_hyphens=False) or [""]
    text = f"{check.status:8} {check.name:34} {lines[0]}"
    for line in lines[1:]:
        text += f"\n{'':44}{line}"
    if check.remedy:
        for index, line in enumerate(textwrap.wrap(check.remedy, 85, break_long_words=False, break_on_hyphens=False)):
            text += f"\n{'':44}{'-> ' if index == 0 else '   '}{line}"
    return text
