"""Processes of one host as ranks, gloo between them, and memory that is not measured. Knows nothing of models."""

from __future__ import annotations

import os

import torch

from npu_runner.platforms.cpu import host_memory
from npu_runner.platforms.devices import Communicators, Devices, Memory, Roles
from npu_runner.platforms.transfers import HOST


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
        return host_memory.free_bytes()

    def reset_peak(self) -> None:
        """Nothing is measured on the CPU."""

    def empty_cache(self) -> None:
        """The CPU allocator returns memory by itself."""

    def synchronize(self) -> None:
        """Operators have finished when they return."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)
