"""Gathers a job's replicas: those of this host, or actors of a Ray cluster. Knows nothing of the output.

Ray is imported here and nowhere before, and only for a job that asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from npu_runner.batch.files.elsewhere import CarriedRows, SharedFile
from npu_runner.batch.files.input_file import STANDARD_STREAM, RowFile
from npu_runner.batch.job.crew import Crew, recruit
from npu_runner.batch.job.model_side import ModelSide
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.remote_server import RemotePlan, SharedInput
from npu_runner.batch.job.row_server import num_rows_ahead, server_plan
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.replicas.slot import MakeReplica

_MAX_DIGEST_THREADS = 4


@contextlib.contextmanager
def gathered(
    config: RunnerConfig, options: BatchOptions, source: RowFile, open_model: Callable[[RunnerConfig], ModelSide]
) -> Iterator[Crew]:
    """No replica is started yet. Raises ConfigError where the devices do not suffice, or no cluster answers.

    With Ray this process is a driver of the cluster within.
    """
    if options.ray is None:
        yield recruit(config, options, source, open_model)
        return
    shared = _shared_input(options, source)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        from npu_runner.replicas.ray_cluster import cluster
    except ImportError as error:
        raise ConfigError(f"ray: Ray is not installed here ({error}); pip install 'npu-runner[ray]'") from error
    with cluster(options.ray) as resources:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray sets its own, and would end the job in the midst of a row
                signal.signal(number, handler)
        yield _actors(config, options, source, open_model, resources, shared)


def _actors(
    config: RunnerConfig, options: BatchOptions, source: RowFile, open_model: Callable[[RunnerConfig], ModelSide],
    resources: Mapping[str, float], shared: SharedInput | None,
) -> Crew:  # fmt: skip
    from npu_runner.replicas.ray_cluster import demand, resources_now
    from npu_runner.replicas.ray_replica import RayReplica

    rows = CarriedRows(source.file_name) if shared is None else SharedFile(shared.path)
    taken = demand(resources, config.platform, options.data_parallel_size, config.tensor_parallel_size)
    count = options.num_workers(taken.num_cores)
    plan = server_plan(
        config.replace(platform=taken.platform), options=options, source=rows, num_workers=count, open_model=open_model
    )
    plan = replace(plan, digest_threads=max(1, min(_MAX_DIGEST_THREADS, taken.num_cores // 2)))
    ahead = num_rows_ahead(plan)

    def make(number: int) -> MakeReplica:
        remote = RemotePlan(server=plan, name=f"replica {number}", shared_input=shared)
        return functools.partial(RayReplica, remote.name, remote, taken, num_rows_ahead=ahead)

    recruiter = Recruiter(make, lambda: taken.num_places(resources_now()), taken.num_places(resources))
    missing = (taken.most or 0) - taken.num_places(resources)
    return Crew(
        replicas=recruiter.first(), workers_each=count, max_restarts=options.max_replica_restarts,
        rows_carry_data=shared is None, recruit=recruiter,
        notice=f"the cluster has {taken.resource} {resources[taken.resource]:g}: {missing} of {taken.most} replicas "
               f"come when there is {taken.wanted} more for each" if missing > 0 else None,
    )  # fmt: skip


class Recruiter:
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
    return SharedInput(path=str(Path(options.input).resolve()), num_bytes=os.fstat(source.descriptor).st_size)
