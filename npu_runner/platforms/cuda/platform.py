"""CUDA as a platform: its facts, and what it makes for a model. Knows nothing of models. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from npu_runner.errors import ConfigError
from npu_runner.platforms.cuda import FP8_PROMPT_ROOM, Capability, too_old
from npu_runner.platforms.examination import Examination
from npu_runner.platforms.facts import AttentionFacts, StateFacts
from npu_runner.platforms.platform import Platform, PlatformDefaults

if TYPE_CHECKING:
    import torch

    from npu_runner.platforms.attention import AttentionBackend
    from npu_runner.platforms.devices import Roles
    from npu_runner.platforms.gated_delta import GatedDeltaBackend, GatedDeltaShape
    from npu_runner.platforms.graphs import GraphCompiler, GraphSettings
    from npu_runner.platforms.ops import Ops
    from npu_runner.platforms.quantised import QuantisedOps

_BFLOAT16_SINCE: Capability = (8, 0)
# Hopper: matmuls of quantised weights were written for it and tested on it.
_QUANTISED_ON = 9
_FP8_FROM = (8, 9)
# Before, it had no tensor descriptors and no dependent launch.
_LEAST_TRITON = (3, 4)


def why_no_dtype(capability: Capability, dtype: torch.dtype) -> str | None:
    """None where a GPU of this compute capability computes in `dtype`, else the reason."""
    return too_old("bfloat16", _BFLOAT16_SINCE, capability) if str(dtype) == "torch.bfloat16" else None


class CudaExamination(Examination):
    remedy = ("take a torch that is built for CUDA, with triton; nvidia-smi says which GPUs the driver sees, "
              "CUDA_VISIBLE_DEVICES which of them a process may use")


class CudaPlatform(Platform):
    name = "cuda"
    priority = 20
    attention_backends = MappingProxyType({
        "triton": AttentionFacts(fp8_prompt_room=FP8_PROMPT_ROOM, records_prefills=True),
        "flashinfer": AttentionFacts()})
    # Rings of 16 tokens were no faster (steps of 1 to 256 sequences), for twice the memory.
    state_facts = StateFacts(most_drafts=None, drafts_in_graphs=True, ring_length=8)
    defaults = PlatformDefaults(block_size=64, max_num_seqs=256, max_num_batched_tokens=8192,
                                graph_mode="reduce-overhead", async_scheduling=True, narrow_batched_tokens=16384)
    weight_forms = ("int8", "int8_experts", "fp8", "fp8_blocks", "fp8_block_experts", "grouped")
    copies_rows_to_experts = False
    lost_error_remedy = "run again with CUDA_LAUNCH_BLOCKING=1 in the environment, and the operation itself will fail"
    ray_resource = "GPU"
    visible_devices = "CUDA_VISIBLE_DEVICES"
    examination = "npu_runner.platforms.cuda.platform:CudaExamination"

    def why_unavailable(self) -> str | None:
        import torch

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

    def forms_with(self, dtype: str, graph_mode: str) -> tuple[str, ...]:
        """On Hopper, and not in max-autotune. The library's matmuls with FP8 are bfloat16."""
        import torch

        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != _QUANTISED_ON:
            return ()
        forms = () if graph_mode == "max-autotune" else super().forms_with(dtype, graph_mode)
        return tuple(form for form in forms if not form.startswith("fp8") or dtype == "bfloat16")

    def why_no_fp8_cache(self) -> str | None:
        import torch

        if torch.cuda.is_available() and torch.cuda.get_device_capability() < _FP8_FROM:
            return f"this GPU converts no e4m3; compute capability {'.'.join(map(str, _FP8_FROM))} does"
        return super().why_no_fp8_cache()

    def share(self, devices: Sequence[int], num_devices: int) -> dict[str, str]:
        # Each process would start a thread for every core of the host.
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_devices))}
        threads = {} if "OMP_NUM_THREADS" in os.environ else threads
        return threads | super().share(devices, num_devices)

    def describe(self) -> dict[str, str]:
        import torch
        import triton

        return {**super().describe(), "cuda": str(torch.version.cuda), "triton": triton.__version__,
                "device": torch.cuda.get_device_name()}

    def make_roles(self) -> Roles:
        from npu_runner.platforms.cuda.devices import roles

        return roles()

    def make_ops(self) -> Ops:
        from npu_runner.platforms.cuda.ops import TritonOps

        return TritonOps()

    def make_quantised_ops(self, ops: Ops) -> QuantisedOps:
        from npu_runner.platforms.cuda.quantised_ops import TritonQuantisedOps

        return TritonQuantisedOps(ops)

    def make_attention(self, name: str, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
                       dtype: torch.dtype) -> AttentionBackend:
        import torch

        from npu_runner.platforms.cuda.attention.backend import TritonAttention
        from npu_runner.platforms.cuda.attention.flashinfer_attention import FlashInferAttention

        reason = why_no_dtype(torch.cuda.get_device_capability(), dtype)
        if reason:
            raise ConfigError(f"dtype: {reason}; take float16 or float32")
        make = FlashInferAttention if name == "flashinfer" else TritonAttention
        return make(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
                    dtype=dtype)

    def make_gated_delta(self, shape: GatedDeltaShape, dtype: torch.dtype) -> GatedDeltaBackend:
        from npu_runner.platforms.cuda.gated_delta.backend import TritonGatedDelta

        return TritonGatedDelta(shape, dtype)

    def make_graph_compiler(self, settings: GraphSettings) -> GraphCompiler:
        from npu_runner.platforms.cuda.graphs import CudaGraphCompiler

        return CudaGraphCompiler(with_inductor=settings.mode == "max-autotune")
