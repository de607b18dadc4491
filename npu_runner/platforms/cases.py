"""Cases: what a device computes, beside the CPU from the same numbers, one case after the other in a child process.

    python -m npu_runner.platforms.cases PLATFORM SOURCE ASKED ONLY DONE REPORTS

runs the cases that the function SOURCE ("module:name") makes of the JSON value ASKED: those whose title has a word of
the list ONLY, if it has any, and without those of DONE, which are findings. Each is written to the file REPORTS as
crashed before it begins; `run_cases` goes on with the next one in a new child if that remains so. Knows no operator and
no vendor.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from npu_runner.errors import ConfigError, NpuRunnerError
from npu_runner.platforms import find_platform, load, reference_platform
from npu_runner.platforms.host import Host, run_program
from npu_runner.platforms.platform import Platform

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from npu_runner.platforms.attention import AttentionBackend
    from npu_runner.platforms.ops import Ops
    from npu_runner.platforms.quantised import QuantisedOps

BOUNDS = {"bfloat16": 0.03, "float16": 0.005}
"""The largest distance of a row from the reference's, relative to its length, by the dtype of the device. Rounding
causes at most a third of it. Integers must be equal."""
_SLOW, _LAUNCH_SECONDS, _BYTES_PER_SECOND = 20.0, 10e-6, 1e12
"""A case is slow if a call takes 20 times what its bytes take, or its launches. Devices are no slower. With the few
tokens of a case, operations take less than the bytes of their operands."""
_NUM_CALLS, _MOST_SECONDS_OF_CALLS = 20, 0.2
_SEED = 85
_CODE = re.compile(r"\b(?:error|code)\D{0,6}(\d{6})\b", re.IGNORECASE)
_LOST_CONTEXT = re.compile(r"\b507\d{3}\b")
"""After these errors of a kernel no call of the process succeeds."""

Verdict = Literal["right", "slow", "wrong", "refused", "crashed", "left out"]


class Side:
    """A platform with a device and a dtype, and what a case computes with. All sides get the same random numbers."""

    def __init__(self, platform: Platform, dtype: torch.dtype, number: int = 0):
        """`number`: of the device."""
        self.platform, self.dtype = platform, dtype
        self.device = platform.devices.set_device(number)
        self.num_bytes = 0
        """Bytes of the tensors that were made here."""

    @cached_property
    def ops(self) -> Ops:
        return self.platform.make_ops()

    @cached_property
    def quantised_ops(self) -> QuantisedOps:
        return self.platform.make_quantised_ops(self.ops)

    def attention(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> AttentionBackend:
        return self.platform.make_attention("auto", num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                                            block_size=block_size, dtype=self.dtype)

    def random(self, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
        """Normal numbers, rounded to bfloat16 on both sides."""
        import torch

        return self.put((torch.randn(shape, generator=_generator(seed)) * scale).bfloat16().to(self.dtype))

    def integers(self, low: int, high: int, *shape: int, seed: int, dtype: torch.dtype) -> Tensor:
        """Uniform integers from `low` to `high` - 1."""
        import torch

        return self.put(torch.randint(low, high, shape, generator=_generator(seed), dtype=dtype))

    def put(self, values: Tensor) -> Tensor:
        """`values` on the device."""
        self.num_bytes += values.nbytes
        return values.to(self.device)


def _generator(seed: int) -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(_SEED + seed)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A computation of a device and its reference. `prepare` makes, of a side, the call that is compared and timed.

    Where several kernels can do one job, each has a case of that `job`, the first choice first.
    """

    name: str
    prepare: Callable[[Side], Callable[[], Tensor]]
    dtype: str = "bfloat16"
    job: str = ""
    kernel: str = ""
    gives_up: str = ""
    """A start can do without this where no kernel is right: a form of weights, or "graphs"."""
    describe: Callable[[Side], str] = lambda side: ""
    """A message for what is right."""
    seconds: float = 180.0
    """A case that takes longer counts as one that hangs."""
    is_timed: bool = True
    num_launches: int = 1

    @property
    def title(self) -> str:
        return f"{self.name} ({', '.join(filter(None, (self.kernel, self.dtype)))})"

    def finding(self, verdict: Verdict, **found: Any) -> Finding:
        return Finding(case=self.title, verdict=verdict, job=self.job, kernel=self.kernel, gives_up=self.gives_up,
                       **found)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The end of a case. Errors are distances of rows relative to their length; of integers, the share that differs."""

    case: str
    verdict: Verdict
    job: str = ""
    kernel: str = ""
    gives_up: str = ""
    largest_error: float | None = None
    median_error: float | None = None
    microseconds: float | None = None
    """The median of 20 calls, each waited for."""
    message: str = ""
    """The first line and the codes of the device's error, or what is wrong."""
    process: int = 0
    """The number of the process that computed it."""

    @property
    def is_right(self) -> bool:
        return self.verdict in ("right", "slow")


