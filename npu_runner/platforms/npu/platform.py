"""Ascend NPUs as a platform: its facts, and what it makes for a model. Knows nothing of models. Imports no torch."""

from __future__ import annotations

import importlib.util
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from npu_runner.errors import ConfigError
from npu_runner.platforms.npu import cann85
from npu_runner.platforms.npu.host_settings import allocator_defaults, check_graph_mode, most_graphs, process_defaults
from npu_runner.platforms.npu.settings import ATTENTION_FACTS, STATE_FACTS, npu_settings
from npu_runner.platforms.npu.versions import cann_version, is_85, soc_name
from npu_runner.platforms.platform import ModelNeeds, Platform, PlatformDefaults

if TYPE_CHECKING:
    import torch

    from npu_runner.platforms.attention import AttentionBackend
    from npu_runner.platforms.devices import Roles
    from npu_runner.platforms.gated_delta import GatedDeltaBackend, GatedDeltaShape
    from npu_runner.platforms.graphs import GraphCompiler, GraphSettings
    from npu_runner.platforms.npu.attention import NpuAttention
    from npu_runner.platforms.ops import Ops
    from npu_runner.platforms.quantised import QuantisedOps

logger = logging.getLogger(__name__)

class NpuPlatform(Platform):
    name = "npu"
    priority = 30
    attention_backends = MappingProxyType({"fused": ATTENTION_FACTS})
    state_facts = STATE_FACTS
    defaults = PlatformDefaults(block_size=128, max_num_seqs=128, max_num_batched_tokens=8192,
                                graph_mode="reduce-overhead", async_scheduling=True)
    weight_forms = ("int8", "int8_static", "int8_experts", "grouped")
    lost_error_remedy = "run again with ASCEND_LAUNCH_BLOCKING=1 in the environment, and the operation itself will fail"
    keeps_graphs = ("max-autotune",)
    ray_resource = "NPU"
    visible_devices = "ASCEND_RT_VISIBLE_DEVICES"
    device_files = "/dev/davinci[0-9]*"
    examination = "npu_runner.platforms.npu.preflight.checks:NpuExamination"
    _attention: weakref.ref[NpuAttention] | None = None

    def why_unavailable(self) -> str | None:
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed; npu-runner doctor says what to do"
        os.environ.update(allocator_defaults(os.environ))
        try:
            import torch
            import torch_npu  # noqa: F401
        except Exception as error:  # noqa: BLE001 - the border to the vendor: it raises whatever its set-up lacks
            reason = str(error).strip().partition("\n")[0]
            return f"torch_npu does not load ({reason}); npu-runner doctor says what to do"
        # torch says that it is available with no device at all, too.
        is_usable = torch.npu.is_available() and torch.npu.device_count() > 0
        return None if is_usable else "no NPU is visible; npu-runner doctor says what to do"

    def share(self, devices: Sequence[int], num_devices: int) -> dict[str, str]:
        # A process that sees one device counts all cores as that device's; so who sees all of them decides.
        num_cores = len(os.sched_getaffinity(0))
        unbound = {} if "CPU_AFFINITY_CONF" in os.environ else {"CPU_AFFINITY_CONF": "0"}
        bound = process_defaults(os.environ, num_cores=num_cores, num_devices=num_devices)
        return unbound | bound | super().share(devices, num_devices)

    def check_graph_mode(self, graph_mode: str) -> None:
        check_graph_mode(graph_mode, os.environ)
        if is_85(cann := cann_version() or ""):
            cann85.check_graph_mode(graph_mode, cann)

    def find_fallbacks(self, needs: ModelNeeds) -> Mapping[str, str]:
        if importlib.util.find_spec("torch_npu") is None:
            return {}  # `why_unavailable` says so
        if is_85(cann := cann_version() or ""):
            cann85.check_scope(needs, cann)
            logger.warning("CANN %s: %s. %s", cann, cann85.UNVERIFIED, cann85.SCOPE)
        from npu_runner.platforms.npu.verdicts import check_host, fallbacks_for

        check_host()
        return {} if npu_settings().cases == "off" else fallbacks_for(needs)

    def describe(self) -> dict[str, str]:
        import torch_npu

        return {**super().describe(), "torch_npu": torch_npu.__version__, "cann": cann_version() or "unknown",
                "device": soc_name()}

    def make_roles(self) -> Roles:
        from npu_runner.platforms.npu.devices import roles

        return roles()

    def make_ops(self) -> Ops:
        from npu_runner.platforms.npu.ops import NpuOps

        return NpuOps()

    def make_quantised_ops(self, ops: Ops) -> QuantisedOps:
        from npu_runner.platforms.npu.kernels import kernels_for
        from npu_runner.platforms.npu.quantised_ops import NpuQuantisedOps

        return NpuQuantisedOps(ops, kernels_for(self.fallbacks))

    def make_attention(self, name: str, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
                       dtype: torch.dtype) -> AttentionBackend:
        import torch

        from npu_runner.platforms.npu.attention import NpuAttention
        from npu_runner.platforms.npu.kernels import kernels_for

        # Asked for by name, the kernel has the word: the emulation's, which the tests compare with, can do it.
        if dtype == torch.float32 and name == "auto":
            raise ConfigError("dtype float32: the fused attention of Ascend devices takes float16 and bfloat16; set "
                              "dtype to one of them")
        attention = NpuAttention(num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size,
                                 device=torch.device("npu", torch.npu.current_device()),
                                 masks_decode=npu_settings().decode_attention == "masked",
                                 kernels=kernels_for(self.fallbacks))
        self._attention = weakref.ref(attention)
        return attention

    def make_gated_delta(self, shape: GatedDeltaShape, dtype: torch.dtype) -> GatedDeltaBackend:
        import torch

        from npu_runner.platforms.npu.gated_delta import NpuGatedDelta

        return NpuGatedDelta(shape, dtype, torch.device("npu", torch.npu.current_device()))

    def make_graph_compiler(self, settings: GraphSettings) -> GraphCompiler:
        import torch

        from npu_runner.platforms.npu.graph_cache import limited_compiler

        num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return limited_compiler(settings, self._latest_attention(), most_graphs(soc_name(), os.environ, num_ranks))

    def _latest_attention(self) -> NpuAttention:
        attention = self._attention() if self._attention is not None else None
        assert attention is not None, "the attention of a model is made before its graphs"
        return attention
