"""Processes of one host as ranks, gloo between them, and memory that is not measured. What the host has left of it is
known, limits of containers counted. Knows nothing of models.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from npu_runner.platforms.devices import Communicators, Devices, Memory, Roles
from npu_runner.platforms.transfers import HOST

# Below the folder of a cgroup: its limit, what it takes, and the name in memory.stat of page cache that is given up
# first. Version 2 has one hierarchy, version 1 one for memory.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def roles() -> Roles:
    return Roles(devices=CpuDevices(), communicators=CpuCommunicators(), memory=CpuMemory())


class CpuDevices(Devices):
    def count(self) -> int:
        return 1 << 16

    def prepare_process(self, rank: int, num_ranks: int) -> None:
        # All ranks are on this host, and a host name may not resolve: gloo talks over the loopback interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))

    def set_device(self, local_rank: int) -> torch.device:
        return HOST

    def is_failure(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and "gloo" in str(error)  # another rank is gone, or stopped


class CpuCommunicators(Communicators):
    backend = "gloo"


class CpuMemory(Memory):
    def info(self) -> None:
        return None

    def free_bytes(self) -> int | None:
        return free_bytes()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def free_bytes(root: Path = Path("/")) -> int | None:
    """The least of what the kernel calls available and what each cgroup around this process leaves; None where the
    system says nothing of it. `root`: of the file system."""
    rooms = [_available(root / "proc/meminfo"), *_rooms_of_cgroups(root)]
    return min((room for room in rooms if room is not None), default=None)


def _available(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _rooms_of_cgroups(root: Path) -> list[int | None]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms: list[int | None] = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        if is_v1 or number == "0":
            top, names = root / "sys/fs/cgroup" / ("memory" if is_v1 else ""), _V1 if is_v1 else _V2
            # A container may see its own cgroup as the top, under a path that is the host's.
            groups = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
            rooms += [_room(top / group, *names) for group in groups]
    return rooms


def _room(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit, usage = ((group / name).read_text().strip() for name in (limit_name, usage_name))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return int(limit) - int(usage) + int(stat.get(cache_name, 0)) if limit.isdigit() else None  # it may be "max"
