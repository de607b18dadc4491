"""The Ray cluster of a job, its resources, and the demand of each replica. Knows nothing of rows.

Raises ConfigError for each reason why a job cannot start there.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from npu_runner.errors import ConfigError
from npu_runner.platforms import find_platform, platforms
from npu_runner.serving.options import AUTO

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Each replica needs `amount` of `resource`. `num_cores`: its share of the cluster's cores."""

    platform: str
    resource: str
    amount: int
    num_cores: int = 1
    most: int | None = None
    """The number of replicas; None: as many as there is room for."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of its actor."""
        if self.resource == "CPU":
            return {"num_cpus": self.amount}
        return {"num_gpus": self.amount} if self.resource == "GPU" else {"resources": {self.resource: self.amount}}

    @property
    def wanted(self) -> str:
        return f"{self.resource} {self.amount}"

    def num_places(self, resources: Mapping[str, float]) -> int:
        """Replicas that fit into a cluster with these resources, if no other program uses any."""
        room = int(resources.get(self.resource, 0)) // self.amount
        return room if self.most is None else min(room, self.most)


@contextlib.contextmanager
def cluster(address: str) -> Iterator[Mapping[str, float]]:
    """Within, this process is a driver of the cluster at `address` ("auto": the one on this host). Gives the cluster's
    resources."""
    if address != AUTO:
        _check_address(address)
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


def demand(resources: Mapping[str, float], platform: str, num_replicas: int | str, num_ranks: int) -> Demand:
    """The demand of each of `num_replicas` of `num_ranks` devices; "auto": as many as there are devices for."""
    candidates = platforms() if platform == AUTO else [find_platform(platform)]
    found = next((each for each in candidates if resources.get(each.ray_resource)), candidates[-1])
    platform, resource = found.name, found.ray_resource
    there = int(resources.get(resource, 0))
    if not there:
        raise ConfigError(f"ray: the cluster has no resource {resource}, which platform {platform} takes; it has "
                          f"{_shown(resources)}. Start nodes that have it, or name another platform")
    if found.visible_devices is None:
        return _of_cores(platform, resource, there, num_replicas)
    if there < num_ranks:
        raise ConfigError(f"data_parallel_size {num_replicas}: one replica of tensor_parallel_size {num_ranks} takes "
                          f"{num_ranks} {resource}, the cluster has {there}; start nodes that have them")
    if num_replicas == AUTO and there % num_ranks:
        raise ConfigError(f"data_parallel_size auto: tensor_parallel_size {num_ranks} does not divide the {there} "
                          f"{resource} of the cluster; set one that does, or a number of replicas")
    most = None if num_replicas == AUTO else int(num_replicas)
    count = min(there // num_ranks, most or there)
    share = max(1, int(resources.get("CPU", count)) // count)
    return Demand(platform=platform, resource=resource, amount=num_ranks, num_cores=share, most=most)


def _of_cores(platform: str, resource: str, there: int, num_replicas: int | str) -> Demand:
    if num_replicas == AUTO:
        raise ConfigError(f"data_parallel_size auto: takes all devices, and the {platform} platform has cores only; "
                          f"give a number of replicas, which share {there} cores")
    share = max(1, there // int(num_replicas))
    return Demand(platform=platform, resource=resource, amount=share, num_cores=share, most=int(num_replicas))


def resources_now() -> Mapping[str, float]:
    """The cluster's resources; a lost host still counts for some seconds."""
    found: Mapping[str, float] = ray.cluster_resources()
    return found


def _check_address(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise ConfigError(f"ray {address}: not an address; give HOST:PORT as `ray start --head` prints it, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(f"ray {address}: no process answers there ({error.strerror or error}); is the cluster "
                          "running, and may this host reach it?") from error


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(resources.items()) if ":" not in name)
