"""The Ray cluster of a job: whether it answers, what it has, what each replica takes of it. Knows nothing of rows.

Raises ConfigError, by name, for whatever keeps a job from beginning there.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from npu_runner.errors import ConfigError
from npu_runner.replicas.placement import AUTO

_CONNECT_SECONDS = 5.0
# What Ray calls the devices of a platform.
_RESOURCES = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What one replica takes. `options`: of its actor. `num_cores`: its share of the cluster's."""

    platform: str
    options: Mapping[str, Any] = field(default_factory=dict)
    num_cores: int = 1


@contextlib.contextmanager
def cluster(address: str) -> Iterator[Mapping[str, float]]:
    """Within, this process is a driver of the cluster at `address` ("auto": the one that runs on this host). Gives what
    the cluster has in all."""
    if address != AUTO:
        _knock(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"ray {address}: no cluster can be joined ({reason}); start one with `ray start --head`, or "
                          "give the address that it has printed") from error
    try:
        yield ray.cluster_resources()
    finally:
        ray.shutdown()


def demands(resources: Mapping[str, float], platform: str, num_replicas: int | str, num_ranks: int) -> list[Demand]:
    """What each of `num_replicas` of `num_ranks` devices takes; "auto": as many replicas as there are devices for."""
    if platform == "auto":
        platform = next((name for name in ("npu", "cuda") if resources.get(_RESOURCES[name])), "cpu")
    resource = _RESOURCES[platform]
    there = int(resources.get(resource, 0))
    if not there:
        raise ConfigError(f"ray: the cluster has no resource {resource}, which platform {platform} takes; it has "
                          f"{_shown(resources)}. Start nodes that have it, or name another platform")
    if platform == "cpu":
        return _on_cores(there, num_replicas)
    if num_replicas == AUTO:
        if there % num_ranks or there < num_ranks:
            raise ConfigError(f"data_parallel_size auto: tensor_parallel_size {num_ranks} does not divide the {there} "
                              f"{resource} of the cluster; set one that does, or a number of replicas")
        num_replicas = there // num_ranks
    count = int(num_replicas)
    if count * num_ranks > there:
        raise ConfigError(f"data_parallel_size {count}: with tensor_parallel_size {num_ranks} it takes "
                          f"{count * num_ranks} {resource}, the cluster has {there}; at most {there // num_ranks} fit")
    taken = {"num_gpus": num_ranks} if platform == "cuda" else {"resources": {resource: num_ranks}}
    share = max(1, int(resources.get("CPU", count)) // count)
    return [Demand(platform=platform, options=taken, num_cores=share)] * count


def _on_cores(there: int, num_replicas: int | str) -> list[Demand]:
    if num_replicas == AUTO:
        raise ConfigError("data_parallel_size auto: takes all devices, and the cpu platform has cores only; give a "
                          f"number of replicas, which share {there} cores")
    count = int(num_replicas)
    if count > there:
        raise ConfigError(f"data_parallel_size {count}: a replica takes a core at least, the cluster has {there}")
    share = there // count
    return [Demand(platform="cpu", options={"num_cpus": share}, num_cores=share)] * count


def _knock(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise ConfigError(f"ray {address}: not an address; give HOST:PORT as `ray start --head` prints it, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(f"ray {address}: nobody answers there ({error.strerror or error}); is the cluster running, "
                          "and may this host reach it?") from error


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(resources.items()) if ":" not in name)
