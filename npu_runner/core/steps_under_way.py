"""The sequences of the steps that are planned and not completed. Knows no tokens and no blocks."""

from __future__ import annotations

from collections import deque

from npu_runner.core.sequence import Sequence


class StepsUnderWay:
    """Oldest first. What a step brings to a sequence counts only in the epoch that the step was planned in."""

    def __init__(self) -> None:
        self._steps: deque[tuple[list[Sequence], list[int]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, sequences: list[Sequence]) -> None:
        self._steps.append((sequences, [seq.epoch for seq in sequences]))

    def complete(self) -> list[Sequence | None]:
        """The oldest step has run: its sequences in batch order, None for one that has ended or restarted."""
        sequences, epochs = self._steps.popleft()
        return [seq if seq.epoch == epoch else None for seq, epoch in zip(sequences, epochs, strict=True)]

    def rollback(self) -> list[list[Sequence]]:
        """No step has run: the sequences of each that have not ended."""
        steps = [[seq for seq in sequences if not seq.is_finished] for sequences, _ in self._steps]
        self._steps.clear()
        return steps
