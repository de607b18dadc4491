"""Computes the size of the KV cache, and the ledger that explains it. Knows bytes, not models or schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from npu_runner.core.block_manager import most_blocks
from npu_runner.errors import ConfigError, OutOfMemoryError
from npu_runner.request.limits import GIB, MIB, size
from npu_runner.runner.base import MemoryProfile
from npu_runner.runner.states import StateNeeds, StatePlan, StateShape, plan_states

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
    most_elements: int | None = None
    """The elements of a layer's keys that attention addresses; None: any number."""

    @property
    def bytes_per_block(self) -> int:
        return 2 * self.num_layers * self.block_size * self.kv_width * self.element_bytes


@dataclass(frozen=True)
class KVCachePlan:
    num_blocks: int
    max_model_len: int
    ledger: str


def check_kv_cache_bytes(wanted: int | None, free: int | None, num_sharing: int) -> None:
    """Raises ConfigError for a size that was asked for and cannot be there, whatever else is taken.

    `free`: bytes of the memory, None where they are not known; `num_sharing`: ranks that take as much of it each.
    """
    if wanted is not None and free is not None and wanted * num_sharing > free:
        each = f" for each of {num_sharing} ranks" if num_sharing > 1 else ""
        raise ConfigError(f"kv_cache_bytes {size(wanted)}{each}: {size(free)} of memory is free; lower it, or see what "
                          "else takes memory")


def plan_kv_cache(shape: KVCacheShape, profile: MemoryProfile, *, is_measured: bool, kv_cache_bytes: int | None,
                  memory_utilization: float, reserved_bytes: int, max_model_len: int, max_model_len_is_given: bool,
                  max_num_seqs: int, max_num_batched_tokens: int, windows: Sequence[int | None] = (),
                  states: StatePlan | None = None) -> KVCachePlan:
    """Number of blocks (the null block included) and the longest sequence they hold.

    `reserved_bytes` is what the vision cache may take, `states` what stands beside the KV cache, `windows` the layers'
    sliding windows. Raises OutOfMemoryError, with the ledger and the setting that would help, when not even one
    sequence of `max_model_len` fits (a default length is cut instead).
    """
    if kv_cache_bytes is not None:
        budget = kv_cache_bytes
    elif not is_measured:
        budget = CPU_DEFAULT_KV_BYTES
    else:
        budget = memory_left(profile, memory_utilization, reserved_bytes) - (states.num_bytes if states else 0)
    window = None if states else cache_window(windows)
    blocks_per_sequence = most_blocks(max_model_len, window, max_num_batched_tokens, shape.block_size)
    # More than every sequence at full length needs is never used.
    num_blocks = min(budget // shape.bytes_per_block, max_num_seqs * blocks_per_sequence + 1)
    addressed = num_blocks if shape.most_elements is None else shape.most_elements // (
        shape.block_size * shape.kv_width)
    if is_limited := num_blocks > addressed:
        num_blocks, budget = addressed, addressed * shape.bytes_per_block
    ledger = memory_ledger(profile, is_measured, reserved_bytes, states=states,
                           kv_bytes=max(num_blocks, 0) * shape.bytes_per_block)
    ledger += f"\n  {max(num_blocks, 0)} blocks of {shape.block_size} tokens, {size(shape.bytes_per_block)} each"
    if is_limited:
        ledger += f"\n  no more blocks, since attention addresses {shape.most_elements} elements of a layer's keys"
    ledger += about_windows(windows, frees_blocks=window is not None, blocks_per_sequence=blocks_per_sequence)
    if num_blocks - 1 < blocks_per_sequence:
        if max_model_len_is_given or num_blocks < 2:
            need = (blocks_per_sequence + 1) * shape.bytes_per_block
            raise OutOfMemoryError(
                f"one sequence of {max_model_len} tokens needs {size(need)} of KV cache, {size(max(0, budget))} is "
                f"there; raise kv_cache_bytes{' or memory_utilization' if is_measured else ''}, or lower "
                f"max_model_len\n{ledger}")
        # Where windows slide, no length needs less than this one does as a whole.
        max_model_len = (num_blocks - 1) * shape.block_size
        ledger += f"\n  max_model_len cut to {max_model_len}: what the KV cache holds"
    return KVCachePlan(num_blocks, max_model_len, ledger)


