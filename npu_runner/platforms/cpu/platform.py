"""The CPU as a platform: gloo ranks, torch operators, inductor graphs. Knows nothing of models or requests."""

from __future__ import annotations

import os
import sys

import torch

from npu_runner.platforms.base import (
    AttentionBackend,
    GraphCompiler,
    GraphSettings,
    MemoryInfo,
    Platform,
    PlatformDefaults,
)
from npu_runner.platforms.cpu.attention import CpuAttention
from npu_runner.platforms.cpu.gated_delta import CpuGatedDelta
from npu_runner.platforms.cpu.graphs import InductorCompiler
from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.gated_delta import GatedDeltaBackend, GatedDeltaShape
from npu_runner.platforms.ops import Ops


class CpuPlatform(Platform):
    name = "cpu"
    attention_backends = ("torch",)
    distributed_backend = "gloo"
    # Eager starts at once; inductor needs tens of seconds a bucket (docs/benchmarks.md has the figures). float32
    # because few CPUs multiply faster in 16 bits, and because answers then equal the reference token for token.
    defaults = PlatformDefaults(
        block_size=16, max_num_seqs=256, max_num_batched_tokens=4096, graph_mode="eager", dtype="float32",
        async_scheduling=False,  # there is no other device: a step launched early only ends later
    )

    @classmethod
    def why_unavailable(cls) -> str | None:
        return None

    def prepare_process(self, rank: int, num_ranks: int) -> None:
        # All ranks are on this host, and a host name may not resolve: gloo talks over the loopback interface.
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))

    def set_device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1 << 16

    def make_ops(self) -> Ops:
        return CpuOps()

    def make_attention(self, name: str, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
                       dtype: torch.dtype) -> AttentionBackend:
        bytes_per_token = 2 * num_kv_heads * head_dim * dtype.itemsize
        return CpuAttention(block_size=block_size, bytes_per_token=bytes_per_token)

    def make_gated_delta(self, shape: GatedDeltaShape, dtype: torch.dtype) -> GatedDeltaBackend:
        return CpuGatedDelta(shape)

    def make_graph_compiler(self, settings: GraphSettings) -> GraphCompiler:
        return InductorCompiler(settings.mode)

    def memory_info(self) -> MemoryInfo | None:
        return None

    def reset_peak_memory(self) -> None:
        """Nothing is measured on the CPU."""

    def empty_cache(self) -> None:
        """The CPU allocator returns memory by itself."""

    def synchronize(self) -> None:
        """Operators have finished when they return."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "can't allocate memory" in str(error)

    def is_device_failure(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and "gloo" in str(error)  # another rank is gone, or stopped
