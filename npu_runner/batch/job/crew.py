"""Who answers a job's rows: this process, or replicas in processes of their own. Knows nothing of the output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from npu_runner.batch.files.input_file import RowFile
from npu_runner.batch.job.model_side import ModelSide
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.row_server import RowServer, ServerPlan, num_rows_ahead, server_plan
from npu_runner.batch.job.summary import ReplicaReport
from npu_runner.config import RunnerConfig
from npu_runner.replicas.base import Replica
from npu_runner.replicas.options import AUTO
from npu_runner.replicas.placement import Placement, place
from npu_runner.replicas.process import ProcessReplica
from npu_runner.replicas.slot import MakeReplica, Slot
from npu_runner.workers.options import num_cpus


@dataclass(frozen=True, kw_only=True)
class Crew:
    """`replicas`: each makes one; `workers_each`: preprocessing workers of each of them, on average."""

    replicas: list[MakeReplica]
    workers_each: float
    max_restarts: int = 0
    rows_carry_data: bool = False
    """They do not see the driver's descriptor of the input, nor the input by its path."""
    recruit: Callable[[int], Sequence[MakeReplica]] | None = None
    """As in FleetHooks."""
    notice: str | None = None
    """What the user should know of them before the first row."""


def recruit(
    config: RunnerConfig, options: BatchOptions, source: RowFile, open_model: Callable[[RunnerConfig], ModelSide]
) -> Crew:
    """Nothing is started yet. Raises ConfigError where the devices do not suffice."""
    make_plan = functools.partial(
        server_plan, options=options, source=source, open_model=open_model, inherited=(source.descriptor,)
    )
    if options.data_parallel_size == 1:
        num_workers = options.num_workers(num_cpus())
        plan = make_plan(config, num_workers=num_workers)
        return Crew(replicas=[functools.partial(RowServer, plan)], workers_each=num_workers)
    asked = options.data_parallel_size
    placements = place(config.platform, None if asked == AUTO else int(asked), config.tensor_parallel_size)
    counts = [options.num_workers(placement.num_cores) for placement in placements]
    plans = [
        make_plan(config.replace(platform=placement.platform), num_workers=count)
        for placement, count in zip(placements, counts, strict=True)
    ]
    replicas: list[MakeReplica] = [
        functools.partial(_make_process, f"replica {number}", plan, placement)
        for number, (plan, placement) in enumerate(zip(plans, placements, strict=True))
    ]
    return Crew(
        replicas=replicas, workers_each=sum(counts) / len(counts), max_restarts=options.max_replica_restarts
    )


def _make_process(name: str, plan: ServerPlan, placement: Placement) -> Replica:
    make = functools.partial(RowServer, plan, name)
    return ProcessReplica(name, make, placement, num_rows_ahead=num_rows_ahead(plan), inherited=plan.inherited)


def report_of(slot: Slot) -> ReplicaReport:
    return ReplicaReport(name=slot.name, num_rows=slot.num_finished, num_deaths=slot.num_deaths, stats=slot.stats())
