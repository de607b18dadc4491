"""What happens when device memory runs out after all: a second try with caches given back, then an error that helps.

Knows nothing of models; it is told what may be released.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from npu_runner.errors import OutOfMemoryError
from npu_runner.platforms.memory import Memory

logger = logging.getLogger(__name__)

T = TypeVar("T")
_REMEDY = ("lower max_num_batched_tokens, max_num_seqs, image_max_pixels, vision_cache_bytes or memory_utilization, or "
           "see what else uses the device")


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
        """`run()`, which changes nothing that a second call would not do again in the same way, unless `why_once` says
        why it is not to be called again.

        Raises OutOfMemoryError when memory runs out in the second try, too. While starting there is none: what does not
        fit then does not fit. What cannot be repeated fails at once, but leaves the caches given back.
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
            logger.warning("device memory ran out in a %s; trying again without cached pictures", what())
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
