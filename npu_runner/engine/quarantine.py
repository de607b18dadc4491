"""Finds the sequence that makes steps fail: those of a failed step run again in halves, until one fails alone.

A sequence that was alone in a step that failed runs alone once more: its first failure may have been of a moment. A
group is through once each of its sequences has ended or got further than it was when it failed. Every failure makes
the group smaller and every other step gets somebody further, so it ends. Knows nothing of why steps fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf

from npu_runner.core.scheduler import Scheduler
from npu_runner.core.sequence import Sequence

_Group = dict[int, tuple[Sequence, int]]
"""By seq_id, with the number of tokens that it had."""


class Quarantine:
    """`is_on`: only the first group runs, everybody else waits."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._groups: deque[_Group] = deque()
        self.found_any = False
        """Whether somebody failed alone since it was last on."""

    @property
    def is_on(self) -> bool:
        return bool(self._groups)

    def split(self, failed: SequenceOf[Sequence]) -> Sequence | None:
        """A step of `failed` was abandoned. Returns the culprit, if it ran alone; it is for the caller to end it."""
        is_first = not self.is_on
        if is_first:
            self.found_any = False
        rest = _remaining(self._groups.popleft()) if self.is_on else {}
        for seq in failed:
            rest.pop(seq.seq_id, None)
        half = len(failed) // 2
        is_culprit = not half and not is_first
        groups = [rest] if is_culprit else [_group(failed[:half]), _group(failed[half:]), rest]
        self._groups.extendleft(reversed([group for group in groups if group]))
        self.found_any |= is_culprit
        self._run_first()
        return failed[0] if is_culprit else None

    def step_ended(self) -> bool:
        """Go on to the next group once the first is through. True when that was the last one."""
        if not self.is_on or _remaining(self._groups[0]):
            return False
        self._groups.popleft()
        self._run_first()
        return not self.is_on

    def reset(self) -> None:
        self._groups.clear()

    def _run_first(self) -> None:
        while self.is_on and not _remaining(self._groups[0]):
            self._groups.popleft()  # its sequences have been aborted
        group = [seq for seq, _ in self._groups[0].values()] if self.is_on else None
        self._scheduler.run_alone(group)


def _group(sequences: SequenceOf[Sequence]) -> _Group:
    return {seq.seq_id: (seq, seq.num_tokens) for seq in sequences}


def _remaining(group: _Group) -> _Group:
    """Those that are not through."""
    return {key: (seq, num) for key, (seq, num) in group.items() if not seq.is_finished and seq.num_tokens <= num}
