"""Cases: what a device computes, beside the CPU from the same numbers, one case after the other in a child process.

    python -m npu_runner.platforms.cases PLATFORM SOURCE ASKED DONE REPORTS

runs the cases that the function SOURCE ("module:name") makes of the JSON value ASKED, but those of the JSON list DONE.
Each is named in the file REPORTS before it begins, so that one that crashes or hangs is known; `run_cases` then goes on
with the next one in a new child. Knows no operator and no vendor.
"""

from __future__ import annotations

import json
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from npu_runner.errors import ConfigError, NpuRunnerError
from npu_runner.platforms import find_platform, load, reference_platform
from npu_runner.platforms.host import Host, run_program
from npu_runner.platforms.platform import Platform
from npu_runner.processes.stopwatch import Stopwatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from npu_runner.platforms.attention import AttentionBackend
    from npu_runner.platforms.ops import Ops
    from npu_runner.platforms.quantised import QuantisedOps

BOUNDS = {"bfloat16": 0.03, "float16": 0.005}
"""The largest distance of a row from the reference's, relative to its length, by the dtype of the device. Rounding
causes at most a third of it. Integers must be equal."""
_SLOW, _LAUNCH_SECONDS, _BYTES_PER_SECOND, _OPERATIONS_PER_SECOND = 20.0, 10e-6, 1e12, 1e14
"""A case is slow if a call takes 20 times what its bytes or operations take, or a launch. Devices are no slower."""
_NUM_CALLS, _MOST_SECONDS_OF_CALLS = 20, 0.2
_CASE_SECONDS = 120
_SEED = 85
_LOST_CONTEXT = re.compile(r"\b507\d{3}\b")
"""After these errors of a kernel no call of the process succeeds."""

Verdict = Literal["right", "slow", "wrong", "refused", "crashed", "left out"]


