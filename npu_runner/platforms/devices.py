"""Three roles of a platform: its devices, one for each rank, what joins them, and their memory, with what goes between
that and the host. Knows no vendor and no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from npu_runner.platforms.transfers import Download, SideStream

Exchange: TypeAlias = Callable[[bytes], list[bytes]]
"""Gives the other ranks a message of this one, and returns those of all ranks, in rank order. All ranks call it."""


class AllReduce(ABC):
    """Sums over the ranks of one host, beside the backend's. It decides by dtype, shape and strides alone which tensors
    it accepts, so that all ranks decide alike."""

    @abstractmethod
    def __call__(self, x: Tensor) -> bool:
        """Sum `x` over the ranks, in place. False: it does not accept `x`, and nothing was done."""

    @abstractmethod
    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
                     ) -> tuple[Tensor, Tensor] | None:
        """`Ops.add_rms_norm` of the sum of `x_TD` over the ranks. None: it does not accept them."""


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of one device: what the driver says is free, in all, and the allocator's own figures."""

    free_bytes: int
    total_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes that all processes have taken."""
        return self.total_bytes - self.free_bytes


class Memory(ABC):
    """Memory of the current device."""

    @abstractmethod
    def info(self) -> MemoryInfo | None:
        """None where memory is not a device's own (the CPU): the KV cache is then a setting."""

    def free_bytes(self) -> int | None:
        """Bytes that may still be allocated; None where that is unknown."""
        info = self.info()
        return None if info is None else info.free_bytes + info.reserved_bytes - info.allocated_bytes

    def reset_peak(self) -> None:
        """Count `peak_allocated_bytes` from here on."""
        return None

    def empty_cache(self) -> None:
        """Return the allocator's unused memory to the device."""
        return None

    def synchronize(self) -> None:
        """Wait for all that the device was given."""
        return None

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` says that device memory ran out."""
        return False

    def host_buffer(self, num_elements: int) -> Tensor:
        """Uninitialised int32 host memory; copies from it to the device are asynchronous where there is such a thing.

        It is not reused before the copies from it are done.
        """
        return torch.empty(num_elements, dtype=torch.int32)

    def download(self, tensor: Tensor) -> Download:
        """`tensor` on its way to the host; what is handed to the device from now on is not waited for."""
        return Download(tensor)

    def side_stream(self) -> SideStream | None:
        """A new one; None where a device does one thing after the other."""
        return None


class DeviceMemory(Memory):
    """For a vendor whose module in torch has the names of torch.cuda.

    out_of_memory: texts of out-of-memory errors beside torch.OutOfMemoryError, when another library than the allocator
    requested memory. loses_work: after an error the device may drop submitted work, events included.
    """

    def __init__(self, module: Any, out_of_memory: tuple[str, ...], *, loses_work: bool = False):
        self._module = module
        self._out_of_memory = out_of_memory
        self._loses_work = loses_work

    def info(self) -> MemoryInfo:
        free_bytes, total_bytes = self._module.mem_get_info()
        return MemoryInfo(free_bytes, total_bytes, self._module.memory_allocated(), self._module.max_memory_allocated(),
                          self._module.memory_reserved())

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        self._module.empty_cache()

    def synchronize(self) -> None:
        self._module.synchronize()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in self._out_of_memory)

    def host_buffer(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=torch.int32, pin_memory=True)

    def download(self, tensor: Tensor) -> Download:
        return Download.start(tensor, self._module.Event(), self._module.current_stream() if self._loses_work else None)

    def side_stream(self) -> SideStream:
        return SideStream(self._module)


class Devices(ABC):
    """The devices that this process sees."""

    @abstractmethod
    def count(self) -> int:
        """Devices of this host; on the CPU any number."""

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
    """Creates process groups of ranks."""

    backend: str
    """Its name in torch.distributed."""
    modes_with_their_own: tuple[str, ...] = ()
    """Graph modes whose collectives must not share a communicator with eager ones."""

    def options(self, *, serves_graphs: bool, is_second: bool) -> Any:
        """Options of torch.distributed for a process group; None: its own defaults.

        serves_graphs: captured or compiled steps use it. is_second: another one of the same ranks exists beside it.
        """
        return None

    def make(self, group: Any, rank: int) -> None:
        """Make the communicator of a process group now, so that the memory it takes is measured with the rest."""
        return None

    def custom_all_reduce(self, rank: int, num_ranks: int, exchange: Exchange) -> AllReduce | None:
        """An all-reduce beside the backend's, whose memory is taken now; None, on all ranks: there is none."""
        return None


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of one platform that work through torch."""

    devices: Devices
    communicators: Communicators
    memory: Memory
