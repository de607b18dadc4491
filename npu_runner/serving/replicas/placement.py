"""Where a replica of this host runs: the devices that it sees, and its share of the cores.

Knows no vendor: which variable hides devices is the platform's to say (`Platform.device_environment`). It is asked in a
process of its own, so that the driver loads no torch and opens no device.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_runner.errors import ConfigError
from npu_runner.processes import commands

_PROBE = "npu_runner.platforms.device_probe"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`description`: for people. `environment`: variables that its processes have beside those of the driver.

    `cores`: those that it may use; None: those that the driver may.
    """

    platform: str
    description: str
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    num_cores: int = 1
    """Its share of them, bound or not."""


def place(platform: str, num_replicas: int | None, num_ranks: int) -> list[Placement]:
    """Where each of `num_replicas` of `num_ranks` devices runs; None: as many as there are devices for.

    Raises ConfigError, by name, where there are too few devices, or some would be left over.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if platform == "cpu":
        return _on_cores(cores, num_replicas)
    found = _ask(platform, num_ranks)
    if found["platform"] == "cpu":
        return _on_cores(cores, num_replicas)
    return on_devices(found, cores, num_replicas, num_ranks)


def on_devices(
    found: Mapping[str, Any], cores: list[int], num_replicas: int | None, num_ranks: int
) -> list[Placement]:
    """Neighbouring devices for each replica. `found`: platform, num_devices, and devices and environment of shares."""
    num_devices = found["num_devices"]
    if num_replicas is None:
        if num_devices % num_ranks:
            raise ConfigError(
                f"data_parallel_size auto: tensor_parallel_size {num_ranks} does not divide the {num_devices} devices "
                f"that are visible; set one that does, or a number of replicas, at most {num_devices // num_ranks}"
            )
        num_replicas = num_devices // num_ranks
    if num_replicas * num_ranks > num_devices:
        raise ConfigError(
            f"data_parallel_size {num_replicas}: with tensor_parallel_size {num_ranks} it takes "
            f"{num_replicas * num_ranks} devices, {num_devices} are visible; at most {num_devices // num_ranks} "
            "replicas have room"
        )
    share = max(1, len(cores) // num_replicas)
    return [
        Placement(
            platform=found["platform"],
            description=f"{found['platform']} {found['shares'][number]['devices']}",
            environment=found["shares"][number]["environment"],
            num_cores=share,
        )
        for number in range(num_replicas)
    ]


def _on_cores(cores: list[int], num_replicas: int | None) -> list[Placement]:
    if num_replicas is None:
        raise ConfigError("data_parallel_size auto: takes all devices, and the cpu platform has cores only; give a "
                          f"number of replicas, which share {len(cores)} cores")
    return [
        Placement(
            platform="cpu",
            description=f"cpu, cores {_ranges(share)}",
            cores=frozenset(share),
            num_cores=len(share),
        )
        for share in (_share(cores, number, num_replicas) for number in range(num_replicas))
    ]


def _share(cores: list[int], number: int, count: int) -> list[int]:
    """Neighbouring cores, which share caches and memory; with more replicas than cores several have the same one."""
    if count > len(cores):
        return [cores[number % len(cores)]]
    return cores[number * len(cores) // count : (number + 1) * len(cores) // count]


def _ranges(cores: list[int]) -> str:
    return str(cores[0]) if len(cores) == 1 else f"{cores[0]}-{cores[-1]}"


def _ask(platform: str, num_ranks: int) -> dict[str, Any]:
    done = subprocess.run(commands.module_command(_PROBE, platform, num_ranks), env=commands.environment(),
                          stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        reason = done.stderr.strip().splitlines()
        raise ConfigError(f"data_parallel_size: the devices of platform {platform} cannot be counted "
                          f"({reason[-1] if reason else f'exit status {done.returncode}'})")
    found: dict[str, Any] = json.loads(lines[-1])
    if "error" in found:
        raise ConfigError(found["error"])
    return found