class Side:
    """A platform with a device and a dtype, and what a case computes with. All sides get the same random numbers."""

    def __init__(self, platform: Platform, dtype: torch.dtype):
        self.platform, self.dtype = platform, dtype
        self.device = platform.devices.set_device(0)
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
    """What a start can do without where no kernel is right: a form of weights, or "graphs"."""
    describe: Callable[[Side], str] = lambda side: ""
    """A message for what is right."""
    num_launches: int = 1
    num_operations: int = 0
    """Multiplications and additions, where they take longer than the bytes that `prepare` makes."""

    @property
    def title(self) -> str:
        return f"{self.name} ({', '.join(filter(None, (self.kernel, self.dtype)))})"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of a case. Errors are distances of rows relative to their length; of integers, the share that differs.
    """

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
    """The first line of what the device said, or what is wrong."""

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


def run_case(case: Case, device: Side, reference: Side) -> Finding:
    """Compute a case on both sides, and time it. Raises nothing that the device raises."""
    common: dict[str, Any] = {"case": case.title, "job": case.job, "kernel": case.kernel, "gives_up": case.gives_up}
    try:
        device.platform.fallbacks = {case.job: case.kernel} if case.job else {}
        call = case.prepare(device)
        found = call().cpu()
    except (RuntimeError, OSError, NotImplementedError, NpuRunnerError) as error:  # OSError: a library is missing
        return Finding(**common, verdict="refused", message=str(error).strip().partition("\n")[0])
    errors = distances(found, case.prepare(reference)())
    common |= {"largest_error": float(errors.max()), "median_error": float(errors.median())}
    bound = BOUNDS[case.dtype] if found.is_floating_point() else 0.0
    if not common["largest_error"] <= bound:  # NaN, too
        return Finding(**common, verdict="wrong", message=f"differs from the CPU by {100 * common['largest_error']:.1f}"
                       f" % of a row, {100 * bound:g} % is allowed")
    seconds = _seconds(device.platform, call)
    least = max(case.num_launches * _LAUNCH_SECONDS, (device.num_bytes + found.nbytes) / _BYTES_PER_SECOND,
                case.num_operations / _OPERATIONS_PER_SECOND)
    is_slow = seconds > _SLOW * least
    told = case.describe(device), f"{1e6 * least:.0f} us were enough" if is_slow else ""
    return Finding(**common, verdict="slow" if is_slow else "right", microseconds=1e6 * seconds,
                   message="; ".join(filter(None, told)))


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
    by_job: dict[str, dict[str, list[Finding]]] = {}
    for finding in findings:
        by_job.setdefault(finding.job or finding.case, {}).setdefault(finding.kernel, []).append(finding)
    chosen: dict[str, str] = {}
    reasons: list[str] = []
    for job, by_kernel in by_job.items():
        faults = {kernel: [each for each in of_kernel if not each.is_right] for kernel, of_kernel in by_kernel.items()}
        first = next(iter(faults))
        kernel = next((kernel for kernel, wrong in faults.items() if not wrong), None)
        if kernel is None:
            kernel = next((kernel for kernel, wrong in faults.items() if all(each.gives_up for each in wrong)), None)
            if kernel is None:
                raise ConfigError("; ".join(f"{each.case}: {each.verdict}, {each.message}" for wrong in faults.values()
                                            for each in wrong))
            chosen |= {each.gives_up: "" for each in faults[kernel]}
        if kernel != first:
            chosen[job] = kernel
        reasons += [f"{each.case}: {each.verdict}, {each.message}" for wrong in faults.values() for each in wrong]
    return chosen, reasons


def run_cases(host: Host, platform: str, source: str, asked: Any, seconds: float,
              tell: Callable[[Finding], object] = lambda finding: None) -> list[Finding]:
    """The findings of `source`'s cases, made by child processes; `tell` hears of each at once. Cases that did not fit
    into `seconds` are "left out"."""
    titles: list[str] = []
    findings: list[Finding] = []
    watch = Stopwatch()

    def add(finding: Finding) -> None:
        findings.append(finding)
        tell(finding)

    def hear(report: Any) -> None:
        if isinstance(report, list):
            titles[:] = report
        elif isinstance(report, dict):
            add(Finding(**report))
        else:
            begun.append(report)

    while not watch.exceeds(seconds) and not (titles and len(findings) == len(titles)):
        begun: list[str] = []
        before = len(findings)
        outcome = run_program(host, __name__, [platform, source, json.dumps(asked),
                                               json.dumps([each.case for each in findings])],
                              seconds, on_report=hear)
        if len(begun) > len(findings) - before and not outcome.is_timeout:
            add(Finding(case=begun[-1], verdict="crashed", message=outcome.error or "the process ended"))
        elif outcome.error is not None:
            add(Finding(case="all cases", verdict="crashed", message=outcome.error))
            break
    done = {each.case for each in findings}
    for title in titles:
        if title not in done:
            add(Finding(case=title, verdict="left out", message=f"the {seconds:.0f} s were over"))
    return findings


def main(arguments: list[str]) -> None:
    platform, source, asked, done, reports = arguments
    import torch

    def report(value: object) -> None:
        with open(reports, "a") as file:
            file.write(json.dumps(value) + "\n")

    device_of, finished = find_platform(platform), json.loads(done)
    if reason := device_of.why_unavailable():
        raise ConfigError(f"platform {platform}: {reason}")
    cases: list[Case] = load(source)(json.loads(asked))
    report([case.title for case in cases])
    with torch.inference_mode():
        for case in cases:
            if case.title in finished:
                continue
            report(case.title)
            signal.setitimer(signal.ITIMER_REAL, _CASE_SECONDS)  # its default action ends a process that hangs
            finding = run_case(case, Side(device_of, getattr(torch, case.dtype)),
                               Side(reference_platform(), torch.float64))
            report(asdict(finding))
            if _LOST_CONTEXT.search(finding.message):
                return


if __name__ == "__main__":
    main(sys.argv[1:])
