"""Who answers a job's rows: this process, replicas in processes of their own, or actors of a Ray cluster.

Ray is imported here and nowhere before, and only for a job that asks for it. Knows nothing of the output.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from npu_runner.batch.files.input_file import STANDARD_STREAM
from npu_runner.batch.files.row_book import CarriedRows, RowFile, SharedFile
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.row_server import CheckpointSide, RowServer, ServerPlan, num_rows_ahead, server_plan
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.serving.options import AUTO, num_cpus
from npu_runner.serving.replica import Replica
from npu_runner.serving.replicas.placement import Placement, place
from npu_runner.serving.replicas.process_replica import ProcessReplica
from npu_runner.serving.replicas.replica_state import MakeReplica, ReplicaState

_MAX_DIGEST_THREADS = 4
_REMEDY = "leave --shared-input out, and rows travel with their bytes"


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """`replicas`: each makes one; `workers_each`: preprocessing workers of each of them, on average."""

    replicas: list[MakeReplica]
    workers_each: float
    max_restarts: int = 0
    rows_carry_data: bool = False
    """They do not see the driver's descriptor of the input, nor the input by its path."""
    scale_up: Callable[[int], Sequence[MakeReplica]] = lambda num_places: ()
    """Fleet's."""
    notice: str | None = None
    """What the user should know of them before the first row."""


@contextlib.contextmanager
def planned_replicas(config: RunnerConfig, options: BatchOptions, source: RowFile,
                     open_model: Callable[[RunnerConfig], CheckpointSide]) -> Iterator[ReplicaPlan]:
    """No replica is started yet. Raises ConfigError where the devices do not suffice, or no cluster answers.

    With Ray this process is a driver of the cluster within.
    """
    if options.ray is None:
        yield _on_this_host(config, options, source, open_model)
        return
    shared = _shared_input(options, source)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        from npu_runner.serving.replicas.ray_cluster import cluster
    except ImportError as error:
        raise ConfigError(f"ray: Ray is not installed here ({error}); pip install 'ray[data]>=2.40'") from error
    with cluster(options.ray) as resources:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray sets its own, and would end the job in the midst of a row
                signal.signal(number, handler)
        yield _actors(config, options, source, open_model, resources, shared)


def _on_this_host(config: RunnerConfig, options: BatchOptions, source: RowFile,
                  open_model: Callable[[RunnerConfig], CheckpointSide]) -> ReplicaPlan:
    """Nothing is started yet. Raises ConfigError where the devices do not suffice."""
    if options.replicas.data_parallel_size == 1:
        plan = local_plan(config, options, source, open_model)
        return ReplicaPlan(replicas=[functools.partial(RowServer, plan)], workers_each=plan.limits.num_workers)
    asked = options.replicas.data_parallel_size
    placements = place(config.platform, None if asked == AUTO else int(asked), config.parallel.tensor_parallel_size)
    counts = [options.workers.num_workers(placement.num_cores) for placement in placements]
    plans = [
        local_plan(config.replace(platform=placement.platform), options, source, open_model, num_workers=count)
        for placement, count in zip(placements, counts, strict=True)
    ]
    replicas: list[MakeReplica] = [
        functools.partial(_make_process, f"replica {number}", plan, placement)
        for number, (plan, placement) in enumerate(zip(plans, placements, strict=True))
    ]
    return ReplicaPlan(
        replicas=replicas, workers_each=sum(counts) / len(counts), max_restarts=options.replicas.max_replica_restarts)


def local_plan(config: RunnerConfig, options: BatchOptions, source: RowFile,
               open_model: Callable[[RunnerConfig], CheckpointSide], num_workers: int | None = None) -> ServerPlan:
    """For a server of this host, which reads rows through the driver's descriptor. `num_workers`: None for one that has
    all cores."""
    count = options.workers.num_workers(num_cpus()) if num_workers is None else num_workers
    return server_plan(config, options=options, source=source, num_workers=count, open_model=open_model,
                       inherited=(source.descriptor,))


def _make_process(name: str, plan: ServerPlan, placement: Placement) -> Replica:
    make = functools.partial(RowServer, plan, name)
    return ProcessReplica(name, make, placement, num_rows_ahead=num_rows_ahead(plan), inherited=plan.inherited)


def num_present(states: Sequence[ReplicaState]) -> int:
    """Replicas that hold devices: those that are dead, or wait for devices, hold none."""
    return sum(state.replica is not None and state.waits_for is None for state in states)


