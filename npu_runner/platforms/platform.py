"""One vendor, as rooms above see it: its facts, its roles, and what it makes for a model.

Three roles are objects of their own, made on first use: `devices`, `communicators` and `memory`. The fourth, to make
operators, attention and graphs, is the platform itself. This file imports no torch, and a platform's file imports it
only when a role is used. The doctor and the process that assigns devices run without torch.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from npu_runner.errors import ConfigError, Contract
from npu_runner.platforms.facts import AttentionFacts, StateFacts

if TYPE_CHECKING:
    import torch

    from npu_runner.platforms.attention import AttentionBackend
    from npu_runner.platforms.devices import Communicators, Devices, Memory, MemoryInfo, Roles
    from npu_runner.platforms.gated_delta import GatedDeltaBackend, GatedDeltaShape
    from npu_runner.platforms.graphs import GraphCompiler, GraphSettings
    from npu_runner.platforms.ops import Ops
    from npu_runner.platforms.quantised import QuantisedOps


@dataclass(frozen=True)
class PlatformDefaults:
    """Settings a platform chooses when the user does not."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    graph_mode: str
    async_scheduling: bool
    dtype: str | None = None
    """None means the checkpoint's dtype."""
    narrow_batched_tokens: int | None = None
    """max_num_batched_tokens of narrow models (runner/settings.py) whose prefills are not recorded in graphs: the host
    launches a smaller step for longer than the device computes it. None: that of others."""


@dataclass(frozen=True, kw_only=True)
class ModelNeeds:
    """A model's requirements on a platform, known before its weights are read. Heads and widths are a rank's."""

    dtype: str
    graph_mode: str
    hidden_size: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    num_drafts: int = 0
    """The most drafts of a row."""
    windows: tuple[int, ...] = ()
    """Sliding windows that a context of max_model_len outgrows."""
    tower: tuple[int, int] | None = None
    """Heads of the vision tower and their dim."""
    mlp_width: int | None = None
    experts: tuple[int, int, int] | None = None
    """The number of experts, of those that a token takes, and the width of each."""
    states: GatedDeltaShape | None = None
    """The layers of Gated DeltaNet."""
    forms: tuple[str, ...] = ()
    """The `Platform.weight_forms` that its quantised weights may be multiplied in."""


