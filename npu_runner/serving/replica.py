"""The contract of a replica: raw rows in, finished output bytes out, in any order.

A replica owns engine, ranks and preprocessing workers. The driver owns input, output, manifest and progress. A replica
may be this process, another one of this host, or an actor on another host. So everything that goes in or out is
picklable and holds no file descriptor. Knows nothing of what is in a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from npu_runner.request.outputs import EngineStats

INDEX, LINE, START, NUM_BYTES = range(4)


class RawRow(NamedTuple):
    """One row, a task to prepare. `number`: its index among the rows to serve, from 0; `line`: in the input, from 1.

    `start`, `num_bytes`: where it lies in the input. `checksum`: of its bytes, as the first reading found them. `data`:
    these bytes where they travel with it, else None.
    """

    number: int
    line: int
    start: int
    num_bytes: int
    checksum: bytes
    data: bytes | None = None

    @property
    def is_worth_a_worker(self) -> bool:
        """It is read there."""
        return True


# R rows
@dataclass(frozen=True, kw_only=True)
class RowRun:
    """Neighbouring rows on their way to a replica, in columns: a million of them cost no million objects.

    table_R4: uint64; index, line, start and num_bytes of each. checksums: concatenated, all of one length. data: the
    rows' bytes, concatenated. None: the replica reads (start, num_bytes) in its input.
    """

    table_R4: np.ndarray
    checksums: bytes
    data: bytes | None = None

    def __len__(self) -> int:
        return len(self.table_R4)

    @property
    def indices(self) -> list[int]:
        found: list[int] = self.table_R4[:, INDEX].tolist()
        return found

    def rows(self) -> Iterator[RawRow]:
        position, width = 0, len(self.checksums) // max(1, len(self))
        for number, (index, line, start, num_bytes) in enumerate(self.table_R4.tolist()):
            checksum = self.checksums[number * width : (number + 1) * width]
            data = None if self.data is None else self.data[position : position + num_bytes]
            position += num_bytes
            yield RawRow(index, line, start, num_bytes, checksum, data)


class FinishedRow(NamedTuple):
    """A row's bytes for the output. `number`: its index; `outcome`: what the job counts it as, handed on unread."""

    number: int
    outcome: Any
    data: bytes


@dataclass(frozen=True, kw_only=True)
class ReplicaFacts:
    """What a replica is, once it can serve. Those of one job have to agree in `version`, `settings` and `weights`."""

    version: str
    """Of the package."""
    settings: Mapping[str, Any]
    """Everything beside the checkpoint and the row that shapes an answer, JSON-ready."""
    ledger: str
    """Where the device's memory went, in lines."""
    max_rows: int
    """Rows that it has use for at a time: served, waiting and being prepared."""
    weights: Mapping[str, str] | None = None
    """Hashes of the weights that it loaded, a line per file. None: it relies on the driver, which reads the same
    folder."""
    start_seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the start of its engine went, by phase."""


@dataclass(frozen=True, kw_only=True)
class ReplicaStats:
    """Counters since its start, and gauges of the moment."""

    engine: EngineStats = field(default_factory=EngineStats)
    wait_seconds: float = 0.0
    """Time in which the model had nothing to do but wait for preprocessing."""
    num_workers_replaced: int = 0


@dataclass(frozen=True)
class Opened:
    """The checkpoint is read but for its weights. `settings`: those of ReplicaFacts that are known by then."""

    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Loading:
    """What the engine does before it is ready, as people read it: `loading weights: 1.20 GiB of 5.60 GiB`."""

    phase: str


@dataclass(frozen=True)
class Ready:
    """The model is loaded; rows are served once `begin` was called."""

    facts: ReplicaFacts


@dataclass(frozen=True)
class Started:
    """These rows are given to the engine now. What it does with them may be its end."""

    indices: Sequence[int]


@dataclass(frozen=True)
class Finished:
    """Rows that are done, each once."""

    rows: Sequence[FinishedRow]


@dataclass(frozen=True)
class Returned:
    """The answer to `recall`: rows that are not finished unless they are submitted again, the last first; or none."""

    indices: Sequence[int]


@dataclass(frozen=True)
class Progressed:
    """Figures, now and then."""

    stats: ReplicaStats


Event = Opened | Loading | Ready | Started | Finished | Returned | Progressed


class Replica(ABC):
    """One model on devices of its own. Made in the driver's process; used by one thread, closed in any state.

    In order: `start`, then `poll` until Ready comes, `begin`, `poll` for ever, `close`. `submit` and `recall` may come
    at any time after `start`; what was submitted before `begin` is prepared meanwhile.
    """

    name: str
    """As people read it: `replica 3`, with host and devices where there are several."""
    can_restart: bool
    """Whether another one may take its place when it has died."""
    is_inline = False
    """It works in its caller's thread, in `poll`, and never calls `wake`."""
    num_rows_ahead: int
    """Rows that it can prepare before it is ready. May grow once it is there, wherever that is."""
    waits_for: str | None = None
    """What is not free for it, as people read it: it is not there, and the driver does not wait for it."""

    @abstractmethod
    def start(self, wake: Callable[[], None], notify: Callable[[Event], None]) -> None:
        """Start to load, elsewhere or in the first `poll`. `wake` is called, from any thread, when `poll` has something
        new. A replica in the caller's thread calls `notify` instead, in `poll`, with Opened and Loading, which cannot
        wait until `poll` returns. An error of `notify` ends the load."""

    @abstractmethod
    def serve(self, stamp: Any) -> None:
        """From here on rows are answered. `stamp`: what all answers of the job have in common, picklable."""

    @abstractmethod
    def submit(self, run: Any) -> None:
        """Hand over rows, as the driver's `make_run` has made them. Returns at once. One that is dead takes them too,
        and says so in `poll`."""

    @abstractmethod
    def recall(self, num_rows: int, *, include_started: bool = False) -> None:
        """Request up to `num_rows` rows back that the engine does not have; with `include_started` those of the engine
        as well, whose work is lost. One Returned answers each call."""

    @abstractmethod
    def poll(self, timeout_seconds: float) -> list[Event]:
        """What has happened since the last call; waits for something at most so long. One in this process works here.

        Raises ReplicaDeadError if it is dead, after all its earlier events. Raises ConfigError or JobError if no other
        replica could do better (a wrong setting, a changed input).
        """

    @abstractmethod
    def close(self) -> None:
        """End it and all that belongs to it, whatever it does; returns when that is gone. May be called twice."""

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
