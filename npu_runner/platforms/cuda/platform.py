"""CUDA as a platform: NCCL ranks, Triton operators, CUDA graphs. Knows nothing of models or requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future

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
from npu_runner.platforms.ops import Ops
from npu_runner.platforms.side_stream import SideStream

_VISIBLE = "CUDA_VISIBLE_DEVICES"

# torch has a class for its own allocator's error only; these come as RuntimeError from the driver and the libraries.
_OUT_OF_MEMORY = ("CUDA error: out of memory", "CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
                  "CUDNN_STATUS_ALLOC_FAILED")


Capability = tuple[int, int]
"""A GPU's compute capability: (8, 0) is Ampere, (7, 5) Turing."""
_BFLOAT16_SINCE: Capability = (8, 0)
_FLASHINFER_SINCE: Capability = (7, 5)
# Before, it had no tensor descriptors and no dependent launch.
_LEAST_TRITON = (3, 4)


def why_no_dtype(capability: Capability, dtype: torch.dtype) -> str | None:
    """None where a GPU of this compute capability computes in `dtype`, else the reason."""
    if dtype == torch.bfloat16 and capability < _BFLOAT16_SINCE:
        return _too_old("bfloat16", _BFLOAT16_SINCE, capability)
    return None


def why_no_flashinfer(capability: Capability) -> str | None:
    """None where FlashInfer's kernels run on a GPU of this compute capability, else the reason."""
    return _too_old("flashinfer", _FLASHINFER_SINCE, capability) if capability < _FLASHINFER_SINCE else None


def _too_old(what: str, since: Capability, capability: Capability) -> str:
    wanted, found = (".".join(map(str, numbers)) for numbers in (since, capability))
    return f"{what} needs a GPU of compute capability {wanted}, this one has {found}"


class CudaPlatform(Platform):
    name = "cuda"
    attention_backends = ("triton", "flashinfer")
    distributed_backend = "nccl"
    defaults = PlatformDefaults(block_size=64, max_num_seqs=256, max_num_batched_tokens=8192,
                                graph_mode="reduce-overhead", async_scheduling=True)

    _prepared: Future[None] | None = None
    lost_error_remedy = "run again with CUDA_LAUNCH_BLOCKING=1 in the environment, and the operation itself will fail"

    @classmethod
    def why_unavailable(cls) -> str | None:
        if torch.version.cuda is None:
            return "this torch is built without CUDA"
        if not torch.cuda.is_available():
            return "no CUDA device is visible"
        try:
            import triton
        except ImportError:
            return "triton is not installed"
        if tuple(int(number) for number in triton.__version__.split(".")[:2]) < _LEAST_TRITON:
            return f"triton {triton.__version__} is too old; {'.'.join(map(str, _LEAST_TRITON))} comes with torch 2.8"
        return None

    def prepare_process(self, rank: int, num_ranks: int) -> None:
        self.set_device(rank)

    def set_device(self, local_rank: int) -> torch.device:
        if local_rank >= self.device_count():
            raise ConfigError(f"rank {local_rank} needs a GPU of its own, {self.device_count()} are visible; lower "
                              f"tensor_parallel_size or check CUDA_VISIBLE_DEVICES")
        torch.cuda.set_device(local_rank)
        from npu_runner.platforms.cuda.compile_ahead import prepare

        self._prepared = prepare(lambda: torch.cuda.set_device(local_rank))
        return torch.device("cuda", local_rank)

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def device_environment(self, devices: Sequence[int], num_devices: int) -> dict[str, str]:
        # Each process would start a thread for every core of the host.
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_devices))}
        threads = {} if "OMP_NUM_THREADS" in os.environ else threads
        return threads | {_VISIBLE: chosen_devices(os.environ.get(_VISIBLE), devices)}

    def make_ops(self) -> Ops:
        from npu_runner.platforms.cuda.ops import TritonOps

        return TritonOps()

    def make_attention(self, name: str, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
                       dtype: torch.dtype) -> AttentionBackend:
        from npu_runner.platforms.cuda import flashinfer_attention as flashinfer
        from npu_runner.platforms.cuda.attention import TritonAttention

        capability = torch.cuda.get_device_capability()
        too_old = why_no_dtype(capability, dtype)
        if too_old:
            raise ConfigError(f"dtype: {too_old}; take float16 or float32")
        if name != "flashinfer":
            return TritonAttention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                                   block_size=block_size, dtype=dtype)
        reason = why_no_flashinfer(capability) or flashinfer.why_not(head_dim, dtype)
        if reason:
            raise ConfigError(f"attention_backend flashinfer: {reason}; take triton or auto")
        return flashinfer.FlashInferAttention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                                              block_size=block_size, dtype=dtype)

    def make_gated_delta(self, shape: GatedDeltaShape, dtype: torch.dtype) -> GatedDeltaBackend:
        from npu_runner.platforms.cuda.gated_delta import TritonGatedDelta

        return TritonGatedDelta(shape, dtype)

    def make_graph_compiler(self, settings: GraphSettings) -> GraphCompiler:
        from npu_runner.platforms.cuda.graphs import CudaGraphCompiler

        return CudaGraphCompiler(with_inductor=settings.mode == "max-autotune")

    def compile_ahead(self, run: Callable[[], object]) -> Callable[[], list[str]]:
        from npu_runner.platforms.cuda.compile_ahead import compile_ahead

        device = torch.cuda.current_device()
        return compile_ahead(run, lambda: torch.cuda.set_device(device), self._prepared)

    def memory_info(self) -> MemoryInfo | None:
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return MemoryInfo(free_bytes, total_bytes, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(),
                          torch.cuda.memory_reserved())

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in _OUT_OF_MEMORY)

    def is_device_failure(self, error: BaseException) -> bool:
        # Errors of kernels stay with the context for good; the allocator's and the libraries' refusals do not.
        is_device = isinstance(error, (torch.AcceleratorError, torch.distributed.DistError))
        return is_device and not self.is_out_of_memory(error)

    def host_buffer(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=torch.int32, pin_memory=True)

    def download(self, tensor: Tensor) -> Download:
        return Download.start(tensor, torch.cuda.Event())

    def side_stream(self) -> SideStream:
        return SideStream(torch.cuda)

    def describe(self) -> dict[str, str]:
        import triton

        return {**super().describe(), "cuda": str(torch.version.cuda), "triton": triton.__version__,
                "device": torch.cuda.get_device_name()}