class Platform(Contract, ABC):
    """One vendor. Its constructor takes nothing and touches no device."""

    _REPLACED: ClassVar = {
        **dict.fromkeys(("fp8_cache_backends", "prefill_graph_backends", "fp8_prompt_room", "vision_head_dims",
                         "supported_block_sizes"), "a field of AttentionFacts, see attention_backends"),
        **dict.fromkeys(("most_state_drafts", "graphs_take_state_drafts", "state_ring_length"),
                        "a field of StateFacts, see state_facts"),
        "modes_without_forms": "forms_with", "check_model": "find_fallbacks",
        **dict.fromkeys(("proves_forms", "proven_forms", "probe_of_forms"), "find_fallbacks"),
        "remedy": "Examination.remedy",
    }

    name: str
    priority: int = 10
    """`auto` takes the usable platform of the highest priority. Ours: 30 and 20 with devices, 0 without."""
    defaults: PlatformDefaults
    attention_backends: Mapping[str, AttentionFacts]
    """The names that `attention_backend` accepts. auto means the first."""
    state_facts: StateFacts = StateFacts()
    graph_modes: tuple[str, ...] = ("eager", "reduce-overhead", "max-autotune")
    keeps_graphs: tuple[str, ...] = ()
    """The graph modes whose compiled graphs can be kept from one run to the next."""
    weight_forms: tuple[str, ...] = ()
    """Forms of quantised weights that it has matmuls for, with inputs of 16 bits: names of the setting
    `quantization`, fp8 and fp8_blocks, and of experts int8_experts and fp8_block_experts (platforms/quantised.py).
    Weights of another form are dequantised while loading."""
    rounds_weights: bool = False
    """`quantization` accepts int8 and fp8 without such matmuls: rounded weights are dequantised."""
    copies_rows_to_experts: bool = True
    """A token's row is copied for each of its experts, and not read where it lies."""
    lost_error_remedy = "run again with each operation waited for"
    """The remedy that shows the error of an operation that runs asynchronously."""
    ray_resource: str
    """Ray's name for the devices of this platform."""
    visible_devices: str | None = None
    """The variable that lists the devices that a process sees. None: there are none to share out, but cores."""
    device_files: str | None = None
    """Pattern of the files that a driver makes, one for each device. None: no file shows that devices are there."""
    fallbacks: Mapping[str, str] = MappingProxyType({})
    """Jobs whose first kernel computes otherwise on this host, and what does each instead. Set before parts of a model
    are made."""
    examination: str = "npu_runner.platforms.examination:Examination"
    """The module and name of the `Examination` that `npu-runner doctor` runs."""

    @abstractmethod
    def why_unavailable(self) -> str | None:
        """None when this host can run it, else the reason in a few words. May import torch."""

    def share(self, devices: Sequence[int], num_devices: int) -> dict[str, str]:
        """Variables for processes that are to see only these of the `num_devices` that this process sees."""
        if self.visible_devices is None:
            return {}
        return {self.visible_devices: chosen_devices(os.environ.get(self.visible_devices), devices)}

    def forms_with(self, dtype: str, graph_mode: str) -> tuple[str, ...]:
        """The `weight_forms` of this host in this graph mode, where the rest is of `dtype`."""
        return () if dtype == "float32" else tuple(form for form in self.weight_forms if form not in self.fallbacks)

    def check_graph_mode(self, graph_mode: str) -> None:
        """Raises ConfigError where this process cannot make graphs of that mode, which is one of `graph_modes`."""
        return None

    def find_fallbacks(self, needs: ModelNeeds) -> Mapping[str, str]:
        """The `fallbacks` of this host for a model: graphs too, where they are to be left out. Touches no device in
        this process. Raises ConfigError for a model that this host cannot serve."""
        return {}

    def why_no_fp8_cache(self) -> str | None:
        """Why this host's devices cannot keep keys and values in e4m3, whatever the backend; None: they can."""
        return None

    def describe(self) -> dict[str, str]:
        """Names and versions that shape numbers, for manifests and reports."""
        import torch

        others = {"fallbacks": ", ".join(f"{job} {kernel}" for job, kernel in sorted(self.fallbacks.items()))}
        return {"platform": self.name, "torch": torch.__version__, **(others if self.fallbacks else {})}

    # -- roles -----------------------------------------------------------------------------------------------------

    @cached_property
    def _roles(self) -> Roles:
        return self.make_roles()

    @property
    def devices(self) -> Devices:
        return self._roles.devices

    @property
    def communicators(self) -> Communicators:
        return self._roles.communicators

    @property
    def memory(self) -> Memory:
        return self._roles.memory

    def memory_info(self) -> MemoryInfo | None:
        """Bytes of the current device of this process: free, used and in all, and what torch's allocator has of them.
        None where memory is not a device's own (cpu)."""
        return self.memory.info()

    @abstractmethod
    def make_roles(self) -> Roles:
        """Imports torch. Raises ConfigError where what is installed is too old."""

    # -- parts of a model, on the current device -------------------------------------------------------------------

    @abstractmethod
    def make_ops(self) -> Ops: ...

    def make_quantised_ops(self, ops: Ops) -> QuantisedOps:
        """Operators for weights of `weight_forms`, on top of `ops`."""
        from npu_runner.platforms.quantised import QuantisedOps

        return QuantisedOps(ops)

    @abstractmethod
    def make_attention(self, name: str, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
                       dtype: torch.dtype) -> AttentionBackend:
        """The backend called `name` ("auto": the best here), for this rank's head counts."""

    def make_gated_delta(self, shape: GatedDeltaShape, dtype: torch.dtype) -> GatedDeltaBackend:
        """The backend for Gated DeltaNet layers of this rank's shape. Raises ConfigError for a shape it does not
        support."""
        raise ConfigError(f"platform {self.name} has no Gated DeltaNet; run this model on another one")

    @abstractmethod
    def make_graph_compiler(self, settings: GraphSettings) -> GraphCompiler:
        """A compiler for `settings.mode`, one of `graph_modes` other than eager, and the attention made last."""


def chosen_devices(visible: str | None, devices: Sequence[int]) -> str:
    """The value of a variable that shows a process these devices. `visible`: the value here; None: all are visible."""
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    return ",".join(str(device) if names is None else names[device] for device in devices)
