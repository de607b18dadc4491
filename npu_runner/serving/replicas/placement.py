"""The devices and the cores of each replica of this host.

Knows no vendor: the platform names the variable that hides devices (`Platform.share`). Devices are counted in a process
of their own, so that the driver loads no torch and opens no device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_runner.errors import ConfigError
from npu_runner.platforms import AUTO, find_platform, pick_platform
from npu_runner.platforms.host import Host, run_program
from npu_runner.platforms.platform import Platform


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`description`: for people. `environment`: variables of its processes, added to the driver's. `cores`: the cores
    that it may use; None: the driver's."""

    platform: str
    description: str
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    num_cores: int = 1
    """Its share of the cores, bound or not."""


def place(platform: str, num_replicas: int | None, num_ranks: int) -> list[Placement]:
    """The placement of each of `num_replicas` of `num_ranks` devices; None: as many as there are devices for. Raises
    ConfigError for too few devices, and for devices that would be left over."""
    cores = sorted(os.sched_getaffinity(0))
    if platform != AUTO and find_platform(platform).visible_devices is None:
        return on_cores(platform, cores, num_replicas)
    name, num_devices = count_devices(platform)
    found = find_platform(name)
    if found.visible_devices is None:
        return on_cores(name, cores, num_replicas)
    return on_devices(found, num_devices, cores, num_replicas, num_ranks)


def on_devices(platform: Platform, num_devices: int, cores: list[int], num_replicas: int | None,
               num_ranks: int) -> list[Placement]:
    """Neighbouring devices for each replica, of the `num_devices` that this process sees."""
    if num_replicas is None:
        if num_devices % num_ranks:
            raise ConfigError(
                f"data_parallel_size auto: tensor_parallel_size {num_ranks} does not divide the {num_devices} devices "
                f"that are visible; set one that does, or a number of replicas, at most {num_devices // num_ranks}")
        num_replicas = num_devices // num_ranks
    if num_replicas * num_ranks > num_devices:
        raise ConfigError(
            f"data_parallel_size {num_replicas}: with tensor_parallel_size {num_ranks} it takes "
            f"{num_replicas * num_ranks} devices, {num_devices} are visible; at most {num_devices // num_ranks} "
            "replicas have room")
    shares = [range(number * num_ranks, (number + 1) * num_ranks) for number in range(num_replicas)]
    return [
        Placement(
            platform=platform.name, description=f"{platform.name} {','.join(map(str, share))}",
            environment=platform.share(share, num_devices), num_cores=max(1, len(cores) // num_replicas))
        for share in shares
    ]


def on_cores(platform: str, cores: list[int], num_replicas: int | None) -> list[Placement]:
    if num_replicas is None:
        raise ConfigError(f"data_parallel_size auto: takes all devices, and the {platform} platform has cores only; "
                          f"give a number of replicas, which share {len(cores)} cores")
    return [
        Placement(
            platform=platform, description=f"{platform}, cores {_ranges(share)}", cores=frozenset(share),
            num_cores=len(share))
        for share in (_share(cores, number, num_replicas) for number in range(num_replicas))
    ]


def _share(cores: list[int], number: int, count: int) -> list[int]:
    """Neighbouring cores, which share caches and memory; with more replicas than cores several have the same one."""
    if count > len(cores):
        return [cores[number % len(cores)]]
    return cores[number * len(cores) // count : (number + 1) * len(cores) // count]


def _ranges(cores: list[int]) -> str:
    return str(cores[0]) if len(cores) == 1 else f"{cores[0]}-{cores[-1]}"


def count_devices(platform: str) -> tuple[str, int]:
    """The platform that "auto" means here, and how many devices it has. Raises ConfigError where it cannot be used."""
    outcome = run_program(Host(), __name__, [platform])
    if outcome.error is not None:
        raise ConfigError(f"data_parallel_size: the devices of platform {platform} cannot be counted ({outcome.error})")
    (found,) = outcome.reports
    if "error" in found:
        raise ConfigError(found["error"])
    return found["platform"], found["num_devices"]


def main(arguments: list[str]) -> None:
    """PLATFORM REPORTS: write what `count_devices` returns, or the error, as one line of JSON."""
    name, reports = arguments
    try:
        platform = pick_platform(name)
        found: dict[str, Any] = {"platform": platform.name, "num_devices": platform.devices.count()}
    except ConfigError as error:
        found = {"error": str(error)}
    with open(reports, "a") as file:
        file.write(json.dumps(found) + "\n")
