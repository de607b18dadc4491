"""Replicas and the rows they share: each row is done once, whichever replica dies. Knows nothing of a row's data.

The driver's thread uses it, and polls. A row is with one replica at a time, and done when its bytes have arrived. If
its replica dies, it goes to another.
"""

from __future__ import annotations

import contextlib
import math
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    PageOutcome,
    Progressed,
    Ready,
    ReplicaFacts,
    Returned,
    Started,
)
from npu_runner.serving.replicas.load_balancer import LoadBalancer, RowQueue
from npu_runner.serving.replicas.replica_state import MakeReplica, ReplicaState

_POLL_ALL_SECONDS = 1.0
# If all places wait this long for devices, the job ends; finished rows stay.
ROOM_SECONDS = 600.0


class Owner(ABC):
    """Owns the rows of a fleet, which calls it in the thread that polls."""

    @abstractmethod
    def make_run(self, indices: Sequence[int]) -> Any:
        """The rows of these indices, for a replica."""

    @abstractmethod
    def notify(self, news: Opened | Loading | str) -> None:
        """Receive a line for the user, the known settings of a replica that is not ready, or the phase of the first
        one's start. An error raised here ends the fleet."""

    @abstractmethod
    def isolate(self, indices: Sequence[int]) -> None:
        """These rows were under way when replicas died. They run alone from now on, also in later runs."""

    def check_renderer(self, name: str, renderer: Mapping[str, str]) -> None:  # noqa: B027 - most have no record
        """The replica of this name has answered a row with pages of PDFs. An error raised here ends the fleet, and the
        row is not done."""

    @abstractmethod
    def record_death(self, index: int, error: ReplicaDeadError) -> GivenUp | None:
        """This row alone was under way in a death. Returns the verdict if it is given up."""


