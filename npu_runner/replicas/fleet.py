"""Replicas and the rows they share, so that each is done once, whoever dies. Knows nothing of what is in a row.

Used by one thread, the driver's, which also polls. A row is with one replica at a time; it is done when its bytes have
come, and goes to another when the one that had it is dead.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from npu_runner.errors import ConfigError, NpuRunnerError, ReplicaDeadError
from npu_runner.replicas.base import Begun, Event, Finished, FinishedRow, Ready, ReplicaFacts, Returned, RowRun
from npu_runner.replicas.dealer import Dealer
from npu_runner.replicas.row_queue import RowQueue
from npu_runner.replicas.slot import MakeReplica, Slot

_LOOK_SECONDS = 1.0
# All places wait so long for devices before the job gives up; what is done stays done.
ROOM_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A row that is given up: nobody else gets it."""

    index: int
    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class FleetHooks:
    """What the fleet asks of the driver."""

    make_run: Callable[[Sequence[int]], RowRun]
    """The rows of these indices, for a replica."""
    say: Callable[[str], None]
    """A line for the person who watches."""
    suspect: Callable[[Sequence[int]], None]
    """These rows run alone from now on, in this run and in later ones: they were under way when replicas died."""
    accuse: Callable[[int, ReplicaDeadError], Verdict | None]
    """This row alone was under way in a death. The verdict, if that is enough to give it up."""
    recruit: Callable[[int], Sequence[MakeReplica]] | None = None
    """Asked now and then, with the number of places there are: further ones, if devices have come for them."""


