"""The context that every layer is built with: this rank's share of the work, and where its parameters live. Knows no
model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from npu_runner.errors import ConfigError
from npu_runner.platforms.attention import AttentionBackend
from npu_runner.platforms.devices import AllReduce
from npu_runner.platforms.gated_delta import GatedDeltaBackend
from npu_runner.platforms.ops import Ops
from npu_runner.platforms.quantised import QuantisedOps


@dataclass(frozen=True)
class TensorParallel:
    """One rank of a tensor-parallel group; the default is a group of one.

    `graph_group` holds the same ranks and serves compiled code, where a vendor wants a communicator of its own for it.
    `store` is the group's, from host to host: it answers while a device waits. `has_whole_experts`: experts are shared
    out whole, and not sliced. `custom_all_reduce` sums what it accepts, and the group the rest.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    graph_group: Any = None
    store: Any = None
    has_whole_experts: bool = False
    custom_all_reduce: AllReduce | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks; works in place."""
        custom = None if torch.compiler.is_compiling() else self.custom_all_reduce
        if self.size > 1 and not (custom is not None and custom(x)):
            dist.all_reduce(x, group=self._group())
        return x

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
                     ) -> tuple[Tensor, Tensor] | None:
        """`Ops.add_rms_norm` of the sum of `x_TD` over the ranks, where one kernel does both; else None."""
        if self.custom_all_reduce is None or torch.compiler.is_compiling():
            return None
        return self.custom_all_reduce.add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, in place."""
        if self.size > 1:
            dist.broadcast(x, src=0, group=self.group)
        return x

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        """Every rank's `x` side by side in the last dim, in rank order."""
        if self.size == 1:
            return x
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self.gather_into(gathered, x)
        return gathered.unflatten(0, (self.size, -1)).movedim(0, -2).flatten(-2)

    def gather_into(self, gathered: Tensor, x: Tensor) -> None:
        """Every rank's `x`, one behind the other."""
        # The newer name since torch 2.13, which warns of the older one. Compilers of vendors know the older one only.
        gather = getattr(dist, "all_gather_single", None)
        if gather is None or torch.compiler.is_compiling():
            gather = dist.all_gather_into_tensor
        gather(gathered, x.contiguous(), group=self._group())

    def _group(self) -> Any:
        is_compiled = self.graph_group is not None and torch.compiler.is_compiling()
        return self.graph_group if is_compiled else self.group

    def minimum(self, value: int, device: torch.device) -> int:
        """The smallest `value` of all ranks; it fits 31 bits."""
        if self.size == 1:
            return value
        assert 0 <= value < 2**31, f"{value} does not fit what the ranks compare"
        # Not int64: HCCL does not compare those where collectives are spread out on the device (AI_CPU, AIV).
        smallest = torch.tensor(value, dtype=torch.int32, device=device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self.group)
        return int(smallest.item())

    def share(self, total: int, what: str, remedy: str = "") -> tuple[int, int]:
        """(start, length) of this rank's equal part. Raises ConfigError, which names a `remedy`, when `total` does not
        divide."""
        if total % self.size:
            raise ConfigError(f"{what} {total} does not divide by tensor_parallel_size {self.size}{remedy}")
        length = total // self.size
        return self.rank * length, length

    def expert_share(self, num_experts: int) -> tuple[int, int]:
        """(first expert, experts) of this rank; the first ranks hold one more where they do not divide."""
        if not self.has_whole_experts:
            return 0, num_experts
        assert num_experts >= self.size, "refused by check_expert_parallel"
        count, more = divmod(num_experts, self.size)
        return self.rank * count + min(self.rank, more), count + (self.rank < more)

    def kv_head_share(self, num_kv_heads: int) -> tuple[int, int]:
        """(first head, heads) of this rank; with more ranks than heads, neighbours hold the same head."""
        if num_kv_heads >= self.size:
            return self.share(num_kv_heads, "num_key_value_heads")
        if self.size % num_kv_heads:
            raise ConfigError(f"tensor_parallel_size {self.size} is no multiple of num_key_value_heads {num_kv_heads}")
        return self.rank * num_kv_heads // self.size, 1


@dataclass(frozen=True)
class LayerContext:
    """Operators, attention, parallel group, dtype and device that a model is built for.

    `gated_delta` is there where the model has Gated DeltaNet layers. `weight_forms`: the forms of quantised weights
    (platforms/quantised.py) that linears and experts hold as they are, for `quantised` to multiply. With any, they have
    no weights before `hold`.
    """

    ops: Ops
    attention: AttentionBackend
    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device
    gated_delta: GatedDeltaBackend | None = None
    weight_forms: tuple[str, ...] = ()
    block_size: int | None = None
    """Tokens of a block of the KV cache; None where no cache is made."""
    quantised: QuantisedOps = None  # type: ignore[assignment]
    """None means those of plain torch."""

    def __post_init__(self) -> None:
        if self.quantised is None:
            object.__setattr__(self, "quantised", QuantisedOps(self.ops))

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised parameter, of the model's dtype unless said otherwise; the weights loader fills it."""
        return nn.Parameter(torch.empty(*shape, dtype=dtype or self.dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True)
class WeightPart:
    """One checkpoint tensor, or this rank's slice of it, that fills a parameter or a part of it.

    `name` is relative to the parent of the module that owns the parameter. Along `dim`, elements [start, start +
    length) of the checkpoint tensor go to the parameter from `target_start` on. With `dim` None the tensor fills the
    parameter. `index`: the place in the parameter's first dim, if the checkpoint has a tensor for each.
    `is_transposed`: its last two dims are exchanged. `is_elsewhere`: another rank holds it, so its shape is checked and
    nothing is read. `axes`: the parameter's dims in the checkpoint's order.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    length: int = 0
    target_start: int = 0
    index: int | None = None
    is_transposed: bool = False
    is_elsewhere: bool = False
    axes: tuple[int, ...] | None = None
    member: str = ""
    """A suffix to the name that selects one matrix of a stack (weights_reader.Member): `shape` is the stack's, and
    `dim` counts in the matrix, (outputs, inputs)."""
    offset: float = 0.0
    """Added to each value, in the parameter's dtype: norms are stored less 1 by some."""

    def place(self, parameter: Tensor) -> Tensor:
        """The part of `parameter` that this tensor fills, seen as the checkpoint has it."""
        target = parameter if self.index is None else parameter[self.index]
        if self.is_transposed:
            target = target.transpose(-1, -2)
        if self.axes is not None:
            target = target.permute(self.axes)
        return target if self.dim is None else target.narrow(self.dim, self.target_start, self.length)
