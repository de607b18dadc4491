"""What a device does in a time, by its vendor's profiler: the share of the time that it idles, and its kernels."""

from __future__ import annotations

import csv
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Span = tuple[int, int]
"""Nanoseconds, from a kernel's start to its end."""
# torch_npu's profiler writes one row for each kernel that ran.
_KERNELS, _NAME, _START, _DURATION = "kernel_details.csv", "Name", "Start Time(us)", "Duration(us)"
_MOST_KERNELS, _NAME_LENGTH = 16, 80


def has_profiler(platform: str) -> bool:
    return platform in ("cuda", "npu")


def not_profiled(platform: str) -> dict[str, Any]:
    """What `DeviceProfile.report` returns on a platform without a profiler."""
    return {"idle_share": None, "why": f"platform {platform} has no profiler of a device"}


class DeviceProfile:
    """The kernels that ran while `device_profile` was open; `why` is the reason where they are unknown."""

    def __init__(self) -> None:
        self.spans_ns: list[Span] = []
        self.microseconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.why: str | None = None

    def add(self, name: str, span_ns: Span) -> None:
        self.spans_ns.append(span_ns)
        self.microseconds[name[:_NAME_LENGTH]] += (span_ns[1] - span_ns[0]) / 1e3  # type: ignore[assignment]
        self.calls[name[:_NAME_LENGTH]] += 1

    def seconds_since(self, start_ns: int) -> float:
        """From this time of the system's clock to the last kernel's end; 0.0 without kernels."""
        return (max((end for _, end in self.spans_ns), default=start_ns) - start_ns) / 1e9

    def report(self, seconds: float, num_steps: int = 1) -> dict[str, Any]:
        """The idle share of the `seconds` before the last kernel's end, and the longest kernels of a step as
        (microseconds, calls, name); {"idle_share": None, "why": the reason} where they are unknown."""
        if self.why is None and not self.spans_ns:
            self.why = "the profiler saw no kernel"
        if self.why is not None:
            return {"idle_share": None, "why": self.why}
        kernels = [(round(total / num_steps, 2), round(self.calls[name] / num_steps, 2), name)
                   for name, total in self.microseconds.most_common(_MOST_KERNELS)]
        return {"idle_share": idle_share(self.spans_ns, seconds), "busy_ms": busy_ns(self.spans_ns) / 1e6 / num_steps,
                "kernels": kernels}


@contextmanager
def device_profile(platform: str) -> Iterator[DeviceProfile]:
    """Profiles everything inside, which is a few per cent slower then and takes memory for each kernel."""
    profile = DeviceProfile()
    if platform == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as cuda:
            yield profile
            torch.cuda.synchronize()
        for event in cuda.profiler.kineto_results.events():
            if event.device_type() == torch.autograd.DeviceType.CUDA:
                profile.add(event.name(), (event.start_ns(), event.end_ns()))
    elif platform == "npu":
        with _npu_profile(profile):
            yield profile
    else:
        profile.why = not_profiled(platform)["why"]
        yield profile


@contextmanager
def _npu_profile(profile: DeviceProfile) -> Iterator[None]:
    from torch_npu import profiler

    with tempfile.TemporaryDirectory() as name:
        handler = profiler.tensorboard_trace_handler(name)
        with profiler.profile(activities=[profiler.ProfilerActivity.NPU], on_trace_ready=handler):
            yield
        files = sorted(Path(name).rglob(_KERNELS))
        if not files:
            profile.why = f"torch_npu's profiler left no {_KERNELS}; it needs the toolkit's msprof"
        for file in files:
            read_kernels(file, profile)


def read_kernels(file: Path, profile: DeviceProfile) -> None:
    """Adds the kernels of torch_npu's kernel_details.csv."""
    with file.open(newline="", encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            start = float(row[_START])
            profile.add(row[_NAME], (int(start * 1e3), int((start + float(row[_DURATION])) * 1e3)))


def idle_share(spans_ns: Iterable[Span], window_seconds: float) -> float:
    """Share of the last `window_seconds` before the last span's end that no span covers."""
    spans_ns = list(spans_ns)
    end = max(last for _, last in spans_ns)
    start = end - int(window_seconds * 1e9)
    return 1 - busy_ns(spans_ns, start) / (end - start)


def busy_ns(spans_ns: Iterable[Span], start: int = 0) -> int:
    """Nanoseconds from `start` on that a span covers."""
    busy, reached = 0, start
    for first, last in sorted(spans_ns):
        first = max(first, reached)
        if last > first:
            busy += last - first
            reached = last
    return busy


def describe_idle(result: dict[str, Any]) -> str:
    """The share in words, from `DeviceProfile.report` or from a child that failed."""
    share = result.get("idle_share")
    return f"not available ({result.get('why') or result.get('failed')})" if share is None else f"{share:.1%}"
