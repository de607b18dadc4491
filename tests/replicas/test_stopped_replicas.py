"""A replica that reads nothing of what it is sent, because it is stopped, holds up nobody. Processes are real.

It is sent many times what a socket takes. What stands where a model would be answers rows with their size.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from npu_runner.errors import ReplicaDeadError
from npu_runner.serving.replica import (
    Event,
    Finished,
    FinishedRow,
    Ready,
    Replica,
    ReplicaFacts,
    Returned,
    RowRun,
    Started,
)
from npu_runner.serving.replicas import process_replica
from npu_runner.serving.replicas.fleet import Fleet
from npu_runner.serving.replicas.load_balancer import RowQueue
from npu_runner.serving.replicas.placement import Placement
from npu_runner.serving.replicas.process_replica import ProcessReplica
from tests.replicas.jobs import wait_until_gone
from tests.replicas.owners import Quiet

# Who waits for a stopped process waits for ever.
pytestmark = pytest.mark.timeout(120)
NAME = "replica 0"
MAX_ROWS, NUM_ROWS = 12, 60
ROW_BYTES = 1 << 20


class SizesOfRows(Replica):
    """Answers each row at once, in their order."""

    can_restart, num_rows_ahead = False, 0

    def __init__(self, name: str):
        self.name = name
        facts = ReplicaFacts(version="1", settings={}, ledger="", max_rows=MAX_ROWS)
        self._events: list[Event] = [Ready(facts)]

    def start(self, wake: Callable[[], None], notify: Callable[[Event], None]) -> None:
        """There is nothing to load."""

    def serve(self, stamp: Any) -> None:
        """Rows come after it."""

    def submit(self, run: RowRun) -> None:
        rows = [FinishedRow(row.number, None, b"%d" % len(row.data or b"")) for row in run.rows()]
        self._events += [Started(run.indices), Finished(rows)]

    def recall(self, num_rows: int, *, include_started: bool = False) -> None:
        self._events.append(Returned([]))

    def poll(self, timeout_seconds: float) -> list[Event]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Nothing is held."""


def made(name: str = NAME) -> ProcessReplica:
    make = functools.partial(SizesOfRows, name)
    return ProcessReplica(name, make, Placement(platform="cpu", description="cpu"), num_rows_ahead=0)


def size_of(row: int) -> int:
    return ROW_BYTES + row


def run_of(rows: Sequence[int]) -> RowRun:
    table_R4 = np.zeros((len(rows), 4), dtype=np.uint64)
    table_R4[:, 0], table_R4[:, 3] = rows, [size_of(row) for row in rows]
    return RowRun(table_R4=table_R4, checksums=b"", data=b"".join(bytes(size_of(row)) for row in rows))


def stop(replica: Replica | None) -> int:
    assert isinstance(replica, ProcessReplica)
    os.kill(replica.process_id, signal.SIGSTOP)
    while not replica._started.is_stopped:
        time.sleep(0.002)
    return replica.process_id


def heard(replica: Replica, is_enough: Callable[[list[Event]], bool]) -> list[Event]:
    events: list[Event] = []
    while not is_enough(events):
        events += replica.poll(0.1)
    return events


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessReplica]:
    """It is ready; nobody minds that it is stopped, and all rows are on their way to it, one by one."""
    monkeypatch.setattr(process_replica, "STOPPED_SECONDS", math.inf)
    with made() as replica:
        replica.start(lambda: None, lambda event: None)
        heard(replica, bool)
        stop(replica)
        replica.serve(None)
        for row in range(MAX_ROWS):
            replica.submit(run_of([row]))
        replica.recall(1)
        yield replica


def test_others_go_on_and_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    answers: list[FinishedRow] = []
    monkeypatch.setattr(process_replica, "STOPPED_SECONDS", math.inf)
    owner = Quiet(make_run=run_of, notify=said.append)
    replicas = [functools.partial(made, f"replica {number}") for number in range(2)]
    queue = RowQueue(NUM_ROWS)
    queue.allow(0)
    with Fleet(replicas, queue, owner) as fleet:
        fleet.load()
        victim = stop(fleet.states[0].replica)
        queue.allow(NUM_ROWS)
        fleet.serve(None)
        while len(answers) < NUM_ROWS - MAX_ROWS:
            answers += fleet.poll(0.1)[0]
        assert not said
        assert len(fleet.states[0].held) == MAX_ROWS, "these were sent to it"
        monkeypatch.setattr(process_replica, "STOPPED_SECONDS", 1.0)
        while not fleet.is_over:
            answers += fleet.poll(0.1)[0]
    assert f"replica 0 (cpu, process {victim}) died: it has been stopped for 1 seconds (SIGSTOP)" in said[0]
    assert sorted((row.number, int(row.data)) for row in answers) == [(row, size_of(row)) for row in range(NUM_ROWS)]
    wait_until_gone([victim])


def test_one_that_goes_on_has_missed_nothing(stopped: ProcessReplica) -> None:
    assert stopped.poll(0.0) == []
    os.kill(stopped.process_id, signal.SIGCONT)
    events = heard(stopped, lambda events: bool(events) and isinstance(events[-1], Returned))
    rows = [row for event in events if isinstance(event, Finished) for row in event.rows]
    assert [(row.number, int(row.data)) for row in rows] == [(row, size_of(row)) for row in range(MAX_ROWS)]


def test_a_death_amid_what_is_sent_is_named_as_any_other(stopped: ProcessReplica) -> None:
    os.kill(stopped.process_id, signal.SIGKILL)
    with pytest.raises(ReplicaDeadError, match="killed by SIGKILL"):
        heard(stopped, lambda events: False)
    stopped.submit(run_of([MAX_ROWS]))


def test_closing_it_leaves_neither_process_nor_thread(stopped: ProcessReplica) -> None:
    process_id = stopped.process_id
    assert any(thread.name.startswith(NAME) for thread in threading.enumerate())
    stopped.close()
    wait_until_gone([process_id])
    assert not any(thread.name.startswith(NAME) for thread in threading.enumerate())
