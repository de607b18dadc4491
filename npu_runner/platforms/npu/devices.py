"""Devices, HCCL's communicators and memory of Ascend hosts. Knows nothing of models."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import torch
import torch_npu

from npu_runner.errors import ConfigError
from npu_runner.platforms.devices import Communicators, DeviceMemory, Devices, Memory, Roles
from npu_runner.platforms.npu.host_settings import check_allocator, communicator_config, process_defaults, rank_defaults
from npu_runner.platforms.npu.versions import accepts_argument, cann_version, old_cann, old_wheel, soc_name

logger = logging.getLogger(__name__)

# The allocator's text, and the driver's code where another library requests memory.
_OUT_OF_MEMORY = ("out of memory", "207001")
# The runtime's codes of a device, stream or collective that failed (aclError 507000 to 507999), and HCCL's own.
_FAILURE = re.compile(r"\b507\d{3}\b|\bERR02\d{3}\b")


def roles() -> Roles:
    memory = DeviceMemory(torch.npu, _OUT_OF_MEMORY, loses_work=True)
    return Roles(devices=NpuDevices(memory), communicators=NpuCommunicators(), memory=memory)


class NpuDevices(Devices):
    def __init__(self, memory: Memory):
        """Raises ConfigError if torch_npu or CANN is too old, or if both of the allocator's variables are set."""
        scatter = torch.ops.npu.npu_scatter_pa_kv_cache.default
        for found in (old_wheel(torch_npu.__version__, has_cache_mode=accepts_argument(scatter, "cache_mode")),
                      old_cann(cann_version(), torch_npu.__version__, torch.__version__)):
            if found is not None:
                raise ConfigError(f"{found.reason}; {found.remedy}, or set platform to cpu")
        check_allocator(os.environ, torch_npu.__version__)
        self._memory = memory

    def count(self) -> int:
        return torch.npu.device_count()

    def prepare_process(self, rank: int, num_ranks: int) -> None:
        if num_ranks > 1:
            os.environ.update(rank_defaults(os.environ))
        self.set_device(rank)

    def set_device(self, local_rank: int) -> torch.device:
        if local_rank >= self.count():
            raise ConfigError(f"rank {local_rank} needs an NPU of its own, {self.count()} are visible; lower "
                              "tensor_parallel_size or check ASCEND_RT_VISIBLE_DEVICES")
        num_cores = len(os.sched_getaffinity(0))
        os.environ.update(process_defaults(os.environ, num_cores=num_cores, num_devices=self.count()))
        if "OMP_NUM_THREADS" not in os.environ:
            # A device's process computes next to nothing on the CPU; its threads would stand in preprocessing's way.
            torch.set_num_threads(1)
        torch.npu.set_device(local_rank)
        # Operators from the installed binaries. Nothing becomes NZ by itself: weight_layout.py allows it for its casts.
        torch.npu.set_compile_mode(jit_compile=False)
        torch.npu.config.allow_internal_format = False
        return torch.device("npu", local_rank)

    def is_failure(self, error: BaseException) -> bool:
        return bool(_FAILURE.search(str(error))) and not self._memory.is_out_of_memory(error)


class NpuCommunicators(Communicators):
    backend = "hccl"
    # HCCL: one communicator serves single operators or the graph engine, not both. Prefill runs eagerly.
    modes_with_their_own = ("max-autotune",)

    def options(self, *, serves_graphs: bool, is_second: bool) -> Any:
        config = communicator_config(soc_name(), os.environ, serves_graphs=serves_graphs, is_second=is_second)
        if is_second and os.environ.get("HCCL_OP_EXPANSION_MODE") == "AIV":
            logger.warning("HCCL_OP_EXPANSION_MODE=AIV holds for both communicators of graph_mode max-autotune, which "
                           "HCCL calls unpredictable; unset it, and the one of the graphs will have it")
        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = config
        return options

    def make(self, group: Any, rank: int) -> None:
        group._get_backend(torch.device("npu")).get_hccl_comm_name(rank, init_comm=True)
