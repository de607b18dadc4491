"""Torch's meta device as a platform that stands in for a vendor's: nothing is computed, and a meter counts the bytes
that a device would give.

Operators are shaped as fused ones: what is allocated are results, and what devices sort and copy on the way. Knows no
vendor and no model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_runner.platforms import reference_platform
from npu_runner.platforms.attention import AttentionBackend
from npu_runner.platforms.devices import Memory, MemoryInfo, Roles
from npu_runner.platforms.facts import AttentionFacts
from npu_runner.platforms.gated_delta import GatedDeltaBackend, GatedDeltaShape, Ring, RingedGatedDelta
from npu_runner.platforms.graphs import GraphCompiler, GraphSettings
from npu_runner.platforms.grouped import GroupedWeight
from npu_runner.platforms.ops import HeldExperts, Ops, TorchOps
from npu_runner.platforms.platform import Platform
from npu_runner.platforms.quantised import Int8Weight, QuantisedExperts, QuantisedOps, QuantisedWeight, RoundedRows
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs
from npu_runner.platforms.torch_gated_delta import TorchGatedDelta
from npu_runner.platforms.transfers import Download, SideResult, SideStream

META = torch.device("meta")
_DRAFTS = object()
"""The plan of a decode step with drafts: nothing is read of it."""
SORT_WORKSPACE_BYTES = 32
"""For each value that is sorted, beside values and indices: keys, places and rows, twice over, as torch does on a GPU.
"""
T = TypeVar("T")


class LiveBytes(TorchDispatchMode):
    """While entered: `now`, the bytes of all tensors made on a kind of device inside that still live, and `peak`, the
    most at once since the last `reset_peak`."""

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()
        self._device_type = device_type
        self.now = self.peak = 0
        self._held: dict[int, weakref.finalize[..., Any]] = {}

    def reset_peak(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device_type:
                self._count(tensor.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        # Views share a storage, and its Python object lives as long as the memory would.
        key = storage._cdata
        if key in self._held:
            return
        num_bytes = storage.nbytes()
        self._held[key] = weakref.finalize(storage, self._drop, key, num_bytes)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def _drop(self, key: int, num_bytes: int) -> None:
        del self._held[key]
        self.now -= num_bytes


class MetaPlatform(Platform):
    """Stands in for `platform`, with its facts, to put a model together without a device or memory for it."""

    name = "meta"

    def __init__(self, platform: Platform):
        self.defaults, self.attention_backends = platform.defaults, platform.attention_backends
        self.copies_rows_to_experts = platform.copies_rows_to_experts

    def why_unavailable(self) -> str | None:
        return None

    def make_roles(self) -> Roles:
        host = reference_platform()
        return Roles(devices=host.devices, communicators=host.communicators, memory=MetaMemory())

    def make_ops(self) -> Ops:
        return MetaOps(copies_rows_to_experts=self.copies_rows_to_experts)

    def make_quantised_ops(self, ops: Ops) -> QuantisedOps:
        return MetaQuantisedOps(ops)

    def make_attention(self, name: str, **_: Any) -> AttentionBackend:
        return MetaAttention(self.attention_backends[next(iter(self.attention_backends)) if name == "auto" else name])

    def make_gated_delta(self, shape: GatedDeltaShape, dtype: torch.dtype) -> GatedDeltaBackend:
        return MetaGatedDelta(shape)

    def make_graph_compiler(self, settings: GraphSettings) -> GraphCompiler:
        raise AssertionError("nothing is computed, so nothing is compiled")


class MetaMemory(Memory):
    """Memory that counts as a device's own and holds nothing. LiveBytes measures it."""

    def info(self) -> MemoryInfo:
        return MemoryInfo(0, 0, 0, 0, 0)

    def download(self, tensor: Tensor) -> Download:
        return _MetaDownload(tensor)

    def side_stream(self) -> SideStream:
        return MetaSideStream()


class _MetaDownload(Download):
    """Zeros, as no value is computed. As on a device, the copy does not hold the tensor."""

    def __init__(self, tensor: Tensor):
        super().__init__(torch.zeros(tensor.shape, dtype=tensor.dtype))


class MetaSideStream(SideStream):
    def __init__(self) -> None:
        """There is no stream."""

    def run(self, work: Callable[[], T]) -> SideResult[T]:
        return _MetaSideResult(work(), None, None)

    def mark_read(self) -> None:
        """Nothing is waited for."""


class _MetaSideResult(SideResult[T]):
    def join(self, tensors: Iterable[Tensor]) -> T:
        return self.result