def distances(found: Tensor, expected: Tensor) -> Tensor:
    """Each row's distance from what it should be over the row's length, float64; rows of zeros count as short ones.
    NaN where some value is. Of integers, the share of a row that differs."""
    found, expected = found.cpu().flatten(1), expected.cpu().flatten(1)
    if not found.is_floating_point():
        return (found != expected).double().mean(1)
    found, expected = found.double(), expected.double()
    lengths = expected.norm(dim=-1)
    return (found - expected).norm(dim=-1) / lengths.clamp(min=max(0.1 * float(lengths.mean()), 1e-30))


def run_case(case: Case, device: Side, reference: Side, fallbacks: Mapping[str, str]) -> Finding:
    """Compute a case on both sides, and time it. `fallbacks`: kernels of other jobs that are not first choices. Raises
    nothing that the device raises."""
    try:
        device.platform.fallbacks = {**fallbacks, case.job: case.kernel} if case.job else fallbacks
        call = case.prepare(device)
        found = call().cpu()
    except (RuntimeError, OSError, NotImplementedError, NpuRunnerError) as error:  # OSError: a library is missing
        return case.finding("refused", message=_told(error))
    errors_T = distances(found, case.prepare(reference)())
    errors = {"largest_error": float(errors_T.max()), "median_error": float(errors_T.median())}
    bound = BOUNDS[case.dtype] if found.is_floating_point() else 0.0
    if not errors["largest_error"] <= bound:  # NaN, too
        return case.finding("wrong", **errors, message=f"differs from the CPU by {100 * errors['largest_error']:.1f} % "
                            f"of a row's length, {100 * bound:g} % is allowed")
    if not case.is_timed:
        return case.finding("right", **errors, message=case.describe(device))
    seconds = _seconds(device.platform, call)
    least = max(case.num_launches * _LAUNCH_SECONDS, (device.num_bytes + found.nbytes) / _BYTES_PER_SECOND)
    is_slow = seconds > _SLOW * least
    told = case.describe(device), f"{1e6 * least:.0f} us were enough" if is_slow else ""
    return case.finding("slow" if is_slow else "right", **errors, microseconds=1e6 * seconds,
                        message="; ".join(filter(None, told)))


def _told(error: BaseException) -> str:
    """Its first line, and the error codes that only later lines have."""
    first, _, rest = str(error).strip().partition("\n")
    return "; ".join((first, *(code for code in dict.fromkeys(_CODE.findall(rest)) if code not in first)))


def _seconds(platform: Platform, call: Callable[[], Tensor]) -> float:
    """The median of some calls, each waited for."""
    found: list[float] = []
    while len(found) < _NUM_CALLS and sum(found) < _MOST_SECONDS_OF_CALLS:
        platform.memory.synchronize()
        start = time.perf_counter()
        call()
        platform.memory.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def choose(findings: Iterable[Finding]) -> tuple[dict[str, str], list[str]]:
    """The kernel of each job that is not its first choice, what is given up ("" for each), and why, in words.

    Raises ConfigError with the name of the first case for which nothing is right and nothing else can be done.
    """
    chosen: dict[str, str] = {}
    reasons: list[str] = []
    for job, faults in _faults(findings).items():
        said = [f"{each.case}: {each.verdict}, {each.message}" for wrong in faults.values() for each in wrong]
        kernel = next((kernel for kernel, wrong in faults.items() if all(each.gives_up for each in wrong)), None)
        kernel = next((kernel for kernel, wrong in faults.items() if not wrong), kernel)
        if kernel is None:
            raise ConfigError("; ".join(said))
        chosen |= {each.gives_up: "" for each in faults[kernel]}
        if kernel != next(iter(faults)):
            chosen[job] = kernel
        reasons += said
    return chosen, reasons


