"""How many replicas there are, and how often one may die. Knows nothing of where they run."""

from __future__ import annotations

from dataclasses import dataclass

from npu_runner.errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """Options of a job and settings of `LLM`, beside RunnerConfig's. A value out of range is a ConfigError that names
    it."""

    data_parallel_size: int | str = 1
    """Replicas of the model on this host, which share the requests. Each runs on devices of its own,
    tensor_parallel_size of them. auto: as many as there are devices for."""
    max_replica_restarts: int = 3
    """How often a replica that died is started again; its requests go to the others."""

    def __post_init__(self) -> None:
        count = self.data_parallel_size
        if count != AUTO and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ConfigError(f"data_parallel_size: {count!r} is no number of replicas, nor auto")
        if self.max_replica_restarts < 0:
            raise ConfigError(f"max_replica_restarts: {self.max_replica_restarts} is negative; 0 starts none again")
