"""Replicas and the rows they share: each row is done once, whichever replica dies. Knows nothing of what is in a row.

Used by one thread, the driver's, which also polls. A row is with one replica at a time. It is done when its bytes have
arrived. If its replica dies, it goes to another.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from npu_runner.errors import ConfigError, NpuRunnerError, ReplicaDeadError
from npu_runner.processes.stopwatch import Stopwatch
from npu_runner.serving.blame import GivenUp
from npu_runner.serving.replica import (
    Event,
    Finished,
    FinishedRow,
    Loading,
    Opened,
    Progressed,
    Ready,
    ReplicaFacts,
    Returned,
    Started,
)
from npu_runner.serving.replicas.load_balancer import LoadBalancer, RowQueue
from npu_runner.serving.replicas.replica_state import MakeReplica, ReplicaState

_POLL_ALL_SECONDS = 1.0
# All places wait so long for devices before the job gives up; what is done stays done.
ROOM_SECONDS = 600.0


class Owner(ABC):
    """Whose rows a fleet serves. The fleet calls it in the thread that polls."""

    @abstractmethod
    def make_run(self, indices: Sequence[int]) -> Any:
        """The rows of these indices, for a replica."""

    @abstractmethod
    def notify(self, news: Opened | Loading | str) -> None:
        """A line for the user. Or what a replica tells before it is ready: each of them the settings that it knows, the
        first one what it does. What this raises ends the fleet."""

    @abstractmethod
    def isolate(self, indices: Sequence[int]) -> None:
        """These rows run alone from now on, in this run and in later ones: they were under way when replicas died."""

    @abstractmethod
    def record_death(self, index: int, error: ReplicaDeadError) -> GivenUp | None:
        """This row alone was under way in a death. Returns the verdict, if that is enough to give it up."""


class Fleet:
    """Replicas and the rows they share. Entered once; left, everything of all replicas is gone.

    `max_restarts`: how often another replica takes the place of one that died, for each place. `given_up`: rows that
    are given up from the beginning. `scale_up` is asked now and then, with the number of places there are: it gives
    further replicas, if devices have come for them.
    """

    def __init__(self, replicas: Sequence[MakeReplica], rows: RowQueue, owner: Owner, *, max_restarts: float = 0,
                 given_up: Sequence[GivenUp] = (),
                 scale_up: Callable[[int], Sequence[MakeReplica]] = lambda num_places: ()):
        self._rows = rows
        self._owner = owner
        self._scale_up = scale_up
        self._max_restarts = max_restarts
        self._woken: queue.SimpleQueue[ReplicaState | None] = queue.SimpleQueue()
        self.states = [self._place(number, make) for number, make in enumerate(replicas)]
        self._balancer = LoadBalancer(self.states, rows, owner.make_run)
        first = self.states[0].replica
        self._works_here = first is not None and first.is_inline
        """The only replica works in this thread."""
        self._poll_all_at = 0.0
        self._without_room: Stopwatch | None = None
        self._facts: ReplicaFacts | None = None
        self._is_serving, self._stamp = False, None
        self._finished: list[FinishedRow] = []
        self._given_up_at_first, self._newly_given_up = given_up, list[GivenUp]()
        self._failure: NpuRunnerError | None = None
        """Raised after all earlier results were returned."""
        rows.drop(row.index for row in given_up)
        self._num_done = 0

    def _place(self, number: int, make: MakeReplica) -> ReplicaState:
        return ReplicaState(number, make, self._woken.put, self._handle_event)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        if len(self.states) == 1:
            self.states[0].close()  # in the thread that it has worked in
            return
        with ThreadPoolExecutor(len(self.states)) as threads:
            for closing in [threads.submit(state.close) for state in self.states]:
                closing.result()

    def load(self) -> ReplicaFacts:
        """Start all replicas and wait until each is ready, dead for good, or without room. They prepare rows meanwhile.

        Raises ConfigError where a setting is wrong or two of them would answer otherwise, ReplicaDeadError where none
        is left.
        """
        self.start()
        while not self.is_loaded:
            self.poll(0.2)
        return self.facts

    @property
    def facts(self) -> ReplicaFacts:
        """What replicas have in common, once one is loaded."""
        assert self._facts is not None, "no replica is left, and none was reported dead"
        return self._facts

    def start(self) -> None:
        """As `load`, which does not wait: `poll` goes on with it."""
        for state in self.states:
            state.start()
        self._balancer.assign_rows()

    @property
    def is_loaded(self) -> bool:
        places = self._places()
        is_any = any(state.facts is not None for state in places)
        return is_any and all(state.facts is not None or state.waits_for is not None for state in places)

    def wake(self) -> None:
        """Have `poll` return, or look again for rows to assign. From any thread; not for a replica of this thread."""
        self._woken.put(None)

    def abort_before(self, first: int) -> None:
        """Rows before `first` are aborted: they are recalled from replicas, begun or not. `poll` still gives those that
        finish before that."""
        self._rows.drop_before(first)
        for state in self.states:
            state.is_reserved = state.lone is not None or (state.is_reserved and self._rows.has_suspects)
            if state.replica is not None and state.held:
                state.recall(len(state.held), include_started=True)

    def serve(self, stamp: Any) -> None:
        """From here on rows are answered. `stamp` go to every replica, to later ones as well."""
        self._is_serving, self._stamp = True, stamp
        self._newly_given_up += self._given_up_at_first
        for state in self.states:
            if state.replica is not None and state.facts is not None:
                state.replica.serve(stamp)

    @property
    def is_over(self) -> bool:
        return self._num_done == self._rows.num_rows

    def poll(self, timeout_seconds: float) -> tuple[list[FinishedRow], list[GivenUp]]:
        """Rows that are done since the last call, and rows that are given up; waits for some at most so long.

        Raises ReplicaDeadError when no replica is left, and what a replica raises for all of them.
        """
        if self._failure is not None:
            raise self._failure
        self._balancer.assign_rows()
        try:
            for state in self._states_to_poll(0.0 if self._newly_given_up else timeout_seconds):
                try:
                    if state.replica is not None:
                        for event in state.replica.poll(timeout_seconds if self._works_here else 0.0):
                            self._handle_event(state, event)
                except ReplicaDeadError as error:
                    self._retire(state, error)
                except NpuRunnerError as error:
                    if state.facts is not None or not (state.num_deaths or self._is_serving):
                        raise
                    # Others could be loaded: they go on, and another try may go well.
                    self._retire(state, ReplicaDeadError(f"{state.name} could not be loaded: {error}", rows=()))
            for state in self._places():
                if state.replica is None:
                    state.restart()
        except NpuRunnerError as failure:
            if not self._finished and not self._newly_given_up:
                raise
            self._failure = failure
        finished, self._finished = self._finished, []
        given_up, self._newly_given_up = self._newly_given_up, []
        self._num_done += len(finished) + len(given_up)
        return finished, given_up

    # -- what replicas say -----------------------------------------------------------------------------------------

    def _check_devices(self) -> None:
        """Have devices come, or are there none any more?"""
        places = self._places()
        for make in self._scale_up(len(places)):
            state = self._place(len(self.states), make)
            self._owner.notify(f"{state.name} is added: there are devices for it")
            self.states.append(state)
            state.start()
        if not places or not all(state.waits_for for state in places):
            self._without_room = None
            return
        self._without_room = self._without_room or Stopwatch()
        if self._without_room.exceeds(ROOM_SECONDS):
            raise ReplicaDeadError(f"no replica is left: {places[0].name} and all others wait for "
                                   f"{places[0].waits_for}, and nobody had it free for {ROOM_SECONDS:g} s")

    def _states_to_poll(self, timeout_seconds: float) -> Iterable[ReplicaState]:
        """Those that have something to say; all of them, once in a while: one that is stopped says nothing."""
        if self._works_here:
            return self.states
        if time.monotonic() >= self._poll_all_at:
            self._poll_all_at = time.monotonic() + _POLL_ALL_SECONDS
            self._check_devices()
            return self.states
        woken: set[ReplicaState | None] = set()
        with contextlib.suppress(queue.Empty):
            woken.add(self._woken.get(timeout=timeout_seconds))
            while True:
                woken.add(self._woken.get_nowait())
        return [state for state in woken if state is not None] if woken else self.states

    def _handle_event(self, state: ReplicaState, event: Event) -> None:
        if isinstance(event, Finished):
            for row in event.rows:
                state.held.remove(row.number)
                state.started.discard(row.number)
            self._finished += event.rows
            state.num_finished += len(event.rows)
            state.returned_none = False  # what its workers prepared then may wait now
            self._free(state)
        elif isinstance(event, Started):
            state.started.update(event.indices)
        elif isinstance(event, Returned):
            state.is_recalling, state.returned_none = False, not event.indices
            state.held.difference_update(event.indices)
            state.started.difference_update(event.indices)
            self._rows.requeue(event.indices)
            self._free(state)
        elif isinstance(event, Progressed):
            state.latest = event.stats
        elif isinstance(event, Opened):
            self._owner.notify(event)
        elif isinstance(event, Loading):
            self._report(state, event)
        elif isinstance(event, Ready):
            self._record_ready(state, event.facts)

    def _report(self, state: ReplicaState, event: Loading) -> None:
        """Of the first replica that is there; the others do the same."""
        if not self._is_serving and state is next(each for each in self.states if each.replica and not each.waits_for):
            self._owner.notify(event)

    def _free(self, state: ReplicaState) -> None:
        """It may take others again, if the suspect that it had alone is gone."""
        if state.lone is not None and state.lone not in state.held:
            state.lone, state.is_reserved = None, self._rows.has_suspects

    def _record_ready(self, state: ReplicaState, facts: ReplicaFacts) -> None:
        if self._facts is None:
            self._facts = facts
        _refuse_another(state.name, self._facts, facts)
        state.facts = facts
        if self._is_serving:
            assert state.replica is not None, f"{state.name} is dead"
            state.replica.serve(self._stamp)

    # -- deaths ----------------------------------------------------------------------------------------------------

    def _retire(self, state: ReplicaState, error: ReplicaDeadError) -> None:
        assert state.replica is not None, f"{state.name} died twice"
        under_way = set(state.started if error.rows is None else state.held.intersection(error.rows))
        if not state.replica.can_restart or (state.replica.is_inline and not error.request_ids):
            raise error  # where no row is the cause, the next engine of this process would die as well
        held = state.retire()
        is_last = not self._places()
        held -= self._record_death(under_way, error, is_last=is_last)
        self._rows.requeue(held)
        limit = "" if math.isinf(self._max_restarts) else f" of {self._max_restarts}"
        restarts = f"started again ({state.num_deaths}{limit})"
        what = restarts if state.num_deaths <= self._max_restarts else "not started again (max_replica_restarts)"
        self._owner.notify(f"{error}; {len(held)} rows that it had go to other replicas, {len(under_way)} of them were "
                           f"under way; {what}")
        if is_last:
            raise ReplicaDeadError(f"no replica is left; the last one: {error}") from error

    def _record_death(self, under_way: set[int], error: ReplicaDeadError, *, is_last: bool) -> set[int]:
        """Note whom the death may be the fault of. Returns the row that is given up for it, if one is."""
        suspects = self._rows.count_death(under_way)
        if len(under_way) == 1:
            (row,) = under_way
            self._rows.isolate_on_return(row)
            given_up = self._owner.record_death(row, error)
            if given_up is not None:
                self._newly_given_up.append(given_up)
                return {row}
        elif suspects or is_last:  # who may have ended a job is suspected in the next run
            self._owner.isolate(sorted(under_way) if is_last else suspects)
        return set()

    def _places(self) -> list[ReplicaState]:
        """Those with a replica, or to which one will come again."""
        return [state for state in self.states if state.replica is not None or state.num_deaths <= self._max_restarts]


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
