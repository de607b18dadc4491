"""Several ranks, each a process of its own; calls reach them through shared memory. Knows nothing of scheduling.

No rank runs in the engine's process: a collective that hangs because another rank died would hang the engine with it.
Here the engine waits on sockets, sees a death at once and a stopped process soon, and ends the others itself.

Calls are numbered. A reply says which call it answers, so that one to a rolled-back call is never taken for another's.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from npu_runner.config import RunnerConfig
from npu_runner.core.batch import ScheduledBatch
from npu_runner.engine.executors.executor import CLOSED, Executor, Progress
from npu_runner.engine.executors.rank_channel import RING_SIZE, Payloads, PhaseBoard, Record, Wire
from npu_runner.engine.executors.worker import BROKEN, OK, REFUSED, STOP
from npu_runner.errors import EngineDeadError, RequestError, StepError, blame_for
from npu_runner.grammars.matchers import Rule
from npu_runner.processes.child import Child, describe_exit
from npu_runner.processes.stopwatch import POLL_SECONDS, Stopwatch
from npu_runner.request.outputs import RunnerCounters
from npu_runner.runner.base import ModelRunnerOutput

# A process may be stopped for a moment by hand; this long it holds up all the others.
STOPPED_SECONDS = 30.0
START_TIMEOUT_SECONDS = 1800.0
_GRACE_SECONDS = 2.0
_END_SECONDS = 10.0
"""Seconds for the system to take memory and devices from ranks that have been killed."""


@dataclass(frozen=True)
class _Call:
    """Sent to every rank: `number` from 1, `length` of its payload in bytes."""

    number: int
    length: int
    timeout: float
    what: str


class SharedMemoryExecutor(Executor):
    def __init__(self, config: RunnerConfig, model_path: Path, progress: Progress, fallbacks: Mapping[str, str]):
        self._config = config
        self._progress, self._phase = progress, ""
        self._counters = RunnerCounters()
        self._phases = PhaseBoard.create()
        self._calls = Payloads.create()
        self._store = open_store()
        self._last = _Call(0, 0, START_TIMEOUT_SECONDS, "start")
        self._num_announced = 0
        """The last call that was certainly sent to every rank."""
        self._oldest = 1
        """The number of the call that `collect` waits for."""
        start = RankStart(self._phases, self._calls)
        self._ranks: list[RankProcess] = []
        self._finalizer = weakref.finalize(self, end_ranks, self._ranks, start)
        try:
            for number in range(config.parallel.tensor_parallel_size):
                self._ranks.append(RankProcess(number, start))
            opened = config.replace(model=str(model_path), revision=None)  # the folder that was looked at
            self._submit("start", opened, self._store.port, dict(fallbacks), timeout=START_TIMEOUT_SECONDS)
            self.info = self._collect()
        except BaseException:
            self.close()
            raise

    def submit(self, batch: ScheduledBatch) -> None:
        assert self._last.number - self._oldest + 1 < RING_SIZE, f"{RING_SIZE} steps are under way already"
        self._submit("execute_model", batch, timeout=self._config.parallel.step_timeout_seconds)

    def collect(self) -> ModelRunnerOutput:
        output, self._counters = self._collect()
        assert isinstance(output, ModelRunnerOutput), f"rank 0 answered with {type(output).__name__}"
        return output

    def rollback(self) -> None:
        # Ranks run what they were told of to its end; the place in the ring is free again once all have answered.
        self._oldest = self._last.number + 1

    def build_rules(self, rules: Sequence[Rule], patience: float) -> dict[int, RequestError | None]:
        self._submit("build_rules", rules, patience, timeout=self._config.parallel.step_timeout_seconds)
        answers: dict[int, RequestError | None] = self._collect()
        return answers

    def counters(self) -> RunnerCounters:
        return self._counters  # they came with the last step's result: asking again would cost every rank a call

    def process_ids(self) -> list[int]:
        """The process ids of the ranks, in rank order."""
        return [rank.child.pid for rank in self._ranks]

    def close(self) -> None:
        if self._finalizer.alive and all(rank.child.is_running for rank in self._ranks):
            self._ask_to_end()
        self._finalizer()

    # -- calls -----------------------------------------------------------------------------------------------------

    def _submit(self, method: str, *arguments: Any, timeout: float) -> None:
        if not self._finalizer.alive:
            raise EngineDeadError(CLOSED)
        self._announce()  # again, if that was interrupted: ranks must not wait in a collective for one left out
        number = self._last.number + 1
        self._wait_for_answers(number - RING_SIZE)
        payload = pickle.dumps((method, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        self._calls.write(number, payload)
        self._last = _Call(number, len(payload), timeout, method)
        self._announce()

    def _announce(self) -> None:
        """Tell every rank of the last call. One that has heard of it before pays no attention."""
        if self._num_announced == self._last.number:
            return
        for rank in self._ranks:
            try:
                rank.wire.send(Record(self._last.number, self._last.length))
            except OSError:
                self._fail_of_death(rank)
        self._num_announced = self._last.number

    def _collect(self) -> Any:
        number = self._oldest
        assert number <= self._last.number, "nothing is under way"
        self._announce()
        self._wait_for_answers(number)
        result = self._ranks[0].result(number)
        self._oldest = number + 1
        return result

    def _wait_for_answers(self, number: int) -> None:
        """Until every rank has answered call `number` and those before it."""
        watch = Stopwatch()
        while late := [rank for rank in self._ranks if rank.num_answered < number]:
            by_descriptor = {rank.wire.fileno(): rank for rank in late}
            answered = wait(list(by_descriptor), timeout=POLL_SECONDS)
            for descriptor in answered:
                self._receive(by_descriptor[descriptor])  # type: ignore[index]
            if not answered:
                self._check_alive(late, watch)
                self._report_start()

    def _report_start(self) -> None:
        """Report each new phase of rank 0 until all ranks are ready."""
        phase = self._ranks[0].phase()
        if self._last.what == "start" and phase != self._phase:
            self._phase = phase
            self._progress(phase)

    def _receive(self, rank: RankProcess) -> None:
        try:
            reply = rank.wire.peek()
            if reply.status != OK:
                self._report_failure(rank, reply)
            rank.book(reply)
            rank.wire.pop()
        except (EOFError, OSError):
            self._fail_of_death(rank)

    # -- failures --------------------------------------------------------------------------------------------------

    def _report_failure(self, rank: RankProcess, reply: Record) -> NoReturn:
        # When a rank dies the others fail in their collectives; the dead one is the cause.
        dead = self._wait_for_a_death(rank)
        if dead is not None:
            self._fail_of_death(dead)
        value = rank.read(reply)
        if reply.status == REFUSED and self._last.what == "start":
            self.close_now()
            raise value
        others = "".join(_why_not_with_it(other, reply.number) for other in self._ranks if other is not rank)
        self._fail(f"rank {rank.number} failed while {rank.phase()}{others}: {value}",
                   blame=_blame(reply.status, value))

    def _check_alive(self, late: list[RankProcess], watch: Stopwatch) -> None:
        """All ranks: the others may still wait, in a collective, for one that has answered."""
        for rank in self._ranks:
            if rank.child.is_ending:
                self._fail_of_death(rank)
            if rank.child.is_stopped_for(STOPPED_SECONDS):
                self._fail(f"rank {rank.number} has been stopped for {STOPPED_SECONDS:g} s (state T, as "
                           f"SIGSTOP leaves a process) while {rank.phase()}")
        if watch.exceeds(self._last.timeout):
            names = "; ".join(f"rank {rank.number}, {rank.phase()}" for rank in late)
            self._fail(f"{self._last.what} did not finish within {self._last.timeout:.0f} s ({names}); raise "
                       "step_timeout_seconds if it is only slow")

    def _wait_for_a_death(self, but: RankProcess) -> RankProcess | None:
        deadline = time.monotonic() + _GRACE_SECONDS
        others = [rank for rank in self._ranks if rank is not but]
        while time.monotonic() < deadline:
            for rank in others:
                if rank.child.is_ending:
                    return rank
            time.sleep(0.02)
        return None

    def _fail_of_death(self, dead: RankProcess) -> NoReturn:
        """A rank that loses the memory of a dead peer is aborted by its libraries, perhaps before the system is done
        with that peer. So a rank that ends otherwise is the cause."""
        ending = [dead, *(rank for rank in self._ranks if rank is not dead and rank.child.is_ending)]
        deadline = time.monotonic() + _END_SECONDS
        statuses = [rank.child.exit_status(max(0.01, deadline - time.monotonic())) for rank in ending]
        causes = [rank for rank, status in zip(ending, statuses, strict=True) if status not in (None, -signal.SIGABRT)]
        self._fail((causes or ending)[0].exit_reason())

    def _fail(self, reason: str, *, blame: str | None = None) -> NoReturn:
        self.close_now()
        raise EngineDeadError(reason, blame=blame)

    def close_now(self) -> None:
        """End every rank without asking."""
        self._finalizer()

    def _ask_to_end(self) -> None:
        for rank in self._ranks:
            try:
                rank.wire.send(Record(STOP, 0))
            except OSError:
                continue  # it died meanwhile; the finalizer reaps it
        deadline = time.monotonic() + _GRACE_SECONDS
        for rank in self._ranks:
            if rank.child.exit_status(max(0.01, deadline - time.monotonic())) is None:
                return  # busy or stuck; the finalizer kills it


def _why_not_with_it(rank: RankProcess, number: int) -> str:
    """The reason why a rank does not join call `number`, for the message of the rank that waits; may be empty."""
    if rank.num_answered < number:
        return f"; rank {rank.number} has not answered ({rank.phase()})"
    if rank.child.is_stopped:
        return f"; rank {rank.number} is stopped (state T, as SIGSTOP leaves a process)"
    return ""


def _blame(status: int, value: Any) -> str | None:
    if status == BROKEN:
        return None
    return blame_for(value if status == REFUSED else StepError(value))


class RankStart:
    """The descriptors that all ranks inherit: phases and calls."""

    def __init__(self, phases: PhaseBoard, calls: Payloads):
        self.phases = phases
        self.calls = calls

    def close(self) -> None:
        self.phases.close()
        self.calls.close()


class RankProcess:
    """`num_answered`: the last call that this rank has answered; they are answered in order."""

    def __init__(self, number: int, start: RankStart):
        self.number = number
        self.num_answered = 0
        self._phases = start.phases
        self._replies = Payloads.create()
        self._lengths: dict[int, int] = {}
        start.phases.set(number, "being started")
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), start.phases.fd, *start.calls.fds, *self._replies.fds]
        # Ranks share the host's cores: a thread that spins while it waits would keep another rank from working.
        variables = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
        self.child = Child(f"npu rank {number}", "npu_runner.engine.executors.worker", number, *fds, descriptors=fds,
                           variables=variables)
        theirs.close()
        self.wire = Wire(ours)

    def phase(self) -> str:
        return self._phases.get(self.number)

    def book(self, reply: Record) -> None:
        """Note a reply; the same one may be noted again."""
        self._lengths[reply.number] = reply.length
        self._lengths.pop(reply.number - 2 * len(self._replies.fds), None)
        self.num_answered = max(self.num_answered, reply.number)

    def result(self, number: int) -> Any:
        """The reply of this rank to that call."""
        return self.read(Record(number, self._lengths[number]))

    def read(self, reply: Record) -> Any:
        return pickle.loads(self._replies.read(reply.number, reply.length))

    def exit_reason(self) -> str:
        status = self.child.exit_status(_GRACE_SECONDS)
        if status is None:
            return f"rank {self.number} closed its connection while {self.phase()}"
        return f"rank {self.number} died ({describe_exit(status)}) while {self.phase()}"

    def close(self) -> None:
        self.child.kill()
        self.wire.close()
        self._replies.close()


def end_ranks(ranks: list[RankProcess], start: RankStart) -> None:
    """Kill what still runs and close everything; also runs when the executor is forgotten or Python exits."""
    for rank in ranks:
        rank.child.signal_end()
    for rank in ranks:
        rank.close()
    start.close()


def open_store() -> Any:
    """The store behind the process group, on a port that the system picks and that only this host can reach."""
    import torch.distributed as dist

    listener = socket.socket()
    # Given only an address, the store would listen on every interface, and it does not authenticate clients.
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
