"""Where sequences wait until what their rule needs is built, so that no step waits for it. Knows no grammar library.

Rank 0 builds, wherever it lives. Orders to build travel with a step, and results return with one. If no step can be
made, they travel alone. Orders that were lost are sent again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from npu_runner.core.sequence import Sequence
from npu_runner.errors import RequestError
from npu_runner.grammars.matchers import Rule, expected_bytes
from npu_runner.request.limits import LIMITS
from npu_runner.request.structured_outputs import StructuredOutputsParams

# Half of what is kept: what is built ahead of its sequence is still there when that enters.
_MOST_BYTES_AHEAD = LIMITS.max_matcher_bytes // 2


@dataclass(eq=False)
class _Building:
    number: int
    num_bytes: int
    sequences: list[Sequence] = field(default_factory=list)
    is_asked: bool = False


class RuleRoom:
    """First come, first served among those whose rules are built; one whose rule takes long is passed by others."""

    def __init__(self) -> None:
        self._building: dict[str, _Building] = {}
        self._built: OrderedDict[str, int] = OrderedDict()
        """Grammars that are there, as far as is known, with their bytes; the one asked for last stands last."""
        self._ahead: list[tuple[Sequence, int]] = []
        """One sequence of each that was built, and its bytes, until it enters a step."""
        self._ready: list[Sequence] = []
        self._failed: list[tuple[Sequence, RequestError]] = []
        self._next_number = 0

    @property
    def is_building(self) -> bool:
        return bool(self._building)

    @property
    def num_waiting(self) -> int:
        return sum(len(rule.sequences) for rule in self._building.values()) + len(self._ready) + len(self._failed)

    def holds(self, sequence: Sequence) -> bool:
        """Take in a sequence whose rule is not built: `pop_ready` gives it back. False: it may be queued now."""
        grammar = _grammar_of(sequence)
        if grammar in self._built:
            self._built.move_to_end(grammar)
        if not grammar or grammar in self._built:
            return False
        if grammar not in self._building:
            self._building[grammar] = _Building(self._next_number, expected_bytes(grammar))
            self._next_number += 1
        self._building[grammar].sequences.append(sequence)
        return True

    def leave(self, sequence: Sequence) -> None:
        """It has ended, wherever it is."""
        if sequence in self._ready:
            self._ready.remove(sequence)
        rule = self._building.get(_grammar_of(sequence)) if self._building else None
        if rule is not None and sequence in rule.sequences:
            rule.sequences.remove(sequence)
            if not rule.sequences:
                del self._building[_grammar_of(sequence)]

    def to_ask(self) -> list[Rule]:
        """The rules to build next, which count as requested; bounded by the rules that wait for their sequence."""
        asked = [rule for rule in self._building.values() if rule.is_asked]
        if len(asked) == len(self._building):
            return []
        self._ahead = [(seq, size) for seq, size in self._ahead if seq.slot is None and not seq.is_finished]
        num_bytes = sum(size for _, size in self._ahead) + sum(rule.num_bytes for rule in asked)
        rules: list[Rule] = []
        for grammar, rule in self._building.items():
            if rule.is_asked:
                continue
            if num_bytes and num_bytes + rule.num_bytes > _MOST_BYTES_AHEAD:
                break
            num_bytes += rule.num_bytes
            rule.is_asked = True
            rules.append((rule.number, grammar))
        return rules

    def ask_again(self) -> None:
        """Steps were given up, with what they carried."""
        for rule in self._building.values():
            rule.is_asked = False

    def record(self, answers: Mapping[int, RequestError | None]) -> None:
        """Record the results of builds by number: None for a built rule. Unknown numbers are from before a `reset`."""
        for grammar, rule in list(self._building.items()) if answers else ():
            if rule.number not in answers:
                continue
            del self._building[grammar]
            failure = answers[rule.number]
            if failure is not None:
                self._failed += [(sequence, failure) for sequence in rule.sequences]
                continue
            self._ready += rule.sequences
            self._ahead.append((rule.sequences[0], rule.num_bytes))
            self._built[grammar] = rule.num_bytes
            while len(self._built) > 1 and sum(self._built.values()) > _MOST_BYTES_AHEAD:
                self._built.popitem(last=False)

    def pop_ready(self) -> list[Sequence]:
        """The sequences that may be queued now, in the order of their arrival."""
        ready, self._ready = self._ready, []
        return sorted(ready, key=lambda seq: seq.arrival)

    def pop_failed(self) -> list[tuple[Sequence, RequestError]]:
        """The sequences whose rule cannot be built, with the error."""
        failed, self._failed = self._failed, []
        return failed

    def reset(self) -> None:
        """Forget every sequence; what is built stays."""
        self._building, self._ahead, self._ready, self._failed = {}, [], [], []


def _grammar_of(sequence: Sequence) -> str:
    structured = sequence.params.structured_outputs
    return structured.compiled if isinstance(structured, StructuredOutputsParams) else ""