class Fleet:
    """Replicas and the rows they share. Its exit ends all replicas.

    `max_restarts`: restarts after a death, per place. `given_up`: rows that are given up from the start. `scale_up` is
    called regularly with the number of places, and gives further replicas if there are new devices.
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
        self._is_inline = first is not None and first.is_inline
        self._poll_all_at = 0.0
        self._without_room: Stopwatch | None = None
        self._facts: ReplicaFacts | None = None
        self._is_serving, self._stamp = False, None
        self._finished: list[FinishedRow] = []
        self._given_up_at_first, self._newly_given_up = given_up, list[GivenUp]()
        self._outcomes: list[PageOutcome] = []
        """Outcomes of all replicas, for one that starts later. Each has cost a worker process, or follows one."""
        self._failure: NpuRunnerError | None = None  # raised after all earlier results were returned
        rows.drop(row.index for row in given_up)
        self._num_done = 0

    def _place(self, number: int, make: MakeReplica) -> ReplicaState:
        return ReplicaState(number, make, self._woken.put, self._handle_event)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        if len(self.states) == 1:
            self.states[0].close()  # in its own thread
            return
        with ThreadPoolExecutor(len(self.states)) as threads:
            for closing in [threads.submit(state.close) for state in self.states]:
                closing.result()

    def load(self) -> ReplicaFacts:
        """Start all replicas and wait until each is ready, dead for good, or without devices. They prepare rows
        meanwhile.

        Raises ConfigError for a wrong setting or for replicas that differ, ReplicaDeadError if none is left.
        """
        self.start()
        while not self.is_loaded:
            self.poll(0.2)
        return self.facts

    @property
    def facts(self) -> ReplicaFacts:
        """The facts of the first replica that was loaded."""
        assert self._facts is not None, "no replica is left, and none was reported dead"
        return self._facts

    def start(self) -> None:
        """Start all replicas; `poll` continues their start."""
        for state in self.states:
            state.start()
        self._balancer.assign_rows()

    @property
    def is_loaded(self) -> bool:
        places = self._places()
        is_any = any(state.facts is not None for state in places)
        return is_any and all(state.facts is not None or state.waits_for is not None for state in places)

    def wake(self) -> None:
        """Have `poll` return, or assign new rows. Any thread may call it; not for an inline replica."""
        self._woken.put(None)

    def abort_before(self, first: int) -> None:
        """Abort rows before `first`: they are recalled from replicas and engines. `poll` still gives rows that finish
        before that."""
        self._rows.drop_before(first)
        for state in self.states:
            state.is_reserved = state.lone is not None or (state.is_reserved and self._rows.has_suspects)
            if state.replica is not None and state.held:
                state.recall(len(state.held), include_started=True)

    def serve(self, stamp: Any) -> None:
        """Answer rows from now on. Every replica gets `stamp`, also later ones."""
        self._is_serving, self._stamp = True, stamp
        self._newly_given_up += self._given_up_at_first
        for state in self.states:
            if state.replica is not None and state.facts is not None:
                state.replica.serve(stamp)

    def release(self, rows: Iterable[int]) -> None:
        """Have rows served that the queue holds."""
        self._rows.requeue(rows)

    def count_done(self, num_rows: int) -> None:
        """This number of rows that the queue holds is done without a replica."""
        self._num_done += num_rows

    @property
    def is_over(self) -> bool:
        return self._num_done == self._rows.num_rows

    def poll(self, timeout_seconds: float) -> tuple[list[FinishedRow], list[GivenUp]]:
        """Rows that finished or were given up since the last call; waits for some up to the timeout.

        Raises ReplicaDeadError when no replica is left, and an error of a replica that concerns all of them.
        """
        if self._failure is not None:
            raise self._failure
        self._balancer.assign_rows()
        try:
            for state in self._states_to_poll(0.0 if self._newly_given_up else timeout_seconds):
                try:
                    if state.replica is not None:
                        for event in state.replica.poll(timeout_seconds if self._is_inline else 0.0):
                            self._handle_event(state, event)
                except ReplicaDeadError as error:
                    self._retire(state, error)
                except NpuRunnerError as error:
                    if state.facts is not None or not (state.num_deaths or self._is_serving):
                        raise
                    # Others could be loaded: they go on, and a restart may succeed.
                    self._retire(state, ReplicaDeadError(f"{state.name} could not be loaded: {error}", rows=()))
            for state in self._places():
                if state.replica is None and state.restart():
                    self._tell_outcomes(state)
        except NpuRunnerError as failure:
            if not self._finished and not self._newly_given_up:
                raise
            self._failure = failure
        finished, self._finished = self._finished, []
        given_up, self._newly_given_up = self._newly_given_up, []
        self._num_done += len(finished) + len(given_up)
        return finished, given_up

    # -- events of replicas ----------------------------------------------------------------------------------------

    def _check_devices(self) -> None:
        """Add replicas for new devices. Raises ReplicaDeadError if all places wait for devices for too long."""
        places = self._places()
        for make in self._scale_up(len(places)):
            state = self._place(len(self.states), make)
            self._owner.notify(f"{state.name} is added: there are devices for it")
            self.states.append(state)
            state.start()
            self._tell_outcomes(state)
        if not places or not all(state.waits_for for state in places):
            self._without_room = None
            return
        self._without_room = self._without_room or Stopwatch()
        if self._without_room.exceeds(ROOM_SECONDS):
            raise ReplicaDeadError(f"no replica is left: {places[0].name} and all others wait for "
                                   f"{places[0].waits_for}, and none became free within {ROOM_SECONDS:g} s")

    def _states_to_poll(self, timeout_seconds: float) -> Iterable[ReplicaState]:
        """The states with new events; regularly all of them, because a stopped replica sends no event."""
        if self._is_inline:
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
                if row.renderer is not None:
                    self._owner.check_renderer(state.name, row.renderer)
            for row in event.rows:
                state.held.remove(row.number)
                state.started.discard(row.number)
            self._finished += event.rows
            state.num_finished += len(event.rows)
            state.returned_none = False  # rows that its workers prepared then may wait now
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
        elif isinstance(event, PageOutcome):
            self._outcomes.append(event)
            for other in self.states:
                if other is not state and other.replica is not None:
                    other.replica.hear(event)
        elif isinstance(event, Opened):
            self._owner.notify(event)
        elif isinstance(event, Loading):
            self._report(state, event)
        elif isinstance(event, Ready):
            self._record_ready(state, event.facts)

    def _tell_outcomes(self, state: ReplicaState) -> None:
        assert state.replica is not None, f"{state.name} was started"
        for outcome in self._outcomes:
            state.replica.hear(outcome)

    def _report(self, state: ReplicaState, event: Loading) -> None:
        """Report the start of the first placed replica alone; the others do the same."""
        if not self._is_serving and state is next(each for each in self.states if each.replica and not each.waits_for):
            self._owner.notify(event)

    def _free(self, state: ReplicaState) -> None:
        """End its reservation if its lone suspect is gone."""
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
            raise error  # no row is the cause: the next engine of this process would die as well
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
        """Record the rows that may have caused the death. Returns the row that is given up for it, if any."""
        suspects = self._rows.count_death(under_way)
        if len(under_way) == 1:
            (row,) = under_way
            self._rows.isolate_on_return(row)
            given_up = self._owner.record_death(row, error)
            if given_up is not None:
                self._newly_given_up.append(given_up)
                return {row}
        elif suspects or is_last:  # the next run suspects rows that may have ended this one
            self._owner.isolate(sorted(under_way) if is_last else suspects)
        return set()

    def _places(self) -> list[ReplicaState]:
        """The states with a replica, or with a restart to come."""
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
                              f"chance: {changes}. Set what differs, or use devices that are alike")
