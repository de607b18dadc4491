"""Two roles of a platform: its devices, one for each rank, and what joins them. Knows no vendor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from npu_runner.platforms.memory import Memory


class Devices(ABC):
    """The devices that this process sees."""

    @abstractmethod
    def count(self) -> int:
        """Devices of this host; the CPU counts as many as anybody asks for."""

    def prepare_process(self, rank: int, num_ranks: int) -> None:
        """Called once in each rank's own process, before the process group exists."""
        self.set_device(rank)

    @abstractmethod
    def set_device(self, local_rank: int) -> torch.device:
        """Make the device of this rank current and return it. Raises ConfigError when there is none."""

    def compile_ahead(self, run: Callable[[], object]) -> Callable[[], list[str]]:
        """Have whatever `run` would launch compiled side by side, where kernels are compiled when they are first met.

        `run` may be called, on memory that is not what it would be. Returns what names the kernels that had to be
        compiled since, which were not met.
        """
        return list

    def is_failure(self, error: BaseException) -> bool:
        """Whether `error` says that the device, or what joins devices, is out of order: no request is its cause."""
        return False


class Communicators(ABC):
    """What ranks talk through."""

    backend: str
    """Its name in torch.distributed."""
    modes_with_their_own: tuple[str, ...] = ()
    """Graph modes whose collectives must not share a communicator with eager ones."""

    def options(self, *, serves_graphs: bool, is_second: bool) -> Any:
        """What torch.distributed makes a process group with; None: its own defaults.

        serves_graphs: captured or compiled steps use it. is_second: another one of the same ranks exists beside it.
        """
        return None

    def make(self, group: Any, rank: int) -> None:
        """Make the communicator of a process group now, so that the memory it takes is measured with the rest."""
        return None


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Those of one platform that work through torch."""

    devices: Devices
    communicators: Communicators
    memory: Memory
