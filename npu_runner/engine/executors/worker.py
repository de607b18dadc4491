"""The process of one rank: waits for calls, runs them, answers. Knows nothing of scheduling or text.

Started as a `Child` with RANK FD..., so that a user's own main module is never imported again. It ends when told to, or
as soon as the engine's process is gone.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from npu_runner.config import RunnerConfig
from npu_runner.engine.executors.rank_channel import RING_SIZE, Payloads, PhaseBoard, Record, Wire
from npu_runner.errors import EngineDeadError, NpuRunnerError

if TYPE_CHECKING:  # torch comes with it, and is loaded once the rank has said that it starts
    from npu_runner.platforms.devices import Exchange
    from npu_runner.runner.base import StepHandle

# How a call ended: with its result; with an error of ours; with anything else; with the device out of order.
OK, REFUSED, FAILED, BROKEN = range(4)
STOP = 0
"""The number that is no call's: end."""
_ORPHAN_EXIT = 1
# The engine ends ranks that take too long. Its clock stands still while the job is suspended, torch's would not; and
# where torch polls it takes no longer times (2**31 ms).
_NO_TIMEOUT = timedelta(days=20)
_MOST_POLLING_SECONDS = 0.05
_POLL_SECONDS = 0.0002
"""Seconds between two polls of a rank that waits for a step or a call."""


@dataclass(frozen=True)
class Call:
    """A call of the engine to every rank."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class _Step:
    """A call whose step is under way."""

    number: int
    handle: StepHandle


class Rank:
    """One rank's end of everything it shares with the engine."""

    def __init__(self, number: int, wire: Wire, phases: PhaseBoard, calls: Payloads, replies: Payloads):
        self.number = number
        self._wire = wire
        self._phases = phases
        self._calls = calls
        self._replies = replies
        self._num_started = 0

    @classmethod
    def from_descriptors(cls, number: int, fds: list[int]) -> Rank:
        wire, phases, *rings = fds
        return cls(number, Wire(socket.socket(fileno=wire)), PhaseBoard(phases), Payloads(rings[:RING_SIZE]),
                   Payloads(rings[RING_SIZE:]))

    def phase(self, phase: str) -> None:
        """Say what this rank is doing."""
        self._phases.set(self.number, phase)

    def next_call(self) -> Call | None:
        """The next call, waited for; None when there will be none. One that was begun is passed over."""
        while True:
            record = self._wire.peek()
            self._wire.pop()
            if record.number == STOP:
                return None
            if record.number > self._num_started:
                self._num_started = record.number
                return Call(record.number, *pickle.loads(self._calls.read(record.number, record.length)))

    def has_call(self, timeout: float) -> bool:
        """Whether `next_call` would find one within `timeout` seconds."""
        return self._wire.has_record(timeout)

    def answer(self, number: int, status: int, value: Any) -> None:
        """Answer call `number`; calls are answered in order."""
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        self._replies.write(number, payload)
        self._wire.send(Record(number, len(payload), status))


def main(arguments: list[str]) -> None:
    number, *fds = (int(argument) for argument in arguments)
    # What is sent to a whole group of processes is for the engine, which lets the step under way end.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    rank = Rank.from_descriptors(number, fds)
    rank.phase("starting")
    try:
        serve(rank)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(_ORPHAN_EXIT)  # the engine is gone; collectives under way would keep a normal exit waiting


def serve(rank: Rank) -> None:
    """Start up with the first call's settings, then answer calls until one says stop."""
    server = _Server(rank)
    while True:
        if server.under_way and not server.has_next_call():
            server.run(server.under_way[0].number, server.collect)
            continue
        call = rank.next_call()
        if call is None:
            break
        server.run(call.number, functools.partial(server.start, call))
    os._exit(0)  # process groups and devices may block a normal exit once other ranks are gone


