"""The CPU as a platform: gloo ranks, torch operators, inductor graphs. Knows nothing of models. Imports no torch."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from npu_runner.platforms.facts import AttentionFacts, StateFacts
from npu_runner.platforms.platform import Platform, PlatformDefaults

if TYPE_CHECKING:
    import torch

    from npu_runner.platforms.attention import AttentionBackend
    from npu_runner.platforms.devices import Roles
    from npu_runner.platforms.gated_delta import GatedDeltaBackend, GatedDeltaShape
    from npu_runner.platforms.graphs import GraphCompiler, GraphSettings
    from npu_runner.platforms.ops import Ops


class CpuPlatform(Platform):
    name = "cpu"
    priority = 0
    attention_backends = MappingProxyType({"torch": AttentionFacts()})
    state_facts = StateFacts(most_drafts=None)
    # Eager starts at once; inductor needs tens of seconds a bucket (docs/benchmarks.md has the figures). float32
    # because few CPUs multiply faster in 16 bits, and because answers then equal the reference token for token.
    defaults = PlatformDefaults(
        block_size=16, max_num_seqs=256, max_num_batched_tokens=4096, graph_mode="eager", dtype="float32",
        async_scheduling=False,  # there is no other device: a step launched early only ends later
    )
    rounds_weights = True  # float32 matmuls are the reference for other platforms
    ray_resource = "CPU"

    def why_unavailable(self) -> str | None:
        return None

    def make_roles(self) -> Roles:
        from npu_runner.platforms.cpu.devices import roles

        return roles()

    def make_ops(self) -> Ops:
        from npu_runner.platforms.cpu.ops import CpuOps

        return CpuOps()

    def make_attention(self, name: str, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
                       dtype: torch.dtype) -> AttentionBackend:
        from npu_runner.platforms.cpu.attention import CpuAttention

        return CpuAttention(block_size=block_size, bytes_per_token=2 * num_kv_heads * head_dim * dtype.itemsize)

    def make_gated_delta(self, shape: GatedDeltaShape, dtype: torch.dtype) -> GatedDeltaBackend:
        from npu_runner.platforms.cpu.ops import CpuGatedDelta

        return CpuGatedDelta(shape)

    def make_graph_compiler(self, settings: GraphSettings) -> GraphCompiler:
        from npu_runner.platforms.graphs import InductorCompiler

        return InductorCompiler(settings.mode)
