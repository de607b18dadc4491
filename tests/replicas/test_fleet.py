"""How rows are shared out: each done once, by load, suspects alone. Replicas here follow a script, in this process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from npu_runner.errors import ConfigError, JobError, ReplicaDeadError
from npu_runner.serving.blame import GivenUp
from npu_runner.serving.replica import (
    Event,
    Finished,
    FinishedRow,
    Loading,
    Opened,
    PageOutcome,
    Ready,
    Replica,
    ReplicaFacts,
    Returned,
    RowRun,
    Started,
)
from npu_runner.serving.replicas.fleet import Fleet
from npu_runner.serving.replicas.load_balancer import RowQueue
from tests.replicas.owners import Quiet


@dataclass
class Script:
    """What replicas do. `speeds`: rows a poll, for each place; `deaths`: chance to die in a poll."""

    speeds: Sequence[float] = (2, 2)
    deaths: float = 0.0
    poison: frozenset[int] = frozenset()
    max_rows: int = 24
    renderers: dict[int, dict[str, str]] = field(default_factory=dict)
    """Of the rows of a place."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    beside: list[set[int]] = field(default_factory=list)
    """What was begun together, at each death."""


class ScriptedReplica(Replica):
    can_restart = True

    def __init__(self, script: Script, place: int):
        self.name, self.num_rows_ahead = f"replica {place}", 8
        self._script = script
        self._speed = script.speeds[place]
        self._renderer = script.renderers.get(place)
        self._credit = 0.0
        self._waiting: list[int] = []
        self._started: list[int] = []
        self._events: list[Event] = []
        self._is_serving = False
        self.heard: list[PageOutcome] = []

    def hear(self, outcome: PageOutcome) -> None:
        self.heard.append(outcome)

    def start(self, wake: Callable[[], None], notify: Callable[[Event], None]) -> None:
        facts = ReplicaFacts(version="1", settings={"speed": 1}, ledger="", max_rows=self._script.max_rows)
        self._events.append(Ready(facts))

    def serve(self, stamp: Any) -> None:
        self._is_serving = True

    def submit(self, run: RowRun) -> None:
        self._waiting += run.indices

    def recall(self, num_rows: int, *, include_started: bool = False) -> None:
        kept = max(0, len(self._waiting) - num_rows)
        self._waiting, returned = self._waiting[:kept], self._waiting[kept:]
        self._events.append(Returned(returned))

    def poll(self, timeout_seconds: float) -> list[Event]:
        if self._is_serving and not self._events:
            self._work()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Nothing is held."""

    def _work(self) -> None:
        script = self._script
        if self._started and (script.poison.intersection(self._started) or script.rng.random() < script.deaths):
            script.beside.append(set(self._started))
            raise ReplicaDeadError(f"{self.name} died")
        room = 4 - len(self._started)
        begun, self._waiting = self._waiting[:room], self._waiting[room:]
        self._started += begun
        if begun:
            self._events.append(Started(begun))
        self._credit += self._speed
        done = [self._started.pop(0) for _ in range(min(int(self._credit), len(self._started) - len(begun)))]
        self._credit -= int(self._credit)
        if done:
            self._events.append(Finished([FinishedRow(row, None, b"%d" % row, self._renderer) for row in done]))


def run_of(indices: Sequence[int]) -> RowRun:
    table = np.zeros((len(indices), 4), dtype=np.uint64)
    table[:, 0] = indices
    return RowRun(table_R4=table, checksums=bytes(8 * len(indices)))


def fleet_of(
    script: Script, num_rows: int, *, verdicts: int = 2, queue: RowQueue | None = None,
    make_run: Callable[[Sequence[int]], RowRun] = run_of,
    check_renderer: Callable[[str, Mapping[str, str]], None] = lambda name, renderer: None, **options: Any
) -> Fleet:
    """`verdicts`: deaths alone after which a row is given up."""
    alone: Counter[int] = Counter()

    def record_death(row: int, error: ReplicaDeadError) -> GivenUp | None:
        alone[row] += 1
        is_enough = alone[row] >= verdicts
        return GivenUp(index=row, code="request_failed", message=str(error)) if is_enough else None

    owner = Quiet(record_death=record_death, make_run=make_run, check_renderer=check_renderer)
    replicas = [lambda place=place: ScriptedReplica(script, place) for place in range(len(script.speeds))]
    return Fleet(replicas, queue or RowQueue(num_rows), owner, **options)


def serve(fleet: Fleet, look: Callable[[], None] = lambda: None) -> tuple[list[int], list[int]]:
    """The rows that were finished, and those that were given up, as they came."""
    finished, given_up = [], []
    with fleet:
        fleet.load()
        fleet.serve(None)
        while not fleet.is_over:
            rows, verdicts = fleet.poll(0.0)
            finished += [row.number for row in rows]
            given_up += [verdict.index for verdict in verdicts]
            look()
    return finished, given_up


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_done_once_however_often_they_die(num_replicas: int, seed: int) -> None:
    rng = random.Random(seed)
    script = Script(speeds=[rng.choice([0.3, 1, 3]) for _ in range(num_replicas)], deaths=0.03, rng=rng)
    fleet = fleet_of(script, 300, verdicts=10**6, max_restarts=10**6)
    finished, given_up = serve(fleet)
    assert sorted(finished) == list(range(300))
    assert given_up == []
    assert sum(state.num_deaths for state in fleet.states) > 0


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_row_that_kills_is_given_up_only_when_it_was_alone_and_nobody_with_it(num_replicas: int) -> None:
    script = Script(speeds=[2] * num_replicas, poison=frozenset({7, 8, 90}))
    finished, given_up = serve(fleet_of(script, 120, max_restarts=100))
    assert sorted(given_up) == [7, 8, 90]
    assert sorted(finished + given_up) == list(range(120))
    for row in script.poison:
        deaths = [beside for beside in script.beside if row in beside]
        assert sum(len(beside) == 1 for beside in deaths) == 2
        together = [beside for beside in deaths if len(beside) > 1]
        assert len(together) <= 2, "after two deaths it runs alone"


@pytest.mark.parametrize("speeds", [(2, 0.05), (1, 1, 0.1), (3, 0)])
def test_no_replica_idles_while_another_has_ten_rows_waiting(speeds: Sequence[float]) -> None:
    script = Script(speeds=speeds, max_rows=64)
    fleet = fleet_of(script, 150)
    idle = []

    def look() -> None:
        waiting = [len(state.held) - len(state.started) for state in fleet.states]
        nobody_asks = not any(state.is_recalling for state in fleet.states)
        idle.append(nobody_asks and max(waiting) >= 10 and any(not state.held for state in fleet.states))
        script.speeds = speeds
        if all(len(state.held) <= len(state.started) for state in fleet.states):
            for state in fleet.states:  # what is begun stays where it is: let that end
                state.replica._speed = 4  # type: ignore[union-attr]

    finished, _ = serve(fleet, look)
    assert sorted(finished) == list(range(150))
    # A poll is needed to see that one has nothing left, and another one to ask.
    assert not any(all(idle[place : place + 3]) for place in range(len(idle)))
    assert max(state.num_finished for state in fleet.states) > 150 // len(speeds)


def test_what_came_before_a_failure_is_told_first() -> None:
    """Both are asked in one pass: the first has finished rows, the second one has what ends everything."""

    class Failing(ScriptedReplica):
        num_polls = 0

        def _work(self) -> None:
            self.num_polls += 1
            if self.num_polls > 3:
                raise JobError("its workers cannot start")

    script = Script()
    replicas = [lambda: ScriptedReplica(script, 0), lambda: Failing(script, 1)]
    told: list[int] = []
    with Fleet(replicas, RowQueue(100), Quiet(make_run=run_of)) as fleet:
        fleet.load()
        fleet.serve(None)

        def poll_on() -> None:
            while True:
                told.extend(row.number for row in fleet.poll(0.0)[0])

        with pytest.raises(JobError, match="its workers cannot start"):
            poll_on()
    assert told
    assert len(told) == fleet.states[0].num_finished


def test_neighbours_go_together() -> None:
    runs: list[Sequence[int]] = []

    def make_run(rows: Sequence[int]) -> RowRun:
        runs.append(rows)
        return run_of(rows)

    serve(fleet_of(Script(), 400, make_run=make_run))
    assert sum(len(run) for run in runs) >= 400
    assert all(list(run) == list(range(run[0], run[0] + len(run))) for run in runs[:10])
    assert max(map(len, runs)) > 4


def test_rows_behind_the_window_wait() -> None:
    queue = RowQueue(100)
    queue.allow(10)
    fleet = fleet_of(Script(), 100, queue=queue)
    seen = []

    def look() -> None:
        num_done = sum(state.num_finished for state in fleet.states)
        seen.append(max((max(state.held) for state in fleet.states if state.held), default=0))
        assert seen[-1] < num_done + 12
        queue.allow(num_done + 10)

    finished, _ = serve(fleet, look)
    assert sorted(finished) == list(range(100))
    assert max(seen) == 99


def test_replicas_that_would_answer_otherwise_are_refused() -> None:
    class Differs(ScriptedReplica):
        def start(self, wake: Callable[[], None], notify: Callable[[Event], None]) -> None:
            settings = {"max_model_len": self.name}
            self._events.append(Ready(ReplicaFacts(version="1", settings=settings, ledger="", max_rows=1)))

    replicas = [lambda place=place: Differs(Script(), place) for place in (0, 1)]
    fleet = Fleet(replicas, RowQueue(10), Quiet(make_run=run_of))
    with fleet, pytest.raises(ConfigError, match="max_model_len: 'replica 1' here, 'replica 0' there"):
        fleet.load()


class Speaking(ScriptedReplica):
    """Opens its checkpoint, loads it in two phases, and is ready then."""

    def start(self, wake: Callable[[], None], notify: Callable[[Event], None]) -> None:
        self._events += [Opened({"seed": self.name}), Loading(f"{self.name} reads"), Loading(f"{self.name} compiles")]
        super().start(wake, notify)


def test_one_replica_says_what_all_do_until_they_are_ready() -> None:
    heard: list[Any] = []
    owner = Quiet(make_run=run_of, notify=heard.append)
    fleet = Fleet([lambda place=place: Speaking(Script(), place) for place in (0, 1)], RowQueue(10), owner)
    with fleet:
        fleet.load()
        fleet.serve(None)
        said = [Loading("replica 0 reads"), Loading("replica 0 compiles")]
        assert heard == [Opened({"seed": "replica 0"}), *said, Opened({"seed": "replica 1"})]
        fleet._handle_event(fleet.states[0], Loading("replica 0 reads again"))  # in the place of one that died
        assert len(heard) == 4


def test_settings_that_are_refused_end_the_load() -> None:
    def check(opened: Any) -> None:
        raise ConfigError(f"seed: {opened.settings['seed']}")

    fleet = Fleet([lambda: Speaking(Script(), 0)], RowQueue(10), Quiet(make_run=run_of, notify=check))
    with fleet, pytest.raises(ConfigError, match="seed: replica 0"):
        fleet.load()
    assert fleet.states[0].facts is None


def test_with_nobody_left_it_says_so() -> None:
    script = Script(deaths=1.0)
    with pytest.raises(ReplicaDeadError, match="no replica is left"):
        serve(fleet_of(script, 50, max_restarts=2))
    assert len(script.beside) == 6, "each of two, and two more in its place"


def test_a_queue_gives_each_row_once_within_its_limit_and_suspects_by_themselves() -> None:
    queue = RowQueue(20)
    queue.allow(10)
    queue.isolate([4])
    queue.drop([6])
    assert list(queue.pop(50)) == [0, 1, 2, 3, 5, 7, 8, 9]
    assert (len(queue), list(queue.pop(1))) == (0, [])
    queue.requeue([2, 9, 1])
    assert queue.pop(2) == [1, 2]
    assert queue.count_death([9, 2]) == []
    assert queue.count_death([9]) == [9]
    queue.requeue([9])
    assert (queue.pop(5), queue.pop_suspect(), queue.pop_suspect(), queue.has_suspects) == ([9], 9, 4, False)
    queue.allow(100)
    assert list(queue.pop(100)) == list(range(10, 20))


def serve_all(fleet: Fleet, renderers: list[Any]) -> None:
    """Adds the renderer of each row that is done."""
    with fleet:
        fleet.load()
        fleet.serve(None)
        while not fleet.is_over:
            renderers += [row.renderer for row in fleet.poll(0.0)[0]]


def test_a_row_whose_renderer_is_refused_is_not_done() -> None:
    """The owner learns of it with the replica's name, before the row; rows of others that were done before stay."""
    seen = []

    def check(name: str, renderer: Mapping[str, str]) -> None:
        seen.append((name, dict(renderer)))
        if renderer == {"pdf_fonts": "b"}:
            raise ConfigError(f"{name} has other fonts")

    fleet = fleet_of(Script(renderers={0: {"pdf_fonts": "a"}, 1: {"pdf_fonts": "b"}}), 12, check_renderer=check)
    finished: list[Any] = []
    with pytest.raises(ConfigError, match="replica 1 has other fonts"):
        serve_all(fleet, finished)
    assert seen[-1] == ("replica 1", {"pdf_fonts": "b"})
    assert ("replica 0", {"pdf_fonts": "a"}) in seen
    assert finished
    assert {"pdf_fonts": "b"} not in finished


def test_outcomes_of_pages_reach_every_other_replica_also_a_later_one() -> None:
    fleet = fleet_of(Script(speeds=(2, 2, 2)), 4, max_restarts=1)
    outcomes = [PageOutcome("a.pdf", 1), PageOutcome("a.pdf", 2), PageOutcome("a.pdf", None)]
    with fleet:
        fleet.load()
        first, second, third = (cast(ScriptedReplica, state.replica) for state in fleet.states)
        first._events += outcomes[:2]
        fleet.poll(0.0)
        assert (first.heard, second.heard, third.heard) == ([], outcomes[:2], outcomes[:2])
        fleet._retire(fleet.states[2], ReplicaDeadError("it died"))
        second._events.append(outcomes[2])
        while fleet.states[2].replica is None:
            fleet.poll(0.0)
        assert first.heard == outcomes[2:]
        assert cast(ScriptedReplica, fleet.states[2].replica).heard == outcomes
