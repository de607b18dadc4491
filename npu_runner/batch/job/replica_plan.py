"""Plans the replicas of a job: this process, replicas in processes of their own, or actors of a Ray cluster.

Ray is imported here and nowhere before, and only for a job that asks for it. Knows nothing of the output.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from npu_runner.batch.files.fingerprint import num_digest_threads
from npu_runner.batch.files.input_file import STANDARD_STREAM
from npu_runner.batch.files.row_book import CarriedRows, RowFile, SharedFile
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.row_server import CheckpointSide, RowServer, ServerPlan, num_rows_ahead, server_plan
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.serving.options import AUTO
from npu_runner.serving.replicas.placement import Placement, place
from npu_runner.serving.replicas.process_replica import ProcessReplica
from npu_runner.serving.replicas.replica_state import MakeReplica, ReplicaState

_REMEDY = "leave --shared-input out, and rows travel with their bytes"


@dataclass(frozen=True, kw_only=True)
class ReplicaPlan:
    """`replicas`: each makes one; `workers_each`: preprocessing workers of each of them, on average."""

    replicas: list[MakeReplica]
    workers_each: float
    max_restarts: int = 0
    rows_carry_data: bool = False
    """They see neither the driver's descriptor of the input nor the input by its path."""
    scale_up: Callable[[int], Sequence[MakeReplica]] = lambda num_places: ()
    """An argument of Fleet."""
    notice: str | None = None
    """A line for the user before the first row."""


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
        yield _actors(config, options, CarriedRows(source.file_name) if shared is None else shared, open_model,
                      resources)


def _on_this_host(config: RunnerConfig, options: BatchOptions, source: RowFile,
                  open_model: Callable[[RunnerConfig], CheckpointSide]) -> ReplicaPlan:
    requested = options.replicas.data_parallel_size
    if requested == 1:
        plan = server_plan(config, options, source, open_model)
        return ReplicaPlan(replicas=[functools.partial(RowServer, plan)], workers_each=plan.limits.num_workers)
    placements = place(config.platform, None if requested == AUTO else int(requested),
                       config.parallel.tensor_parallel_size)
    plans = [
        server_plan(config.replace(platform=placement.platform), options, source, open_model,
                    options.workers.num_workers(placement.num_cores))
        for placement in placements
    ]

    def make(number: int, plan: ServerPlan, placement: Placement) -> ProcessReplica:
        name = f"replica {number}"
        return ProcessReplica(name, functools.partial(RowServer, plan, name), placement,
                              num_rows_ahead=num_rows_ahead(plan), inherited=plan.inherited)

    return ReplicaPlan(
        replicas=[functools.partial(make, number, plan, placement)
                  for number, (plan, placement) in enumerate(zip(plans, placements, strict=True))],
        workers_each=sum(plan.limits.num_workers for plan in plans) / len(plans),
        max_restarts=options.replicas.max_replica_restarts)


def num_present(states: Sequence[ReplicaState]) -> int:
    """Replicas that hold devices: those that are dead, or wait for devices, hold none."""
    return sum(state.replica is not None and state.waits_for is None for state in states)


def _actors(config: RunnerConfig, options: BatchOptions, source: CarriedRows | SharedFile,
            open_model: Callable[[RunnerConfig], CheckpointSide], resources: Mapping[str, float]) -> ReplicaPlan:
    from npu_runner.serving.replicas.ray_cluster import demand, resources_now
    from npu_runner.serving.replicas.ray_replica import RayReplica

    needed = demand(resources, config.platform, options.replicas.data_parallel_size,
                    config.parallel.tensor_parallel_size)
    plan = server_plan(config.replace(platform=needed.platform), options, source, open_model,
                       options.workers.num_workers(needed.num_cores))
    plan = replace(plan, digest_threads=num_digest_threads(needed.num_cores))
    numbers = itertools.count()

    def make(count: int) -> list[MakeReplica]:
        names = [f"replica {number}" for number in itertools.islice(numbers, max(0, count))]
        return [functools.partial(RayReplica, name, RemotePlan(server=plan, name=name), needed,
                                  num_rows_ahead=num_rows_ahead(plan)) for name in names]

    num_places_before = needed.num_places(resources)

    def scale_up(num_places: int) -> list[MakeReplica]:
        """Replicas for hosts that have joined. A place whose replica has died too often is filled again only by devices
        that have come since."""
        nonlocal num_places_before
        before, num_places_before = num_places_before, needed.num_places(resources_now())
        return make(min(num_places_before - before, num_places_before - num_places))

    missing = (needed.most or 0) - num_places_before
    return ReplicaPlan(
        replicas=make(num_places_before), workers_each=plan.limits.num_workers, scale_up=scale_up,
        max_restarts=options.replicas.max_replica_restarts, rows_carry_data=isinstance(source, CarriedRows),
        notice=f"the cluster has {needed.resource} {resources[needed.resource]:g}: {missing} of {needed.most} replicas "
               f"come when there is {needed.wanted} more for each" if missing > 0 else None)


def _shared_input(options: BatchOptions, source: RowFile) -> SharedFile | None:
    if not options.shared_input:
        return None
    if options.input == STANDARD_STREAM:
        raise ConfigError("shared_input: standard input has no path that another host could see; leave it out")
    if source.is_unpacked:
        raise ConfigError(f"shared_input: {options.input} is compressed, and other hosts read rows where they lie; "
                          "unpack it, or leave shared_input out, and rows travel with their bytes")
    return SharedFile(str(Path(options.input).resolve()), os.fstat(source.descriptor).st_size)


@dataclass(frozen=True, kw_only=True)
class RemotePlan:
    """A plan without descriptors."""

    server: ServerPlan
    name: str

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
        if isinstance(source := self.server.source, SharedFile):
            # Another file of the same size is known by the checksums of its rows.
            try:
                with open(source.path, "rb") as file:
                    num_bytes = os.fstat(file.fileno()).st_size
            except OSError as error:
                raise ConfigError(f"{host}: input {source.path} cannot be read ({error.strerror}); {_REMEDY}"
                                  ) from error
            if num_bytes < source.num_bytes:
                raise ConfigError(f"{host}: input {source.path} has {num_bytes} bytes there and {source.num_bytes} "
                                  f"here; {_REMEDY}")
        return RowServer(self.server, self.name)
