"""Ascend NPUs as a platform: HCCL ranks, fused operators, captured and compiled graphs. Knows nothing of models."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from npu_runner.errors import ConfigError
from npu_runner.platforms.base import (
    AttentionBackend,
    GraphCompiler,
    GraphSettings,
    MemoryInfo,
    Platform,
    PlatformDefaults,
    chosen_devices,
)
from npu_runner.platforms.download import Download
from npu_runner.platforms.gated_delta import GatedDeltaBackend, GatedDeltaShape
from npu_runner.platforms.npu.allocator_settings import allocator_defaults, check_allocator
from npu_runner.platforms.npu.host_settings import (
    check_graph_mode,
    communicator_config,
    most_graphs,
    process_defaults,
    rank_defaults,
)
from npu_runner.platforms.npu.settings import npu_settings
from npu_runner.platforms.npu.versions import cann_version, old_cann, old_wheel, soc_name, takes_argument
from npu_runner.platforms.ops import Ops
from npu_runner.platforms.side_stream import SideStream

if TYPE_CHECKING:
    from npu_runner.platforms.npu.attention import NpuAttention

logger = logging.getLogger(__name__)

# What the allocator says, and the driver's code where somebody else asks it for memory.
_OUT_OF_MEMORY = ("out of memory", "207001")
# The runtime's codes of a device, stream or collective that failed (aclError 507000 to 507999), and HCCL's own.
_DEVICE_FAILURE = re.compile(r"\b507\d{3}\b|\bERR02\d{3}\b")


_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
# What every document of the attention names for a paged cache in TND. Others are tried before weights are loaded.
_HEAD_DIM_OF_EVERY_CANN = 128


class NpuPlatform(Platform):
    name = "npu"
    attention_backends = ("fused",)
    distributed_backend = "hccl"
    # Blocks of 128: the only size that every document of the attention kernel allows for prefill and decode.
    defaults = PlatformDefaults(block_size=128, max_num_seqs=128, max_num_batched_tokens=8192,
                                graph_mode="reduce-overhead", async_scheduling=True)
    supported_block_sizes = (128,)
    lost_error_remedy = "run again with ASCEND_LAUNCH_BLOCKING=1 in the environment, and the operation itself will fail"
    keeps_graphs = ("max-autotune",)
    # HCCL: one communicator serves single operators or the graph engine, not both. Prefill runs eagerly.
    modes_with_own_communicator = ("max-autotune",)
    _attention: weakref.ref[NpuAttention] | None = None

    @classmethod
    def why_unavailable(cls) -> str | None:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        os.environ.update(allocator_defaults(os.environ))
        try:
            import torch_npu  # noqa: F401
        except Exception as error:  # noqa: BLE001 - the border to the vendor: it raises whatever its set-up lacks
            reason = str(error).strip().partition("\n")[0]
            return f"torch_npu does not load ({reason}); npu-runner doctor says what to do"
        # torch says that it is available with no device at all, too.
        is_usable = torch.npu.is_available() and torch.npu.device_count() > 0
        return None if is_usable else "no NPU is visible; npu-runner doctor says what to do"

    def __init__(self) -> None:
        """Raises ConfigError where torch_npu or CANN is too old, or the allocator's variables are one too many: by name
        now, not by an error of the first step."""
        import torch_npu

        scatter = torch.ops.npu.npu_scatter_pa_kv_cache.default
        for found in (old_wheel(torch_npu.__version__, has_cache_mode=takes_argument(scatter, "cache_mode")),
                      old_cann(cann_version())):
            if found is not None:
                raise ConfigError(f"{found.reason}; {found.remedy}, or set platform to cpu")
        check_allocator(os.environ, torch_npu.__version__)

    def prepare_process(self, rank: int, num_ranks: int) -> None:
        if num_ranks > 1:
            os.environ.update(rank_defaults(os.environ))
        self.set_device(rank)

    def process_group_options(self, *, serves_graphs: bool, is_second: bool) -> Any:
        config = communicator_config(soc_name(), os.environ, serves_graphs=serves_graphs, is_second=is_second)
        if is_second and os.environ.get("HCCL_OP_EXPANSION_MODE") == "AIV":
            logger.warning("HCCL_OP_EXPANSION_MODE=AIV holds for both communicators of graph_mode max-autotune, which "
                           "HCCL calls unpredictable; unset it, and the one of the graphs will have it")
        import torch_npu

        options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
        options.hccl_config = config
        return options

    def make_communicator(self, group: Any, rank: int) -> None:
        group._get_backend(torch.device("npu")).get_hccl_comm_name(rank, init_comm=True)

    def check_graph_mode(self, graph_mode: str) -> None:
        check_graph_mode(graph_mode, os.environ)

    def set_device(self, local_rank: int) -> torch.device:
        if local_rank >= self.device_count():
            raise ConfigError(f"rank {local_rank} needs an NPU of its own, {self.device_count()} are visible; lower "
                              "tensor_parallel_size or check ASCEND_RT_VISIBLE_DEVICES")
        num_cores = len(os.sched_getaffinity(0))
        os.environ.update(process_defaults(os.environ, num_cores=num_cores, num_devices=self.device_count()))
        if "OMP_NUM_THREADS" not in os.environ:
            # A device's process computes next to nothing on the CPU; its threads would stand in preprocessing's way.
            torch.set_num_threads(1)
        torch.npu.set_device(local_rank)
        # Operators from the installed binaries, weights in plain layout: what graphs and fused kernels here expect.
        torch.npu.set_compile_mode(jit_compile=False)
        torch.npu.config.allow_internal_format = False
        return torch.device("npu", local_rank)

    def device_count(self) -> int:
        return torch.npu.device_count()

    def device_environment(self, devices: Sequence[int], num_devices: int) -> dict[str, str]:
        # A process that sees one device counts all cores as that device's; so who sees all of them decides.
        num_cores = len(os.sched_getaffinity(0))
        unbound = {} if "CPU_AFFINITY_CONF" in os.environ else {"CPU_AFFINITY_CONF": "0"}
        bound = process_defaults(os.environ, num_cores=num_cores, num_devices=num_devices)
        return unbound | bound | {_VISIBLE: chosen_devices(os.environ.get(_VISIBLE), devices)}

    def make_ops(self) -> Ops:
        from npu_runner.platforms.npu.ops import NpuOps

        return NpuOps()

    def make_attention(self, name: str, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
                       dtype: torch.dtype) -> AttentionBackend:
        from npu_runner.platforms.npu.attention import NpuAttention

        attention = NpuAttention(num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size,
                                 device=torch.device("npu", torch.npu.current_device()),
                                 masks_decode=npu_settings().decode_attention == "masked")
        # Asked for by name, the kernel has the word: the emulation's, which the tests compare with, can do it.
        if dtype == torch.float32 and (name == "auto" or not attention.takes(dtype, head_dim)):
            raise ConfigError("dtype float32: the fused attention of Ascend devices takes float16 and bfloat16; set "
                              "dtype to one of them")
        if dtype != torch.float32 and head_dim != _HEAD_DIM_OF_EVERY_CANN and not attention.takes(dtype, head_dim):
            raise ConfigError(f"head dim {head_dim}: the fused attention of CANN {cann_version() or '(unknown)'} does "
                              "not take it over a paged cache, newer ones may; upgrade CANN, or set platform to cpu")
        self._attention = weakref.ref(attention)
        return attention

    def make_gated_delta(self, shape: GatedDeltaShape, dtype: torch.dtype) -> GatedDeltaBackend:
        from npu_runner.platforms.npu.gated_delta import NpuGatedDelta

        return NpuGatedDelta(shape, dtype, torch.device("npu", torch.npu.current_device()))

    def make_graph_compiler(self, settings: GraphSettings) -> GraphCompiler:
        from npu_runner.platforms.npu.graph_limit import LimitedGraphCompiler

        num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        limit = most_graphs(soc_name(), os.environ, num_ranks)
        compiler = self._make_graph_compiler(settings)
        return compiler if limit is None else LimitedGraphCompiler(compiler, limit)

    def _make_graph_compiler(self, settings: GraphSettings) -> GraphCompiler:
        from npu_runner.platforms.npu.graphs import AclGraphCompiler, GraphEngineCompiler

        if settings.mode == "reduce-overhead" and npu_settings().capture == "recorded":
            from npu_runner.platforms.npu.recorded_graphs import RecordedGraphCompiler

            return RecordedGraphCompiler(self._latest_attention())
        if settings.mode == "reduce-overhead":
            return AclGraphCompiler(self._latest_attention())
        if settings.cache_dir is None:
            return GraphEngineCompiler()
        from npu_runner.platforms.npu.graph_cache import CachedGraphEngineCompiler

        return CachedGraphEngineCompiler(settings)

    def _latest_attention(self) -> NpuAttention:
        """Whose lengths captured graphs take at each replay."""
        attention = self._attention() if self._attention is not None else None
        assert attention is not None, "the attention of a model is made before its graphs"
        return attention

    def memory_info(self) -> MemoryInfo | None:
        free_bytes, total_bytes = torch.npu.mem_get_info()
        return MemoryInfo(free_bytes, total_bytes, torch.npu.memory_allocated(), torch.npu.max_memory_allocated(),
                          torch.npu.memory_reserved())

    def reset_peak_memory(self) -> None:
        torch.npu.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        torch.npu.empty_cache()

    def synchronize(self) -> None:
        torch.npu.synchronize()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _OUT_OF_MEMORY)

    def is_device_failure(self, error: BaseException) -> bool:
        return bool(_DEVICE_FAILURE.search(str(error))) and not self.is_out_of_memory(error)

    def host_buffer(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=torch.int32, pin_memory=True)

    def download(self, tensor: Tensor) -> Download:
        return Download.start(tensor, torch.npu.Event(), torch.npu.current_stream())

    def side_stream(self) -> SideStream:
        return SideStream(torch.npu)

    def describe(self) -> dict[str, str]:
        import torch_npu

        return {**super().describe(), "torch_npu": torch_npu.__version__, "cann": cann_version() or "unknown",
                "device": soc_name()}
