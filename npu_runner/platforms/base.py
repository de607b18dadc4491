"""What a vendor must provide: devices and memory, attention over the paged cache, graph compilation.

Operators are in ops.py, Gated DeltaNet in gated_delta.py, what a step gives to both in step_inputs.py. A platform knows
nothing of models, schedulers or requests.

Shapes: T tokens of a step, B sequences of a step, N query heads, K kv heads, H head dim, W blocks per sequence, S block
size, NB blocks of the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npu_runner.errors import ConfigError
from npu_runner.platforms.download import Download
from npu_runner.platforms.gated_delta import GatedDeltaBackend, GatedDeltaShape
from npu_runner.platforms.ops import HeadNorms, Ops
from npu_runner.platforms.side_stream import SideStream
from npu_runner.platforms.step_inputs import AttentionMetadata


@dataclass(frozen=True)
class PlatformDefaults:
    """Settings a platform chooses when the user does not."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    graph_mode: str
    async_scheduling: bool
    dtype: str | None = None
    """None: the checkpoint's."""


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of one device: what the driver says is free, in all, and the allocator's own figures."""

    free_bytes: int
    total_bytes: int
    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int


class AttentionBackend(ABC):
    """Attention over one layer's paged cache, k_cache and v_cache (NB, S, K, H)."""

    name: str
    """What `attention_backend` calls it."""
    pads_with_real_rows: bool = False
    """Padded rows of a decode graph are to read what a real row reads: short ones would slow down a kernel that looks
    at the shortest context. Each still writes to a slot of its own in the null block."""
    reuses_plan_memory: bool = False
    """A plan is written where that of the step before may still be read from: that step is waited for first."""
    plans_replay: bool = False
    """`plan_replay` is to be called."""
    windows: tuple[int | None, ...] = (None,)
    """The sliding windows of the model's layers, each once; None: some layer sees all. Steps are planned for these."""

    vision_patches: int | None = None
    """Patches that a vision tower should take at once, if it is not one picture that has more; None: all of a step."""

    @abstractmethod
    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                     device: torch.device) -> Any:
        """Host-side preparation of a prefill step, once for all layers."""

    def plan_decode(self, context_lens_B: Sequence[int], block_tables_BW: np.ndarray, device: torch.device) -> Any:
        """Host-side preparation of an eager decode step, once for all layers; most kernels need none."""
        return None

    def plan_replay(self, context_lens_B: np.ndarray, block_tables_BW: np.ndarray) -> None:
        """The same for a decode graph of this batch size, padding included, before it is captured and each replay."""
        return None

    @abstractmethod
    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
        """Store one step's keys and values."""

    def norm_rotary_store(self, ops: Ops, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, norms: HeadNorms | None,
                          cos_TR: Tensor, sin_TR: Tensor, *, k_cache: Tensor, v_cache: Tensor,
                          slot_mapping_T: Tensor) -> Tensor:
        """Norm of each head of q and k, if there is one, `Ops.rotary`, and `write_kv`; q as attention takes it.

        Here operator by operator; a backend may have one kernel for all. May work in place on q and k.
        """
        if norms is not None:
            q_TNH = ops.rms_norm(q_TNH, norms.q_weight_H, norms.eps)
            k_TKH = ops.rms_norm(k_TKH, norms.k_weight_H, norms.eps)
        q_TNH, k_TKH = ops.rotary(q_TNH, k_TKH, cos_TR, sin_TR)
        self.write_kv(k_TKH, v_TKH, k_cache, v_cache, slot_mapping_T)
        return q_TNH

    @abstractmethod
    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
                window: int | None = None) -> Tensor:
        """Causal attention of each sequence's new tokens over its whole context, (T, N, H).

        `window`, one of `windows`: a token sees the last `window` tokens, itself included. What lies before counts for
        nothing, whatever stands there: its blocks may be the null block in the table, or somebody else's in the cache.
        """

    @abstractmethod
    def decode(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
               window: int | None = None) -> Tensor:
        """Attention of one new token per sequence over its context, (B, N, H). Must be capturable in a graph.

        `window` as in `prefill`.
        """

    def plan_vision(self, lengths: Sequence[int], device: torch.device) -> Any:
        """Preparation of `vision` for consecutive pictures of these numbers of rows, once for all layers."""
        return list(lengths)

    def vision_head_dim(self, head_dim: int) -> int:
        """The even head dim, `head_dim` or more, that `vision` takes; towers fill their weights up to it with zeros."""
        return head_dim

    @abstractmethod
    def vision(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: Any, scale: float) -> Tensor:
        """Full attention within each picture, (T, N, H). `scale` is that of the model's own head dim."""


DecodeForward = Callable[..., Tensor]
"""(inputs: StepInputs, plan=None) -> logits (B, vocab).

What is compiled is the bound method of an nn.Module that holds the model; compiled callables take no plan.
"""


@dataclass(frozen=True, kw_only=True)
class GraphSettings:
    """What a graph compiler is made for.

    `identity` holds whatever of the runner's shapes a graph; `cache_dir` is where compiled graphs are kept from one
    run to the next, None where they are not.
    """

    mode: str
    identity: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: Path | None = None


