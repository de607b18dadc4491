"""What the worst step takes of a device's memory. Knows one memory; nothing of models or of what is to be stored."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from npu_runner.platforms.memory import Memory, MemoryInfo
from npu_runner.runner.base import MemoryProfile

_UNKNOWN = MemoryInfo(0, 0, 0, 0, 0)


def weights_bytes(model: nn.Module) -> int:
    """Of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


class MemoryMeter:
    """Made before anything is loaded: whatever is taken then belongs to somebody else."""

    def __init__(self, memory: Memory):
        self._memory = memory
        self._before = memory.info() or _UNKNOWN

    def start_step(self) -> None:
        """What follows, up to `profile`, is the worst step."""
        self._memory.empty_cache()
        self._memory.reset_peak()

    def settled_profile(self, weights_bytes: int) -> MemoryProfile:
        """Before any step: what stands, and no activations."""
        self.start_step()
        return self.profile(weights_bytes=weights_bytes, cache_bytes=0)

    def peak_of(self, run: Callable[[], object]) -> int:
        """Bytes that `run` takes of the allocator at once; 0 where nothing is measured."""
        self.start_step()
        before = self._memory.info()
        run()
        self._memory.synchronize()
        after = self._memory.info()
        return after.peak_allocated_bytes - before.allocated_bytes if before and after else 0

    def profile(self, *, weights_bytes: int, cache_bytes: int, staging_bytes: int = 0) -> MemoryProfile:
        """All that has been taken beside a KV cache of `cache_bytes`.

        `weights_bytes`, by their shapes, is for platforms that measure nothing. `staging_bytes`: what `peak_of` found
        for the pictures of a next step.
        """
        self._memory.synchronize()
        info = self._memory.info()
        if info is None:
            return MemoryProfile(weights_bytes=weights_bytes)
        self._memory.empty_cache()
        settled = self._memory.info() or info
        before = self._before
        other = info.total_bytes - before.free_bytes
        return MemoryProfile(
            total_bytes=info.total_bytes,
            free_before_bytes=before.free_bytes,
            weights_bytes=info.allocated_bytes - before.allocated_bytes - cache_bytes,
            activation_peak_bytes=info.peak_allocated_bytes - info.allocated_bytes,
            staging_bytes=staging_bytes,
            # What the driver gave since the start, less what the allocator holds of it.
            outside_bytes=max(0, settled.total_bytes - settled.free_bytes - other - settled.reserved_bytes
                              + before.reserved_bytes),
            other_bytes=other,
        )
