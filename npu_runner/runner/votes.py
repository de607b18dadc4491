"""Decisions of a start that must be the same on all ranks, though only one may know the reason. Knows no device and no
model."""

from __future__ import annotations

import itertools
import time

from npu_runner.errors import EngineDeadError
from npu_runner.layers.parallel import TensorParallel
from npu_runner.processes.stopwatch import Stopwatch

_LOOK_SECONDS = 0.005


class Votes:
    """Held through the store of the process group, from host to host.

    A collective would work only without failures: one rank's device may wait in another collective that its peer never
    joins. Every rank holds the same votes in the same order.
    """

    def __init__(self, tp: TensorParallel, timeout_seconds: float):
        self._tp = tp
        self._timeout_seconds = timeout_seconds
        self._numbers = itertools.count()

    def refusal(self, what: str, own: str | None) -> str | None:
        """The first rank's reason against `what`, None where no rank has one; `own` is this rank's.

        Raises EngineDeadError when a rank does not answer in time.
        """
        tp = self._tp
        if tp.size == 1:
            return own
        assert tp.store is not None, "several ranks have a store"
        number = next(self._numbers)
        keys = [f"npu_runner/vote-{number}/rank-{rank}" for rank in range(tp.size)]
        tp.store.set(keys[tp.rank], own or "")
        if not self._come_in_time(keys):
            silent = ", ".join(str(rank) for rank, key in enumerate(keys) if not tp.store.check([key]))
            raise EngineDeadError(
                f"{what}: rank {tp.rank} {f'refuses ({own})' if own else 'is done'}, rank {silent} has not answered "
                f"within {self._timeout_seconds:.0f} s; leave larger sizes out of graph_batch_sizes, take graph_mode "
                "eager, or raise step_timeout_seconds if it is only slow")
        reasons = ((rank, tp.store.get(key).decode()) for rank, key in enumerate(keys))
        return next((f"rank {rank}: {reason}" for rank, reason in reasons if reason), None)

    def _come_in_time(self, keys: list[str]) -> bool:
        """Not by the store's own wait: its clock goes on while the job is suspended."""
        assert self._tp.store is not None, "several ranks have a store"
        watch = Stopwatch()
        while not self._tp.store.check(keys):
            if watch.exceeds(self._timeout_seconds):
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def all_agree(self, what: str, own: bool) -> bool:
        return self.refusal(what, None if own else "no") is None
