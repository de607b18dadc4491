"""The share of a time in which a device does nothing, by its vendor's profiler. Knows no workload."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Span = tuple[int, int]
"""Nanoseconds, from a kernel's start to its end."""
# torch_npu's profiler writes one row for each kernel that ran.
_KERNELS, _START, _DURATION = "kernel_details.csv", "Start Time(us)", "Duration(us)"


def has_profiler(platform: str) -> bool:
    return platform in ("cuda", "npu")


def not_profiled(platform: str) -> dict[str, Any]:
    """As `DeviceProfile.idle` says it of a platform without one."""
    return {"idle_share": None, "why": f"platform {platform} has no profiler of a device"}


class DeviceProfile:
    """What ran on the device while `device_profile` was open; `why` says why nobody knows."""

    def __init__(self) -> None:
        self.spans_ns: list[Span] = []
        self.why: str | None = None

    def idle(self, seconds: float) -> dict[str, Any]:
        """{"idle_share": of the `seconds` before the last kernel's end} or {"idle_share": None, "why": the reason}."""
        if self.why is None and not self.spans_ns:
            self.why = "the profiler saw no kernel"
        if self.why is not None:
            return {"idle_share": None, "why": self.why}
        return {"idle_share": idle_share(self.spans_ns, seconds)}


@contextmanager
def device_profile(platform: str) -> Iterator[DeviceProfile]:
    """Everything that is open while it is: a few per cent slower, and a row in memory for each kernel."""
    profile = DeviceProfile()
    if platform == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as cuda:
            yield profile
        profile.spans_ns = [(event.start_ns(), event.end_ns()) for event in cuda.profiler.kineto_results.events()
                            if event.device_type() == torch.autograd.DeviceType.CUDA]
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
            profile.spans_ns += kernel_spans(file)


def kernel_spans(file: Path) -> list[Span]:
    """Of torch_npu's kernel_details.csv."""
    with file.open(newline="", encoding="utf-8") as rows:
        return [(int(float(row[_START]) * 1e3), int((float(row[_START]) + float(row[_DURATION])) * 1e3))
                for row in csv.DictReader(rows)]


def idle_share(spans_ns: Iterable[Span], window_seconds: float) -> float:
    """Share of the last `window_seconds` before the last span's end that no span covers."""
    spans_ns = list(spans_ns)
    end = max(last for _, last in spans_ns)
    start = end - int(window_seconds * 1e9)
    return 1 - busy_ns(spans_ns, start) / (end - start)


def busy_ns(spans_ns: Iterable[Span], start: int = 0) -> int:
    """Nanoseconds from `start` on that some span covers."""
    busy, reached = 0, start
    for first, last in sorted(spans_ns):
        first = max(first, reached)
        if last > first:
            busy += last - first
            reached = last
    return busy


def describe_idle(result: dict[str, Any]) -> str:
    """The share in words, of what `DeviceProfile.idle` or a child that ended made."""
    share = result.get("idle_share")
    return f"not available ({result.get('why') or result.get('failed')})" if share is None else f"{share:.1%}"
