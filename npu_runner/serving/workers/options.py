"""How requests are prepared: in how many processes, and how much one of them may take. Knows nothing of who asks."""

from __future__ import annotations

import os
from dataclasses import dataclass

from npu_runner.errors import ConfigError
from npu_runner.request.limits import LIMITS, MIB

_MAX_DEFAULT_WORKERS = 16
_LEAST_WORKER_BYTES = 64 * MIB


@dataclass(frozen=True, kw_only=True)
class PreprocessingOptions:
    """Settings of `LLM` beside RunnerConfig's. They have the names, the defaults and the meaning that they have in the
    batch job. A value out of range is a ConfigError that names it."""

    preprocessing_workers: int | None = None
    """Processes that decode pictures and tokenize; None: half of the CPU cores, 16 at most. 0: none, everything is
    prepared in the calling process, without the limits on memory and time."""
    preprocessing_timeout: float = 120.0
    """Seconds after which preparing one request is given up; inf: never."""
    max_media_bytes: int = LIMITS.max_media_bytes
    """A picture or a film whose file or decoded data: URL is larger is refused with its request."""
    max_prompt_media_bytes: int = LIMITS.max_prompt_media_bytes
    """A request whose different pictures and films are larger together is refused."""
    worker_memory_bytes: int = LIMITS.worker_memory_bytes
    """Memory that preparing one request may take in its worker process, beside what the process has at its start."""

    def __post_init__(self) -> None:
        if self.preprocessing_workers is not None and self.preprocessing_workers < 0:
            raise ConfigError(f"preprocessing_workers: {self.preprocessing_workers} is negative; 0 starts none")
        if not self.preprocessing_timeout > 0:
            raise ConfigError(f"preprocessing_timeout: {self.preprocessing_timeout} seconds is not positive")
        for name in ("max_media_bytes", "max_prompt_media_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is not a positive number")
        if self.worker_memory_bytes < _LEAST_WORKER_BYTES:
            raise ConfigError(f"worker_memory_bytes: {self.worker_memory_bytes} is less than 64 MiB")

    @property
    def num_workers(self) -> int:
        if self.preprocessing_workers is not None:
            return self.preprocessing_workers
        return default_num_workers(num_cpus())


def default_num_workers(num_cores: int) -> int:
    """Workers where nobody said how many, beside a model that has so many cores."""
    return max(1, min(_MAX_DEFAULT_WORKERS, num_cores // 2))


def num_cpus() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
