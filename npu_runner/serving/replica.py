"""The contract of a replica: raw rows in, finished output bytes out, in any order.

A replica owns engine, ranks and preprocessing workers. The driver owns input, output, manifest and progress. A replica
is this process, another one of this host, or an actor on another host. So all messages are picklable and hold no file
descriptor. Knows nothing of a row's data.
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
    these bytes where they travel with it, else None. `change`: of a later attempt at the row, passed on unread.
    """

    number: int
    line: int
    start: int
    num_bytes: int
    checksum: bytes
    data: bytes | None = None
    change: Any = None

    @property
    def is_worth_a_worker(self) -> bool:  # a worker reads it
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
    """A row's bytes for the output. `number`: its index; `outcome`: the job's counts of it, passed on unread;
    `renderer`: PageFacts' of the PDFs in its answer's prompt; `may_be_copied`: an equal row has the same answer."""

    number: int
    outcome: Any
    data: bytes
    renderer: Mapping[str, str] | None = None
    may_be_copied: bool = False


@dataclass(frozen=True, kw_only=True)
class ReplicaFacts:
    """The facts of a ready replica. All replicas of a job must agree in `version` (the package's), `settings` and
    `weights`."""

    version: str
    settings: Mapping[str, Any]
    """All settings that shape an answer, JSON-ready."""
    ledger: str
    """The use of the device's memory, in lines."""
    max_rows: int
    """The most rows at a time: served, waiting and being prepared."""
    weights: Mapping[str, str] | None = None
    """Hashes of the loaded weights, one line per file. None: the driver reads the same folder."""
    start_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the engine's start, by phase."""


@dataclass(frozen=True, kw_only=True)
class ReplicaStats:
    """Counters since its start, and gauges of the moment."""

    engine: EngineStats = field(default_factory=EngineStats)
    wait_seconds: float = 0.0
    """Seconds in which the model waited for preprocessing."""
    num_workers_replaced: int = 0


@dataclass(frozen=True)
class Opened:
    """The checkpoint is read except for its weights. `settings`: the part of ReplicaFacts' that is known by then."""

    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Loading:
    """The phase of the engine's start, for people: `loading weights: 1.20 GiB of 5.60 GiB`."""

    phase: str


@dataclass(frozen=True)
class Ready:
    """The model is loaded; rows are served once `serve` was called."""

    facts: ReplicaFacts


@dataclass(frozen=True)
class Started:
    """The engine gets these rows now, and may die of them."""

    indices: Sequence[int]


@dataclass(frozen=True)
class Finished:
    """Rows that are done, each once."""

    rows: Sequence[FinishedRow]


@dataclass(frozen=True)
class Returned:
    """The answer to `recall`: rows that the replica drops, the last first; or none."""

    indices: Sequence[int]


@dataclass(frozen=True)
class Progressed:
    """The current figures."""

    stats: ReplicaStats


@dataclass(frozen=True)
class PageOutcome:
    """Page `ended` of a document has ended its worker or its time; None: a page of the document was rendered, which is
    an event after such an end alone."""

    document: str
    ended: int | None


Event = Opened | Loading | Ready | Started | Finished | Returned | Progressed | PageOutcome


class Replica(ABC):
    """One model on devices of its own. Made in the driver's process; used by one thread, closed in any state.

    In order: `start`, then `poll` until Ready comes, `serve`, `poll` for ever, `close`. `submit` and `recall` may come
    at any time after `start`; rows submitted before `serve` are prepared meanwhile.
    """

    name: str
    """Its name for people: `replica 3`, with host and devices if there are several."""
    can_restart: bool
    """Whether another one may replace it after its death."""
    is_inline = False
    """It works in its caller's thread, in `poll`, and never calls `wake`."""
    num_rows_ahead: int
    """Rows that it can prepare before it is ready. May grow once it is placed on a host."""
    waits_for: str | None = None
    """The busy resource that it waits for, in words. The driver does not wait for such a replica."""

    @abstractmethod
    def start(self, wake: Callable[[], None], notify: Callable[[Event], None]) -> None:
        """Start to load, elsewhere or in the first `poll`. `wake` is called, from any thread, when `poll` has something
        new. A replica in the caller's thread calls `notify` instead, in `poll`, with Opened and Loading, which cannot
        wait until `poll` returns. An error of `notify` ends the load."""

    @abstractmethod
    def serve(self, stamp: Any) -> None:
        """Answer rows from now on. `stamp`: the data that all answers of the job share, picklable."""

    @abstractmethod
    def submit(self, run: Any) -> None:
        """Hand over rows, made by the driver's `make_run`. Returns at once, also on a dead replica: `poll` reports
        it."""

    @abstractmethod
    def recall(self, num_rows: int, *, include_started: bool = False) -> None:
        """Request up to `num_rows` rows back that the engine does not have; with `include_started` those of the engine
        as well, whose work is lost. One Returned answers each call."""

    def hear(self, outcome: PageOutcome) -> None:  # noqa: B027 - for replicas that give documents up
        """Receive an outcome of another replica: documents are given up by the job."""

    @abstractmethod
    def poll(self, timeout_seconds: float) -> list[Event]:
        """The events since the last call; waits for some up to the timeout. An inline replica works here.

        Raises ReplicaDeadError if it is dead, after all its earlier events. Raises ConfigError or JobError if no other
        replica could do better (a wrong setting, a changed input).
        """

    @abstractmethod
    def close(self) -> None:
        """End it and all its processes, and wait until they are gone. May be called twice."""

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
