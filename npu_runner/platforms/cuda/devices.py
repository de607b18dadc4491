"""Devices, NCCL's communicators and memory of hosts with CUDA. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch

from npu_runner.errors import ConfigError
from npu_runner.platforms.cuda.compile_ahead import compile_ahead, prepare
from npu_runner.platforms.devices import AllReduce, Communicators, DeviceMemory, Devices, Exchange, Memory, Roles

# torch has a class for its own allocator's error only; these come as RuntimeError from the driver and the libraries.
_OUT_OF_MEMORY = ("CUDA error: out of memory", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
                  "CUDNN_STATUS_ALLOC_FAILED")


def roles() -> Roles:
    memory = DeviceMemory(torch.cuda, _OUT_OF_MEMORY)
    return Roles(devices=CudaDevices(memory), communicators=CudaCommunicators(), memory=memory)


class CudaDevices(Devices):
    def __init__(self, memory: Memory):
        self._memory = memory
        self._prepared: Future[None] | None = None

    def count(self) -> int:
        return torch.cuda.device_count()

    def set_device(self, local_rank: int) -> torch.device:
        if local_rank >= self.count():
            raise ConfigError(f"rank {local_rank} needs a GPU of its own, {self.count()} are visible; lower "
                              f"tensor_parallel_size or check CUDA_VISIBLE_DEVICES")
        torch.cuda.set_device(local_rank)
        self._prepared = prepare(lambda: torch.cuda.set_device(local_rank))
        return torch.device("cuda", local_rank)

    def compile_ahead(self, run: Callable[[], object]) -> Callable[[], list[str]]:
        device = torch.cuda.current_device()
        return compile_ahead(run, lambda: torch.cuda.set_device(device), self._prepared)

    def is_failure(self, error: BaseException) -> bool:
        # Errors of kernels stay with the context for good; the allocator's and the libraries' refusals do not.
        is_device = isinstance(error, (torch.AcceleratorError, torch.distributed.DistError))
        return is_device and not self._memory.is_out_of_memory(error)


class CudaCommunicators(Communicators):
    backend = "nccl"

    def custom_all_reduce(self, rank: int, num_ranks: int, exchange: Exchange) -> AllReduce | None:
        from npu_runner.platforms.cuda.all_reduce import make_all_reduce

        return make_all_reduce(rank, num_ranks, exchange)
