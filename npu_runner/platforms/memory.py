"""A role of a platform: the memory of its devices, and what goes between it and the host. Knows nothing of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npu_runner.platforms.transfers import Download, SideStream


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of one device: what the driver says is free, in all, and the allocator's own figures."""

    free_bytes: int
    total_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int


class Memory(ABC):
    """That of the current device."""

    @abstractmethod
    def info(self) -> MemoryInfo | None:
        """None where memory is not a device's own (the CPU): the KV cache is then a setting."""

    @abstractmethod
    def reset_peak(self) -> None: ...

    @abstractmethod
    def empty_cache(self) -> None:
        """Return memory that the allocator holds and nobody uses."""

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` says that device memory ran out."""

    def host_buffer(self, num_elements: int) -> Tensor:
        """Uninitialised int32 host memory; copies from it to the device are asynchronous where there is such a thing.

        It is not handed out again before the copies from it are done.
        """
        return torch.empty(num_elements, dtype=torch.int32)

    def download(self, tensor: Tensor) -> Download:
        """`tensor` on its way to the host; what is handed to the device from now on is not waited for."""
        return Download(tensor)

    def side_stream(self) -> SideStream | None:
        """A new one; None where a device does one thing after the other."""
        return None


class DeviceMemory(Memory):
    """Of a vendor whose module in torch has the names of torch.cuda.

    out_of_memory: what errors say beside torch.OutOfMemoryError, where somebody else than the allocator asked for it.
    loses_work: after an error the device may drop what it was given, events included.
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