def _faults(findings: Iterable[Finding]) -> dict[str, dict[str, list[Finding]]]:
    """By job and kernel, what is not right. A case without a job is a job of its own."""
    found: dict[str, dict[str, list[Finding]]] = {}
    for finding in findings:
        of_kernel = found.setdefault(finding.job or finding.case, {}).setdefault(finding.kernel, [])
        of_kernel += [] if finding.is_right else [finding]
    return found


def _second_choices(findings: Iterable[Finding]) -> dict[str, str]:
    """The `Platform.fallbacks` for cases behind these: jobs whose first kernel is wrong and a later one is not."""
    kernels = {job: next((kernel for kernel, wrong in faults.items() if not wrong), "")
               for job, faults in _faults(findings).items() if next(iter(faults.values()))}
    return {job: kernel for job, kernel in kernels.items() if kernel}


def run_cases(host: Host, platform: str, source: str, asked: Any, seconds: float,
              tell: Callable[[Finding], object] = lambda finding: None, only: Sequence[str] = ()) -> list[Finding]:
    """The findings of `source`'s cases, made by child processes; `tell` hears of each at once. Cases that did not fit
    into `seconds` are "left out": all of them by one finding, if not even their list was made."""
    titles = [["all cases"]]
    findings: list[Finding] = []
    begun: list[Finding] = []
    end = time.monotonic() + seconds

    def add(finding: Finding) -> None:
        begun.clear()
        findings.append(finding)
        tell(finding)

    def hear(report: Any) -> None:
        if isinstance(report, list):
            titles.append(report)
        elif (finding := Finding(**report)).verdict == "crashed":
            begun.append(finding)
        else:
            add(finding)

    while (left := end - time.monotonic()) > 0 and not {each.case for each in findings}.issuperset(titles[-1]):
        num_before = len(findings)
        outcome = run_program(host, __name__, [platform, source, json.dumps(asked), json.dumps(only),
                                               json.dumps([asdict(each) for each in findings])], left, on_report=hear)
        if outcome.is_timeout:
            break
        if begun:
            is_late = outcome.error is not None and "SIGALRM" in outcome.error
            why = "it did not end in time" if is_late else outcome.error or "the process ended"
            add(replace(begun[-1], message=why))
        elif outcome.error is not None and len(findings) == num_before:  # else it only ended badly, behind its cases
            add(Finding(case=titles[0][0], verdict="crashed", message=outcome.error))
            break
    done = {each.case for each in findings}
    for title in titles[-1]:
        if title not in done:
            add(Finding(case=title, verdict="left out", message=f"the {seconds:.0f} s were over"))
    return findings


def main(arguments: list[str]) -> None:
    platform, source, asked, only, done, reports = arguments
    import torch

    def report(value: object) -> None:
        with open(reports, "a") as file:
            file.write(json.dumps(value) + "\n")

    device_of, findings = find_platform(platform), [Finding(**each) for each in json.loads(done)]
    if reason := device_of.why_unavailable():
        raise ConfigError(f"platform {platform}: {reason}")
    words = json.loads(only)
    cases = {case.title: case for case in load(source)(json.loads(asked))
             if not words or any(word in case.title for word in words)}
    report(list(cases))
    with torch.inference_mode():
        for case in cases.values():
            if any(case.title == each.case for each in findings):
                continue
            report(asdict(replace(case.finding("crashed"), process=os.getpid())))
            signal.setitimer(signal.ITIMER_REAL, case.seconds)  # its default action ends a process that hangs
            finding = run_case(case, Side(device_of, getattr(torch, case.dtype)),
                               Side(reference_platform(), torch.float64), _second_choices(findings))
            findings.append(finding)
            report(asdict(replace(finding, process=os.getpid())))
            if _LOST_CONTEXT.search(finding.message):
                return


if __name__ == "__main__":
    main(sys.argv[1:])
