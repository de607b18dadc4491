"""Settings of replicas, and of the worker processes that prepare requests. Knows no callers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from npu_runner.errors import ConfigError
from npu_runner.request.limits import LIMITS, MIB

AUTO = "auto"
_MAX_DEFAULT_WORKERS = 16
_LEAST_WORKER_BYTES = 64 * MIB


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Options of a job and settings of `LLM`, beside RunnerConfig's. A value out of range is a ConfigError that names
    it."""

    data_parallel_size: int | str = 1
    """Replicas of the model on this host, which share the requests. Each runs on devices of its own,
    tensor_parallel_size of them. auto: as many as there are devices for."""
    max_replica_restarts: int = 3
    """The number of times that a replica is started again after a death; its requests go to the others."""

    def __post_init__(self) -> None:
        count = self.data_parallel_size
        if count != AUTO and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ConfigError(f"data_parallel_size: {count!r} is no number of replicas, nor auto")
        if self.max_replica_restarts < 0:
            raise ConfigError(f"max_replica_restarts: {self.max_replica_restarts} is negative; 0 starts none again")


@dataclass(frozen=True, kw_only=True)
class PreprocessingOptions:
    """Options of a job and settings of `LLM`, beside RunnerConfig's. A request is a row of the job, or a prompt of
    `LLM`. A value out of range is a ConfigError that names it."""

    preprocessing_workers: int | None = None
    """Processes that decode images and videos and tokenize, for each replica. None: half of its CPU cores, 16 at most.
    0, in LLM alone: none; the calling process prepares everything, without limits on memory and time."""
    preprocessing_timeout: float = 120.0
    """Seconds after which the preprocessing of one request is given up; inf: never."""
    max_media_bytes: int = LIMITS.max_media_bytes
    """Most bytes of the file, or of the decoded data: URL, of one image or video; a request with a larger one fails."""
    max_prompt_media_bytes: int = LIMITS.max_prompt_media_bytes
    """Most bytes of all different images and videos of a request together; a request with more fails."""
    worker_memory_bytes: int = LIMITS.worker_memory_bytes
    """Memory that the preprocessing of one request may take in its worker process, beyond the process's memory at its
    start; a request that needs more fails."""

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

    def num_workers(self, num_cores: int) -> int:
        """Workers beside a model with `num_cores` cores."""
        if self.preprocessing_workers is not None:
            return self.preprocessing_workers
        return max(1, min(_MAX_DEFAULT_WORKERS, num_cores // 2))


def num_cpus() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