class GraphCompiler(ABC):
    """Turns the decode forward into one callable per bucket."""

    waits_for_replay: bool = False
    """What `before_replay` gives to a graph may still be read by its last replay: that is waited for first."""
    records: bool = False
    """`record` may be asked for what follows a decode step."""
    context_lens_dtype: type[np.integer[Any]] = np.int32
    """Of StepInputs.context_lens, as graphs read them."""

    @abstractmethod
    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        """A callable for exactly this batch size and its static buffers, compiled or captured on its first call.

        That first call raises GraphResourceError when the device has no resources left for another graph; the caller
        treats a want of memory alike.
        """

    def was_loaded(self, batch_size: int) -> bool:
        """Whether the graph of this batch size came from an earlier run: its answers are then to be compared."""
        return False

    def discard(self, batch_size: int) -> None:
        """Forget the kept graph of this batch size, because it gives other answers."""
        return None

    def before_replay(self, batch_size: int, context_lens_B: Sequence[int]) -> None:
        """Give a captured graph what it takes from the host each step, padding included; most have nothing to do."""
        return None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What launches `run`, which works on the device and waits for nothing, over the same memory in one launch.

        `run` is run once or more. Asked for where `records` says so.
        """
        raise NotImplementedError(f"{type(self).__name__} records nothing but decode steps")

    def release(self) -> None:
        """Let go of every graph; none is called any more."""
        return None


def chosen_devices(visible: str | None, devices: Sequence[int]) -> str:
    """What a variable must list for a process to see these devices. `visible`: what it lists here; None: all."""
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    return ",".join(str(device) if names is None else names[device] for device in devices)


class GraphResourceError(Exception):
    """The device cannot hold one more graph; what was captured stays usable."""


class Platform(ABC):
    """One vendor's devices, as seen by one rank."""

    name: str
    distributed_backend: str
    defaults: PlatformDefaults
    attention_backends: tuple[str, ...]
    """What `attention_backend` may name beside auto."""
    supported_block_sizes: tuple[int, ...] | None = None
    """None: any."""
    graph_modes: tuple[str, ...] = ("eager", "reduce-overhead", "max-autotune")
    lost_error_remedy = "run again with each operation waited for"
    """What shows the error of an operation that runs behind the host's back."""
    keeps_graphs: tuple[str, ...] = ()
    """The graph modes whose compiled graphs can be kept from one run to the next."""

    @classmethod
    @abstractmethod
    def why_unavailable(cls) -> str | None:
        """None when this host can run it, else the reason in a few words."""

    modes_with_own_communicator: tuple[str, ...] = ()
    """Graph modes whose collectives must not share a communicator with eager ones."""

    def prepare_process(self, rank: int, num_ranks: int) -> None:
        """Called once in each rank's own process, before the process group exists."""
        return None

    def process_group_options(self, *, serves_graphs: bool, is_second: bool) -> Any:
        """What torch.distributed makes a process group with; None: its own defaults.

        serves_graphs: captured or compiled steps use it. is_second: another one of the same ranks exists beside it.
        """
        return None

    def make_communicator(self, group: Any, rank: int) -> None:
        """Make the communicator of a process group now, so that the memory it takes is measured with the rest."""
        return None

    def check_graph_mode(self, graph_mode: str) -> None:
        """Raises ConfigError where this process cannot make graphs of that mode, which is one of `graph_modes`."""
        return None

    @abstractmethod
    def set_device(self, local_rank: int) -> torch.device:
        """Make the device of this rank current and return it. Raises ConfigError when there is none."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices of this host; the CPU counts as many as anybody asks for."""

    def device_environment(self, devices: Sequence[int], num_devices: int) -> dict[str, str]:
        """Variables for processes that are to see only these of the `num_devices` that this one sees."""
        return {}

    @abstractmethod
    def make_ops(self) -> Ops: ...

    @abstractmethod
    def make_attention(self, name: str, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int,
                       dtype: torch.dtype) -> AttentionBackend:
        """The backend called `name` ("auto": the best here), for this rank's head counts."""

    def make_gated_delta(self, shape: GatedDeltaShape, dtype: torch.dtype) -> GatedDeltaBackend:
        """What computes Gated DeltaNet layers of this rank's shape. Raises ConfigError for one it cannot do."""
        raise ConfigError(f"platform {self.name} has no Gated DeltaNet; run this model on another one")

    @abstractmethod
    def make_graph_compiler(self, settings: GraphSettings) -> GraphCompiler:
        """A compiler for `settings.mode`, one of `graph_modes` other than eager."""

    def compile_ahead(self, run: Callable[[], object]) -> Callable[[], list[str]]:
        """Have whatever `run` would launch compiled side by side, where kernels are compiled when they are first met.

        `run` may be called, on memory that is not what it would be. Returns what names the kernels that had to be
        compiled since, which were not met.
        """
        return list

    @abstractmethod
    def memory_info(self) -> MemoryInfo | None:
        """None where memory is not a device's own (the CPU): the KV cache is then a setting."""

    @abstractmethod
    def reset_peak_memory(self) -> None: ...

    @abstractmethod
    def empty_cache(self) -> None:
        """Return memory that the allocator holds and nobody uses."""

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` says that device memory ran out."""

    def is_device_failure(self, error: BaseException) -> bool:
        """Whether `error` says that the device, or what joins devices, is out of order: no request is its cause."""
        return False

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

    def describe(self) -> dict[str, str]:
        """Names and versions that shape numbers, for manifests and reports."""
        return {"platform": self.name, "torch": torch.__version__}