class _Server:
    """Runs one rank's calls. Steps are handed to the device as they come, and answered once they have run."""

    def __init__(self, rank: Rank):
        self._rank = rank
        self._runner: Any = None
        self.under_way: deque[_Step] = deque()

    def has_next_call(self) -> bool:
        """Waits until there is one, or the oldest step has run."""
        if len(self.under_way) == RING_SIZE:
            return False
        deadline = time.monotonic() + _MOST_POLLING_SECONDS
        while not self._rank.has_call(_POLL_SECONDS):
            # A call that has not come by then cannot be overlapped. A device that is stuck fails only when it is waited
            # for.
            if self.under_way[0].handle.is_done() or time.monotonic() > deadline:
                return False
        return True

    def start(self, call: Call) -> None:
        """Hand a step to the device; any other call is run and answered."""
        if call.method == "execute_model":
            (batch,) = call.arguments
            self._rank.phase(str(batch.describe()))
            self.under_way.append(_Step(call.number, self._runner.submit(batch)))
        elif call.method == "start":
            self._runner = _start(self._rank, *call.arguments)
            self._answer(call.number, self._runner.info())
        else:
            while self.under_way:  # given up by the engine, and still to be answered first
                self.run(self.under_way[0].number, self.collect)
            self._rank.phase(call.method)
            self._answer(call.number, getattr(self._runner, call.method)(*call.arguments))

    def collect(self) -> None:
        """Answer the oldest step."""
        from npu_runner.engine.executors.inline_executor import runner_counters

        step = self.under_way.popleft()
        output = self._runner.collect(step.handle)
        self._answer(step.number, (output, runner_counters(self._runner)))

    def run(self, number: int, work: Callable[[], None]) -> None:
        """Work on call `number`; what goes wrong is its answer."""
        try:
            work()
        except EngineDeadError as error:
            self._rank.answer(number, BROKEN, str(error))
        except NpuRunnerError as error:
            self._rank.answer(number, REFUSED, error)
        except Exception as error:  # noqa: BLE001
            # The one border where whatever goes wrong in a rank becomes a report to the engine, which ends the job.
            is_broken = self._runner is None or self._runner.platform.devices.is_failure(error)
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            self._rank.answer(number, BROKEN if is_broken else FAILED, text)

    def _answer(self, number: int, result: Any) -> None:
        self._rank.answer(number, OK, result if self._rank.number == 0 else None)
        if not self.under_way:
            self._rank.phase("waiting for work")


def exchange_through(store: Any, rank: int, size: int) -> Exchange:
    """Through the store, from host to host. The engine ends a rank that waits for a dead one."""
    rounds = itertools.count()

    def exchange(message: bytes) -> list[bytes]:
        number = next(rounds)
        keys = [f"npu_runner/exchange-{number}/rank-{each}" for each in range(size)]
        store.set(keys[rank], message)
        return [store.get(key) for key in keys]

    return exchange


def _start(rank: Rank, config: RunnerConfig, store_port: int, fallbacks: dict[str, str]) -> Any:
    rank.phase("importing")
    import torch.distributed as dist

    from npu_runner.layers.parallel import TensorParallel
    from npu_runner.platforms import pick_platform
    from npu_runner.runner.model_runner import ModelRunner
    from npu_runner.strategies import open_checkpoint

    size = config.parallel.tensor_parallel_size
    platform = pick_platform(config.platform)
    platform.devices.prepare_process(rank.number, size)
    rank.phase("joining the process group")
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=_NO_TIMEOUT)
    has_two = config.graphs.graph_mode in platform.communicators.modes_with_their_own
    options = platform.communicators.options(serves_graphs=not has_two, is_second=False)
    dist.init_process_group(platform.communicators.backend, store=store, rank=rank.number, world_size=size,
                            timeout=_NO_TIMEOUT, pg_options=options)
    graph_group = None
    if has_two:
        options = platform.communicators.options(serves_graphs=True, is_second=True)
        graph_group = dist.new_group(list(range(size)), timeout=_NO_TIMEOUT, pg_options=options)
    for group in filter(None, (dist.group.WORLD, graph_group)):
        platform.communicators.make(group, rank.number)
    custom_all_reduce = None
    if not config.parallel.disable_custom_all_reduce:
        custom_all_reduce = platform.communicators.custom_all_reduce(
            rank.number, size, exchange_through(store, rank.number, size))
    tp = TensorParallel(rank.number, size, dist.group.WORLD, graph_group, store,
                        has_whole_experts=config.parallel.enable_expert_parallel, custom_all_reduce=custom_all_reduce)
    rank.phase("reading config and tokenizer")
    return ModelRunner(open_checkpoint(config), tp, progress=rank.phase, fallbacks=fallbacks)