def fit_states(shape: StateShape, needs: StateNeeds, profile: MemoryProfile, *, is_measured: bool,
               memory_utilization: float, reserved_bytes: int) -> StatePlan:
    """`plan_states` over half of what weights and activations leave; the other half is for the KV cache.

    Raises OutOfMemoryError, with the ledger, when not even one sequence's states fit, or not as many as were asked for.
    """
    left = memory_left(profile, memory_utilization, reserved_bytes) // 2 if is_measured else None
    plan = plan_states(shape, needs, budget=left)
    if plan.max_num_seqs:
        return plan
    # Each of fewer sequences as if they were asked for.
    possible = next((num for num in range(needs.max_num_seqs - 1, 0, -1)
                     if plan_states(shape, replace(needs, max_num_seqs=num, is_given=True, max_snapshots=0),
                                    budget=left).max_num_seqs), 0)
    remedy = f"lower max_num_seqs to {possible} or less" if possible else "take more or larger devices"
    wanted = needs.max_num_seqs if needs.is_given else 1
    padding, spares = needs.padding_of(wanted), needs.drafts_of_row
    drafts = f", and {spares} for the drafts of one," if spares else ""
    raise OutOfMemoryError(
        f"the states of {wanted} sequences and {padding} padded rows of decode graphs{drafts} take "
        f"{size((wanted + padding + spares) * shape.bytes_per_slot)}; {size(max(0, left or 0))}, half of what weights "
        f"and activations leave, is there for them; {remedy}, or raise memory_utilization\n"
        f"{memory_ledger(profile, is_measured, reserved_bytes, kv_bytes=0)}")


def memory_left(profile: MemoryProfile, memory_utilization: float, reserved_bytes: int) -> int:
    """Bytes that weights and activations leave on a measured device for caches and states."""
    allowed = int(profile.total_bytes * memory_utilization)
    taken = (profile.weights_bytes + profile.activation_peak_bytes + profile.staging_bytes + profile.outside_bytes
             + profile.other_bytes + profile.graph_bytes)
    return allowed - taken - reserved_bytes - HEADROOM_BYTES


def memory_ledger(profile: MemoryProfile, is_measured: bool, reserved_bytes: int, *, kv_bytes: int,
                  states: StatePlan | None = None) -> str:
    rows = [("weights", profile.weights_bytes)]
    if is_measured:
        rows += [("activations, worst step", profile.activation_peak_bytes)]
        if profile.staging_bytes:
            rows += [("images of the next step", profile.staging_bytes)]
        rows += [("outside the allocator", profile.outside_bytes), ("in use by others", profile.other_bytes),
                 ("headroom", HEADROOM_BYTES)]
        if profile.graph_bytes:
            rows += [("graphs of long prefills", profile.graph_bytes)]
    rows += [("vision cache, at most", reserved_bytes)]
    if states is not None:
        rows += [("states of sequences", states.num_bytes)]
    rows += [("KV cache", kv_bytes)]
    lines = [f"  {name:<28}{size(value):>12}" for name, value in rows]
    if is_measured:
        lines.append(f"  {'device memory':<28}{size(profile.total_bytes):>12}")
    if states is not None:
        lines += [f"  {line}" for line in states.describe()]
    return "memory ledger\n" + "\n".join(lines)


def cache_window(windows: Sequence[int | None]) -> int | None:
    """The most tokens that any layer sees; None where one sees all (or none has a cache)."""
    sliding = [window for window in windows if window is not None]
    return max(sliding) if sliding and len(sliding) == len(windows) else None


def about_windows(windows: Sequence[int | None], *, frees_blocks: bool, blocks_per_sequence: int) -> str:
    """A line for the ledger; nothing where no layer slides."""
    sliding = [window for window in windows if window is not None]
    if not sliding:
        return ""
    lengths = " and ".join(str(length) for length in sorted(set(sliding)))
    if frees_blocks:
        return (f"\n  sliding window of {lengths} tokens in every layer: blocks behind it are freed, a sequence "
                f"holds at most {blocks_per_sequence}")
    reason = "other layers see all" if len(sliding) < len(windows) else "the prefix cache goes by states"
    return (f"\n  sliding window of {lengths} tokens in {len(sliding)} of {len(windows)} layers: masked only, no block "
            f"is freed behind it, since {reason}")