def _actors(config: RunnerConfig, options: BatchOptions, source: RowFile,
            open_model: Callable[[RunnerConfig], CheckpointSide], resources: Mapping[str, float],
            shared: SharedInput | None) -> ReplicaPlan:
    from npu_runner.serving.replicas.ray_cluster import demand, resources_now
    from npu_runner.serving.replicas.ray_replica import RayReplica

    rows = CarriedRows(source.file_name) if shared is None else SharedFile(shared.path)
    size = config.parallel.tensor_parallel_size
    taken = demand(resources, config.platform, options.replicas.data_parallel_size, size)
    count = options.workers.num_workers(taken.num_cores)
    plan = server_plan(
        config.replace(platform=taken.platform), options=options, source=rows, num_workers=count, open_model=open_model)
    plan = replace(plan, digest_threads=max(1, min(_MAX_DIGEST_THREADS, taken.num_cores // 2)))
    ahead = num_rows_ahead(plan)

    def make(number: int) -> MakeReplica:
        remote = RemotePlan(server=plan, name=f"replica {number}", shared_input=shared)
        return functools.partial(RayReplica, remote.name, remote, taken, num_rows_ahead=ahead)

    scale_up = ScaleUp(make, lambda: taken.num_places(resources_now()), taken.num_places(resources))
    missing = (taken.most or 0) - taken.num_places(resources)
    return ReplicaPlan(
        replicas=scale_up.first(), workers_each=count, max_restarts=options.replicas.max_replica_restarts,
        rows_carry_data=shared is None, scale_up=scale_up,
        notice=f"the cluster has {taken.resource} {resources[taken.resource]:g}: {missing} of {taken.most} replicas "
               f"come when there is {taken.wanted} more for each" if missing > 0 else None)


class ScaleUp:
    """Makes replicas where a cluster has room for more than there were: at the start, and when hosts have joined.

    A place whose replica has died too often is filled again only by devices that have come since.
    """

    def __init__(self, make: Callable[[int], MakeReplica], room: Callable[[], int], room_at_first: int):
        """`room`: replicas that there is room for in all."""
        self._make = make
        self._ask = room
        self._room = room_at_first
        self._num_made = 0

    def first(self) -> list[MakeReplica]:
        return self._made(self._room)

    def __call__(self, num_places: int) -> list[MakeReplica]:
        """`num_places`: those that have a replica, or wait for one."""
        before, self._room = self._room, self._ask()
        return self._made(min(self._room - before, self._room - num_places))

    def _made(self, count: int) -> list[MakeReplica]:
        found = [self._make(self._num_made + number) for number in range(count)]
        self._num_made += len(found)
        return found


def _shared_input(options: BatchOptions, source: RowFile) -> SharedInput | None:
    if not options.shared_input:
        return None
    if options.input == STANDARD_STREAM:
        raise ConfigError("shared_input: standard input has no path that another host could see; leave it out")
    if source.is_unpacked:
        raise ConfigError(f"shared_input: {options.input} is compressed, and other hosts read rows where they lie; "
                          "unpack it, or leave shared_input out, and rows travel with their bytes")
    return SharedInput(path=str(Path(options.input).resolve()), num_bytes=os.fstat(source.descriptor).st_size)


@dataclass(frozen=True, kw_only=True)
class SharedInput:
    """The input as the driver sees it."""

    path: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class RemotePlan:
    """A plan without descriptors. `shared_input`: what its source reads; None where rows bring their bytes."""

    server: ServerPlan
    name: str
    shared_input: SharedInput | None = None

    def __call__(self) -> RowServer:
        """Called on the other host."""
        host = f"{self.name} on host {socket.gethostname()}"
        if not Path(self.server.config.model).is_dir():
            raise ConfigError(f"{host}: there is no folder {self.server.config.model}; put the model where every host "
                              "sees it under the same path")
        media = self.server.media.allowed_dir
        if media is not None and not Path(media).is_dir():
            raise ConfigError(f"{host}: there is no folder {media} (allowed_media_dir); images are read where the "
                              "replica is")
        if self.shared_input is not None:
            _look_at(self.shared_input, host)
        return RowServer(self.server, self.name)


def _look_at(shared: SharedInput, host: str) -> None:
    """Another file of the same size is known by the checksums of its rows."""
    try:
        with open(shared.path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ConfigError(f"{host}: input {shared.path} cannot be read ({error.strerror}); {_REMEDY}") from error
    if found < shared.num_bytes:
        raise ConfigError(f"{host}: input {shared.path} has {found} bytes there and {shared.num_bytes} here; {_REMEDY}")