class MetaOps(TorchOps):
    """copies_rows_to_experts: what experts take is first copied into their order (`Platform.copies_rows_to_experts`).
    """

    def __init__(self, *, copies_rows_to_experts: bool):
        self.copies_rows = copies_rows_to_experts

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.new_empty(x.shape)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x_TD), torch.empty_like(x_TD)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.new_empty(x.shape)

    def rotary(self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
        return q_TNH.new_empty(q_TNH.shape), k_TKH.new_empty(k_TKH.shape)

    def rotary_in_float32(self, qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        in_float32 = qk_T2NH.float()
        turned = torch.empty_like(in_float32)
        del in_float32
        return torch.empty_like(turned[:, 0], dtype=qk_T2NH.dtype), torch.empty_like(turned[:, 1], dtype=qk_T2NH.dtype)

    def sort_ascending(self, x: Tensor) -> Tensor:
        values, _indices = x.sort(dim=-1)
        x.new_empty(SORT_WORKSPACE_BYTES * x.numel(), dtype=torch.uint8)
        return values

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        return gate_up_T2I.new_empty(len(gate_up_T2I), gate_up_T2I.shape[1] // 2)

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor,
                held: HeldExperts | None = None) -> Tensor:
        """A row for each token and expert, here or not. Kernels that gather rows themselves have no outputs of gate and
        up."""
        num_pairs, hidden_size = experts_TK.numel(), x_TD.shape[1]
        width = down.numel() // (len(down) * hidden_size)
        rows_PD = x_TD.new_empty(num_pairs if self.copies_rows else 0, hidden_size)
        both_P2I = x_TD.new_empty(num_pairs if self.copies_rows else 0, 2 * width)
        hidden_PI = x_TD.new_empty(num_pairs, width)
        del both_P2I
        outputs_PD = x_TD.new_empty(num_pairs, hidden_size)
        out_TD = torch.empty_like(x_TD)
        del rows_PD, hidden_PI, outputs_PD
        return out_TD

class MetaQuantisedOps(QuantisedOps):
    ops: MetaOps

    def linear(self, x_TI: Tensor | RoundedRows, weight: QuantisedWeight, bias_O: Tensor | None) -> Tensor:
        if isinstance(weight, GroupedWeight):
            assert isinstance(x_TI, Tensor), "inputs of grouped weights are not rounded"
            dequantised_OI = x_TI.new_empty(len(weight.scales), x_TI.shape[1])  # many rows may need it
            return x_TI.new_empty(len(x_TI), len(dequantised_OI))
        values_TI = torch.empty_like(x_TI, dtype=torch.int8) if isinstance(x_TI, Tensor) else x_TI.values_TI
        scales_T = x_TI.new_empty(len(x_TI), dtype=torch.float32) if (
            isinstance(x_TI, Tensor) and isinstance(weight, Int8Weight)) else None
        out_TO = values_TI.new_empty(len(values_TI), len(weight.values_OI), dtype=x_TI.dtype)
        del scales_T
        return out_TO

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: QuantisedExperts,
                down: QuantisedExperts, held: HeldExperts | None = None) -> Tensor:
        """Like `experts`, with the inputs of both matmuls in 8 bits. Where rows are copied, the results of gate and up
        are int32. Else they are of x's dtype, and so is what is rounded for the second matmul."""
        num_pairs, hidden_size = experts_TK.numel(), x_TD.shape[1]
        width = down.values.numel() // (len(down.values) * hidden_size)
        rows_PD = x_TD.new_empty(num_pairs if self.ops.copies_rows else len(x_TD), hidden_size, dtype=torch.int8)
        both_P2I = x_TD.new_empty(num_pairs if self.ops.copies_rows else 0, 2 * width, dtype=torch.int32)
        hidden_PI = x_TD.new_empty(0 if self.ops.copies_rows else num_pairs, width)
        rounded_PI = x_TD.new_empty(num_pairs, width, dtype=torch.int8)
        del both_P2I
        outputs_PD = x_TD.new_empty(num_pairs, hidden_size)
        out_TD = torch.empty_like(x_TD)
        del rows_PD, hidden_PI, rounded_PI, outputs_PD
        return out_TD


class MetaAttention(AttentionBackend):
    def __init__(self, facts: AttentionFacts):
        self.facts = facts
        self._wide: Tensor | None = None

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                     device: torch.device) -> None:
        return None

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
        """The cache is there."""

    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
                window: int | None = None) -> Tensor:
        room = self.facts.fp8_prompt_room if k_cache.dtype == torch.float8_e4m3fn and window is None else None
        num_blocks = -(-(room or 0) * len(q_TNH) // k_cache.shape[1])
        if num_blocks > (0 if self._wide is None else self._wide.shape[1]):
            self._wide = q_TNH.new_empty((2, num_blocks, *k_cache.shape[1:]))  # it stays, for all layers
        return q_TNH.new_empty(q_TNH.shape)

    def decode(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
               window: int | None = None) -> Tensor:
        return q_BNH.new_empty(q_BNH.shape)

    def vision(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: Any, scale: float) -> Tensor:
        return q_TNH.new_empty(q_TNH.shape)


class MetaGatedDelta(RingedGatedDelta, TorchGatedDelta):
    """The plain operators. Steps with drafts hold their rows and outputs, and no state beside those of the pool."""

    def plan_drafts(self, runs_T: Tensor, query_lens_B: Sequence[int] | None) -> Any:
        return _DRAFTS

    def plan_drafts_in_ring(self, inputs: StepInputs, ring: Ring) -> Any:
        return _DRAFTS

    def convolve(self, x_TC: Tensor, weight_CW: Tensor, conv_state: Tensor, metadata: AttentionMetadata) -> Tensor:
        if metadata.state_plan is _DRAFTS:
            metadata = replace(metadata, state_plan=None)
        # With drafts in rings there are more columns.
        return super().convolve(x_TC, weight_CW, conv_state[:, : weight_CW.shape[1] - 1], metadata)

    def step_in_ring(self, qkv_TC: Tensor, a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor,
                     state: Tensor, ring: Ring, metadata: AttentionMetadata) -> Tensor:
        return self.delta_rule(qkv_TC, a_TV, b_TV, neg_exp_A_V, dt_bias_V, state, metadata)

    def _decode_drafts(self, qkv_TC: Tensor, beta_TV: Tensor, g_TV: Tensor, state: Tensor, slots_T: Tensor,
                       plan: Any) -> Tensor:
        heads = self._heads(qkv_TC)
        return torch.empty_like(heads[2], dtype=qkv_TC.dtype)
