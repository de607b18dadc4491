"""Device memory: what the worst step takes. If it still runs out: a second try, then an error with a remedy.

Knows one memory, and a callback that frees caches; nothing of models or of what is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from npu_runner.errors import OutOfMemoryError
from npu_runner.platforms.devices import Memory, MemoryInfo
from npu_runner.runner.base import MemoryProfile

logger = logging.getLogger(__name__)

T = TypeVar("T")
_REMEDY = ("lower max_num_batched_tokens, max_num_seqs, image_max_pixels, vision_cache_bytes or memory_utilization, or "
           "see what else uses the device")
_UNKNOWN = MemoryInfo(0, 0, 0, 0, 0)


class MemoryGuard:
    """`release` gives back whatever can be made again. Without `can_retry` (several ranks: the others wait inside a
    collective) there is no second try."""

    def __init__(self, memory: Memory, release: Callable[[], None], *, can_retry: bool):
        self._memory = memory
        self._release = release
        self._can_retry = can_retry
        self._is_starting = False
        self.num_retries = 0
        self.ledger = ""

    @contextmanager
    def starting(self, phase: Callable[[], str]) -> Iterator[None]:
        """Raises OutOfMemoryError, with the phase and the ledger as far as it is known, when memory runs out inside."""
        self._is_starting = True
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not self._memory.is_out_of_memory(error):
                raise
            raise OutOfMemoryError(self._message(f"while {phase()}", error)) from error
        finally:
            self._is_starting = False

    def step(self, run: Callable[[], T], what: Callable[[], str], *, why_once: str | None = None) -> T:
        """`run()`, repeated once if memory runs out. It must be repeatable; otherwise `why_once` gives the reason.

        Raises OutOfMemoryError if memory runs out in the second try, too. There is no second try while starting. What
        cannot be repeated fails at once, after the caches have been freed.
        """
        if self._is_starting:
            return run()
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            if not self._memory.is_out_of_memory(error):
                raise
            if not self._can_retry:
                raise OutOfMemoryError(self._message(f"in a {what()}", error)) from error
            if why_once is not None:
                self._release()
                raise OutOfMemoryError(self._message(f"in a {what()}, {why_once}", error)) from error
            logger.warning("device memory ran out in a %s; trying again without cached images", what())
        # Outside of the handler: the exception holds on to the failed step's tensors.
        self.num_retries += 1
        self._memory.synchronize()  # steps before this one may be under way, with memory of theirs
        self._release()
        self._memory.empty_cache()
        try:
            return run()
        except (RuntimeError, MemoryError) as error:
            if not self._memory.is_out_of_memory(error):
                raise
            raise OutOfMemoryError(self._message(f"in a {what()}, twice", error)) from error

    def _message(self, where: str, error: BaseException) -> str:
        reason = str(error).strip().partition("\n")[0].partition(".If reserved")[0] or type(error).__name__
        ledger = f"\n{self.ledger}" if self.ledger else ""
        return f"device memory ran out {where} ({reason}); {_REMEDY}{ledger}"


def weights_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


class MemoryMeter:
    """Made before anything is loaded: memory used by then belongs to other processes."""

    def __init__(self, memory: Memory):
        self._memory = memory
        self._before = memory.info() or _UNKNOWN

    def start_step(self) -> None:
        """Start to measure: the work up to `profile` is the worst step."""
        self._memory.empty_cache()
        self._memory.reset_peak()

    def final_profile(self, weights_bytes: int) -> MemoryProfile:
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
        for the images of a next step.
        """
        self._memory.synchronize()
        info = self._memory.info()
        if info is None:
            return MemoryProfile(weights_bytes=weights_bytes)
        self._memory.empty_cache()
        measured = self._memory.info() or info
        before = self._before
        other = info.total_bytes - before.free_bytes
        return MemoryProfile(
            total_bytes=info.total_bytes,
            weights_bytes=info.allocated_bytes - before.allocated_bytes - cache_bytes,
            activation_peak_bytes=info.peak_allocated_bytes - info.allocated_bytes,
            staging_bytes=staging_bytes,
            # What the driver gave since the start, less what the allocator holds of it.
            outside_bytes=max(0, measured.total_bytes - measured.free_bytes - other - measured.reserved_bytes
                              + before.reserved_bytes),
            other_bytes=other,
        )
