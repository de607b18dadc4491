"""How large the KV cache may be, and the ledger that says why. Knows bytes, not models or schedulers."""

from __future__ import annotations

from dataclasses import dataclass

from npu_runner.config import GIB, MIB
from npu_runner.errors import OutOfMemoryError
from npu_runner.runner.base import MemoryProfile

CPU_DEFAULT_KV_BYTES = GIB
# Kept free on a device for what cannot be measured beforehand: fragmentation, graph pools, the vendor's workspaces.
HEADROOM_BYTES = 256 * MIB


@dataclass(frozen=True)
class KVCacheShape:
    """Keys and values, (num_layers, num_blocks, block_size, kv_width) each.

    kv_width is this rank's kv heads * head_dim.
    """

    num_layers: int
    block_size: int
    kv_width: int
    element_bytes: int

    @property
    def bytes_per_block(self) -> int:
        return 2 * self.num_layers * self.block_size * self.kv_width * self.element_bytes


@dataclass(frozen=True)
class KVCachePlan:
    num_blocks: int
    max_model_len: int
    ledger: str


def plan_kv_cache(
    shape: KVCacheShape, profile: MemoryProfile, *, is_measured: bool, kv_cache_bytes: int | None,
    memory_utilization: float, reserved_bytes: int, max_model_len: int, max_model_len_is_given: bool,
    max_num_seqs: int,
) -> KVCachePlan:
    """Number of blocks (the null block included) and the longest sequence they hold.

    `reserved_bytes` is what the vision cache may take. Raises OutOfMemoryError, with the ledger and the setting that
    would help, when not even one sequence of `max_model_len` fits (a length nobody asked for is cut instead).
    """
    if kv_cache_bytes is not None:
        budget = kv_cache_bytes
    elif not is_measured:
        budget = CPU_DEFAULT_KV_BYTES
    else:
        budget = _measured_budget(profile, memory_utilization, reserved_bytes)
    blocks_per_sequence = -(-max_model_len // shape.block_size)
    # More than every sequence at full length needs is never used.
    num_blocks = min(budget // shape.bytes_per_block, max_num_seqs * blocks_per_sequence + 1)
    ledger = _ledger(shape, profile, is_measured, reserved_bytes, max(num_blocks, 0))
    if num_blocks - 1 < blocks_per_sequence:
        if max_model_len_is_given or num_blocks < 2:
            need = (blocks_per_sequence + 1) * shape.bytes_per_block
            raise OutOfMemoryError(
                f"one sequence of {max_model_len} tokens needs {_size(need)} of KV cache, {_size(max(0, budget))} is "
                f"there; raise kv_cache_bytes{' or memory_utilization' if is_measured else ''}, or lower "
                f"max_model_len\n{ledger}"
            )
        max_model_len = (num_blocks - 1) * shape.block_size
        ledger += f"\n  max_model_len cut to {max_model_len}: what the KV cache holds"
    return KVCachePlan(num_blocks, max_model_len, ledger)


def _measured_budget(profile: MemoryProfile, memory_utilization: float, reserved_bytes: int) -> int:
    allowed = int(profile.total_bytes * memory_utilization)
    taken = profile.weights_bytes + profile.activation_peak_bytes + profile.outside_bytes + profile.other_bytes
    return allowed - taken - reserved_bytes - HEADROOM_BYTES


def _ledger(shape: KVCacheShape, profile: MemoryProfile, is_measured: bool, reserved_bytes: int,
            num_blocks: int) -> str:
    kv_bytes = num_blocks * shape.bytes_per_block
    rows = [("weights", profile.weights_bytes)]
    if is_measured:
        rows += [("activations, worst step", profile.activation_peak_bytes),
                 ("outside the allocator", profile.outside_bytes), ("in use by others", profile.other_bytes),
                 ("headroom", HEADROOM_BYTES)]
    rows += [("vision cache, at most", reserved_bytes), ("KV cache", kv_bytes)]
    lines = [f"  {name:<28}{_size(value):>12}" for name, value in rows]
    if is_measured:
        lines.append(f"  {'device memory':<28}{_size(profile.total_bytes):>12}")
    lines.append(f"  {num_blocks} blocks of {shape.block_size} tokens, {_size(shape.bytes_per_block)} each")
    return "memory ledger\n" + "\n".join(lines)


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:.1f} KiB"
