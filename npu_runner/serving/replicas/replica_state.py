"""The place of one replica in a job: its present replica, its rows, its deaths. Knows nothing of other replicas."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from npu_runner.request.outputs import EngineStats
from npu_runner.serving.replica import Event, Replica, ReplicaFacts, ReplicaStats

MakeReplica = Callable[[], Replica]
_GAUGES = ("num_running", "num_waiting", "kv_blocks_total", "kv_blocks_used", "vision_cache_bytes",
           "vision_cache_host_bytes")


class ReplicaState:
    """`held`: its unfinished rows; `started`: the part of them that its engine has."""

    def __init__(self, number: int, make: MakeReplica, wake: Callable[[ReplicaState], None],
                 notify: Callable[[ReplicaState, Event], None]):
        """`wake`, `notify`: as for replicas, with the state."""
        self.number = number
        self.facts: ReplicaFacts | None = None
        self.held: set[int] = set()
        self.started: set[int] = set()
        self.lone: int | None = None
        """The suspect that it runs alone."""
        self.is_reserved = False
        """It gets suspects only, once it has no other row."""
        self.is_recalling = False
        """Rows were requested back, and no answer has arrived."""
        self.returned_none = False
        """It returned no row at the last request."""
        self.num_finished = self.num_deaths = 0
        self._make = make
        self._wake, self._notify = wake, notify
        self._retirement: threading.Thread | None = None
        self._earlier = ReplicaStats()
        self.latest = ReplicaStats()
        """The last figures of the present replica."""
        self.replica: Replica | None = make()
        self.name = self.replica.name

    def start(self) -> None:
        assert self.replica is not None, f"{self.name} is dead"
        self.replica.start(lambda: self._wake(self), lambda event: self._notify(self, event))

    @property
    def waits_for(self) -> str | None:
        """The resource that its replica waits for; None: the replica is placed, dead or about to start."""
        return None if self.replica is None or self.facts is not None else self.replica.waits_for

    @property
    def max_rows(self) -> int:
        if self.replica is None:
            return 0
        if self.facts is not None:
            return self.facts.max_rows
        # Until a restarted replica is ready, others get its rows.
        return 0 if self.num_deaths else self.replica.num_rows_ahead

    def submit(self, rows: Sequence[int], run: Any) -> None:
        """Assign `rows`; `run`: the same, as the replica accepts them."""
        assert self.replica is not None, f"{self.name} is dead"
        self.held.update(rows)
        self.returned_none = False
        self.replica.submit(run)

    def recall(self, num_rows: int, *, include_started: bool = False) -> None:
        assert self.replica is not None, f"{self.name} is dead"
        self.is_recalling = True
        self.replica.recall(num_rows, include_started=include_started)

    def retire(self) -> set[int]:
        """The replica is dead: close it, in a thread unless it is inline. Returns its rows."""
        held, self.held, self.started = self.held, set(), set()
        dead, self.replica, self.facts, self.lone = self.replica, None, None, None
        self.is_reserved = self.is_recalling = self.returned_none = False
        self.num_deaths += 1
        self._earlier, self.latest = added([self._earlier, _without_gauges(self.latest)]), ReplicaStats()
        assert dead is not None, f"{self.name} died twice"
        if dead.is_inline:
            dead.close()
        else:
            self._retirement = threading.Thread(target=dead.close, name=f"{self.name}: closing", daemon=True)
            self._retirement.start()
        return held

    def restart(self) -> bool:
        """Start another replica once the last one is closed; False: not yet."""
        if self._retirement is not None and self._retirement.is_alive():
            return False
        self.replica = self._make()
        self.start()
        return True

    def close(self) -> None:
        if self._retirement is not None:
            self._retirement.join()
        if self.replica is not None:
            self.replica.close()

    def stats(self) -> ReplicaStats:
        """Counters of all replicas of this place, gauges of the present one."""
        return added([self._earlier, self.latest])


def added(stats: Sequence[ReplicaStats]) -> ReplicaStats:
    """Sums of every figure."""
    names = [field.name for field in dataclasses.fields(EngineStats)]
    engine = EngineStats(**{name: sum(getattr(one.engine, name) for one in stats) for name in names})
    return ReplicaStats(
        engine=engine, wait_seconds=sum(one.wait_seconds for one in stats),
        num_workers_replaced=sum(one.num_workers_replaced for one in stats))


def _without_gauges(stats: ReplicaStats) -> ReplicaStats:
    return dataclasses.replace(stats, engine=dataclasses.replace(stats.engine, **dict.fromkeys(_GAUGES, 0)))