class Fleet:
    """Replicas and the rows they share. Entered once; left, everything of all replicas is gone.

    `max_restarts`: how often another replica takes the place of one that died, for each place. `given_up`: rows that
    nobody gets from the beginning.
    """

    def __init__(self, replicas: Sequence[MakeReplica], rows: RowQueue, hooks: FleetHooks, *, max_restarts: int = 0,
                 given_up: Sequence[Verdict] = ()):
        self._rows = rows
        self._hooks = hooks
        self._max_restarts = max_restarts
        self._woken: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self.slots = [Slot(number, make, self._woken.put) for number, make in enumerate(replicas)]
        self._dealer = Dealer(self.slots, rows, hooks.make_run)
        first = self.slots[0].replica
        self._works_here = len(self.slots) == 1 and first is not None and not first.can_restart
        """The only replica works in this thread, in its `poll`, and wakes nobody."""
        self._look_at = 0.0
        self._without_room_since: float | None = None
        self._facts: ReplicaFacts | None = None
        self._has_begun, self._terms = False, None
        self._finished: list[FinishedRow] = []
        self._verdicts = list(given_up)
        self._failure: NpuRunnerError | None = None
        """Raised once what had come before it was told."""
        rows.drop(verdict.index for verdict in given_up)
        self._num_done = 0

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        if len(self.slots) == 1:
            self.slots[0].close()  # in the thread that it has worked in
            return
        with ThreadPoolExecutor(len(self.slots)) as threads:
            for closing in [threads.submit(slot.close) for slot in self.slots]:
                closing.result()

    def load(self) -> ReplicaFacts:
        """Start all replicas and wait until each is ready, dead for good, or without room. They prepare rows meanwhile.

        Raises ConfigError where a setting is wrong or two of them would answer otherwise, ReplicaDeadError where none
        is left.
        """
        self.start()
        while not self.is_loaded:
            self._dealer.hand_out()
            self._poll_replicas(0.2)
        return self.facts

    @property
    def facts(self) -> ReplicaFacts:
        """What replicas have in common, once one is loaded."""
        assert self._facts is not None, "nobody is left, and nobody has said so"
        return self._facts

    def start(self) -> None:
        """As `load`, which does not wait: `poll` goes on with it."""
        for slot in self.slots:
            slot.start()
        self._dealer.hand_out()

    @property
    def is_loaded(self) -> bool:
        places = self._places()
        is_any = any(slot.facts is not None for slot in places)
        return is_any and all(slot.facts is not None or slot.waits_for is not None for slot in places)

    def wake(self) -> None:
        """Have `poll` return, or look again for rows to hand out. From any thread; not for a replica of this one."""
        self._woken.put(None)

    def forget(self, first: int) -> None:
        """Rows before `first` are nobody's any more: replicas are asked for those that they have, begun or not. Of what
        comes all the same `poll` tells."""
        self._rows.forget(first)
        for slot in self.slots:
            slot.is_reserved = slot.lone is not None or (slot.is_reserved and self._rows.has_suspects)
            if slot.replica is not None and slot.held:
                slot.is_asked = True
                slot.replica.recall(len(slot.held), begun=True)

    def begin(self, terms: Any) -> None:
        """From here on rows are answered. `terms` go to every replica, to later ones as well."""
        self._has_begun, self._terms = True, terms
        for slot in self.slots:
            if slot.replica is not None and slot.facts is not None:
                slot.replica.begin(terms)

    @property
    def is_over(self) -> bool:
        return self._num_done == self._rows.num_rows

    def poll(self, timeout_seconds: float) -> tuple[list[FinishedRow], list[Verdict]]:
        """Rows that are done since the last call, and rows that are given up; waits for some at most so long.

        Raises ReplicaDeadError when no replica is left, and what a replica raises for all of them.
        """
        if self._failure is not None:
            raise self._failure
        self._dealer.hand_out()
        if not self._finished and not self._verdicts:
            try:
                self._poll_replicas(timeout_seconds)
            except NpuRunnerError as failure:
                if not self._finished and not self._verdicts:
                    raise
                self._failure = failure
        finished, self._finished = self._finished, []
        verdicts, self._verdicts = self._verdicts, []
        self._num_done += len(finished) + len(verdicts)
        return finished, verdicts

    # -- what replicas say -----------------------------------------------------------------------------------------

    def _poll_replicas(self, timeout_seconds: float) -> None:
        for slot in self._whom_to_ask(timeout_seconds):
            try:
                for event in slot.poll(timeout_seconds if self._works_here else 0.0):
                    self._take(slot, event)
            except ReplicaDeadError as error:
                self._bury(slot, error)
            except NpuRunnerError as error:
                if slot.facts is not None or not (slot.num_deaths or self._has_begun):
                    raise
                # Others could be loaded: they go on, and another try may go well.
                self._bury(slot, ReplicaDeadError(f"{slot.name} could not be loaded: {error}", rows=()))
        for slot in self._places():
            if slot.replica is None:
                slot.restart()

    def _look_around(self) -> None:
        """Have devices come, or are there none any more?"""
        places = self._places()
        for make in () if self._hooks.recruit is None else self._hooks.recruit(len(places)):
            slot = Slot(len(self.slots), make, self._woken.put)
            self._hooks.say(f"{slot.name} is added: there are devices for it")
            self.slots.append(slot)
            slot.start()
        if not places or not all(slot.waits_for for slot in places):
            self._without_room_since = None
            return
        self._without_room_since = self._without_room_since or time.monotonic()
        if time.monotonic() - self._without_room_since > ROOM_SECONDS:
            raise ReplicaDeadError(f"no replica is left: {places[0].name} and all others wait for "
                                   f"{places[0].waits_for}, and nobody had it free for {ROOM_SECONDS:g} s")

    def _whom_to_ask(self, timeout_seconds: float) -> Iterable[Slot]:
        """Those that have something to say; all of them, once in a while: one that is stopped says nothing."""
        if self._works_here:
            return self.slots
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            self._look_around()
            return self.slots
        woken: set[Slot | None] = set()
        with contextlib.suppress(queue.Empty):
            woken.add(self._woken.get(timeout=timeout_seconds))
            while True:
                woken.add(self._woken.get_nowait())
        return [slot for slot in woken if slot is not None] if woken else self.slots

    def _take(self, slot: Slot, event: Event) -> None:
        if isinstance(event, Finished):
            for row in event.rows:
                slot.held.remove(row.number)
                slot.begun.discard(row.number)
            self._finished += event.rows
            slot.num_finished += len(event.rows)
            slot.gave_nothing = False  # what its workers prepared then may wait now
            self._free(slot)
        elif isinstance(event, Begun):
            slot.begun.update(event.indices)
        elif isinstance(event, Returned):
            slot.is_asked, slot.gave_nothing = False, not event.indices
            slot.held.difference_update(event.indices)
            slot.begun.difference_update(event.indices)
            self._rows.put_back(event.indices)
            self._free(slot)
        elif isinstance(event, Ready):
            self._welcome(slot, event.facts)

    def _free(self, slot: Slot) -> None:
        """It may take others again, if the suspect that it had alone is gone."""
        if slot.lone is not None and slot.lone not in slot.held:
            slot.lone, slot.is_reserved = None, self._rows.has_suspects

    def _welcome(self, slot: Slot, facts: ReplicaFacts) -> None:
        if self._facts is None:
            self._facts = facts
        _refuse_another(slot.name, self._facts, facts)
        slot.facts = facts
        if self._has_begun:
            assert slot.replica is not None, f"{slot.name} is dead"
            slot.replica.begin(self._terms)

    # -- deaths ----------------------------------------------------------------------------------------------------

    def _bury(self, slot: Slot, error: ReplicaDeadError) -> None:
        assert slot.replica is not None, f"{slot.name} died twice"
        if not slot.replica.can_restart:
            raise error
        under_way = slot.begun if error.rows is None else slot.held.intersection(error.rows)
        under_way = set(under_way)
        held = slot.bury()
        is_last = not self._places()
        held -= self._accuse(under_way, error, is_last=is_last)
        self._rows.put_back(held)
        restarts = f"started again ({slot.num_deaths} of {self._max_restarts})"
        what = restarts if slot.num_deaths <= self._max_restarts else "not started again (max_replica_restarts)"
        self._hooks.say(f"{error}; {len(held)} rows that it had go to whoever is there, {len(under_way)} of them were "
                        f"under way; {what}")
        if is_last:
            raise ReplicaDeadError(f"no replica is left; the last one: {error}") from error

    def _accuse(self, under_way: set[int], error: ReplicaDeadError, *, is_last: bool) -> set[int]:
        """Note whom the death may be the fault of. Returns the row that is given up for it, if one is."""
        suspects = self._rows.count_death(under_way)
        if len(under_way) == 1:
            (row,) = under_way
            self._rows.isolate(row)
            verdict = self._hooks.accuse(row, error)
            if verdict is not None:
                self._verdicts.append(verdict)
                return {row}
        elif suspects or is_last:  # who may have ended a job is suspected in the next run
            self._hooks.suspect(sorted(under_way) if is_last else suspects)
        return set()

    def _places(self) -> list[Slot]:
        """Those with a replica, or to which one will come again."""
        return [slot for slot in self.slots if slot.replica is not None or slot.num_deaths <= self._max_restarts]


def _refuse_another(name: str, first: ReplicaFacts, facts: ReplicaFacts) -> None:
    """Raises ConfigError unless both would give the same answers."""
    if facts.version != first.version:
        raise ConfigError(f"{name}: has npu-runner {facts.version}, another replica {first.version}; install the same")
    for what, ours, theirs in (("settings", facts.settings, first.settings),
                               ("weights", facts.weights or {}, first.weights or {})):
        names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        if names:
            changes = "; ".join(f"{item}: {ours.get(item)!r} here, {theirs.get(item)!r} there" for item in names)
            raise ConfigError(f"{name}: its {what} are not those of another replica, and rows would be answered by "
                              f"chance: {changes}. Set what differs, or take devices that are alike")
