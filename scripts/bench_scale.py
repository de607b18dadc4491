"""What a job's driver costs a row, and so how many devices one driver feeds: replicas of this host that only echo.

Everything but the model is real: the input file and its index, the queue of rows, sockets, processes, the output file
with its fsyncs, the tally. A replica reads each row where it lies, as preprocessing would, and sends it back as answer.

    python scripts/bench_scale.py [--replicas 1 2 4 8 16] [--rows 200000] [--carry] [--ray] [--profile] [--pairs 5]

`--carry`: rows travel with their bytes, as to another host. `--ray`: replicas are actors of a Ray cluster that is made
for it on this host (without `--carry` they read the input, as with --shared-input). `--pairs`: each count so often
without and with the files that are replaced while a job runs (status, metrics), in turn,
and which share of the driver's time these took.

Prints a table, then one JSON line: rows/s from the first row handed out to the last one on disk, microseconds of the
driver's processor a row, and how much the driver's peak of memory grew while it served (numpy, the index and the code
are there before).
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import itertools
import json
import logging
import os
import pstats
import resource
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_common import commit, versions

import npu_runner
from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.destination import Writers
from npu_runner.batch.files.input_file import CarriedRows, InputFile, SharedFile
from npu_runner.batch.files.place import find_place
from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.files.suspects import Suspects
from npu_runner.batch.job.accounts import Accounts
from npu_runner.batch.job.delivery import Delivery
from npu_runner.batch.job.driver import Driver
from npu_runner.batch.job.live import Live
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.job.summary import JobRecord, Outcome, Tally
from npu_runner.batch.rows.input_row import RowSource
from npu_runner.serving.replica import (
    Begun,
    Event,
    Finished,
    FinishedRow,
    Progressed,
    Ready,
    Replica,
    ReplicaFacts,
    ReplicaStats,
    Returned,
    RowRun,
)
from npu_runner.serving.replicas.fleet import Fleet
from npu_runner.serving.replicas.load_balancer import RowQueue
from npu_runner.serving.replicas.placement import Placement
from npu_runner.serving.replicas.process_replica import ProcessReplica

MAX_ROWS = 512
ROWS_A_STEP = 64
QUESTION = "Which of the three roads that lead out of the village is the shortest way to the mill by the river? " * 2


class EchoReplica(Replica):
    """Answers a row with itself, as many a step as a busy engine might finish."""

    name, can_restart, num_rows_ahead = "echo", False, MAX_ROWS

    def __init__(self, source: RowSource):
        self._source = source
        self._rows: deque[Any] = deque()
        self._events: list[Event] = []
        self._num_done = 0

    def start(self, wake: Callable[[], None], tell: Callable[[Event], None]) -> None:
        facts = ReplicaFacts(version=npu_runner.__version__, settings={}, ledger="", max_rows=MAX_ROWS)
        self._events.append(Ready(facts))

    def begin(self, terms: Any) -> None:
        """There is nothing to agree on."""

    def submit(self, run: RowRun) -> None:
        self._rows.extend(run.rows())

    def recall(self, num_rows: int, *, begun: bool = False) -> None:
        self._events.append(Returned([self._rows.pop().number for _ in range(min(num_rows, len(self._rows)))]))

    def poll(self, timeout_seconds: float) -> list[Event]:
        rows = [self._rows.popleft() for _ in range(min(ROWS_A_STEP, len(self._rows)))]
        if rows:
            self._events.append(Begun([row.number for row in rows]))
            self._events.append(Finished([self._answer(row) for row in rows]))
            self._events.append(Progressed(ReplicaStats()))
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, row: Any) -> FinishedRow:
        data = row.data or self._source.read(row)
        return FinishedRow(row.number, Outcome(num_prompt_tokens=30, num_completion_tokens=30), data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--carry", action="store_true", help="rows travel with their bytes")
    parser.add_argument("--ray", action="store_true", help="replicas are Ray actors of this host")
    parser.add_argument("--pairs", type=int, default=0, metavar="N", help="so often without and with live files")
    parser.add_argument("--profile", action="store_true", help="where the driver's time goes, instead of figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_scale-") as folder, ExitStack() as opened:
        write_input(Path(folder) / "in.jsonl", arguments.rows)
        if arguments.ray:
            opened.enter_context(ray_cluster(max(arguments.replicas)))
        measured = []
        turns = [False] if not arguments.pairs else [False, True] * arguments.pairs
        for count, is_watched in itertools.product(arguments.replicas, turns):
            profiler = cProfile.Profile() if arguments.profile else None
            measured.append(measure(Path(folder), count, is_carried=arguments.carry,
                                    is_ray=arguments.ray, is_watched=is_watched, profiler=profiler))  # fmt: skip
            show(measured[-1])
            if profiler is not None:
                pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    print(json.dumps({"bench": "bench_scale", "commit": commit(), "cores": len(os.sched_getaffinity(0)),
                      "rows": arguments.rows, "carried": arguments.carry, "ray": arguments.ray,
                      "measured": measured, **versions()}))


def write_input(path: Path, num_rows: int) -> None:
    with open(path, "w") as file:
        for number in range(num_rows):
            body = {"messages": [{"role": "user", "content": f"{number}: {QUESTION}"}], "max_tokens": 64}
            row = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")


@contextmanager
def ray_cluster(num_cpus: int) -> Iterator[None]:
    """With a core for each replica, whatever the host has."""
    import ray

    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False,
             logging_level=logging.ERROR)  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def replicas_of(file: InputFile, num_replicas: int, *, is_carried: bool, is_ray: bool) -> list[Any]:
    """What makes each of them."""
    from bench_scale import EchoReplica  # by its name, so that replicas can import what they are sent

    names = [f"echo {number}" for number in range(num_replicas)]
    if not is_ray:
        placement, make = Placement(platform="cpu", description="cpu"), functools.partial(EchoReplica, file.source)
        return [functools.partial(ProcessReplica, name, make, placement, num_rows_ahead=MAX_ROWS,
                                  inherited=(file.source.descriptor,)) for name in names]  # fmt: skip
    from npu_runner.serving.replicas.ray_cluster import Demand
    from npu_runner.serving.replicas.ray_replica import RayReplica

    make = functools.partial(EchoReplica, CarriedRows(file.name) if is_carried else SharedFile(file.name))
    demand = Demand(platform="cpu", resource="CPU", amount=1)
    return [functools.partial(RayReplica, name, make, demand, num_rows_ahead=MAX_ROWS) for name in names]


def measure(
    folder: Path, num_replicas: int, *, is_carried: bool, is_ray: bool, is_watched: bool,
    profiler: cProfile.Profile | None,
) -> dict[str, Any]:  # fmt: skip
    output = folder / f"out-{num_replicas}.jsonl"
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC)
    tally, suspects = Tally(), Suspects(None)
    started = time.perf_counter()
    with InputFile(str(folder / "in.jsonl"), folder) as file:
        scan = file.scan()
        scan_seconds = time.perf_counter() - started
        book = RowBook(scan, np.ones(scan.num_rows, dtype=bool), file.source)
        driver = Driver(book, suspects, Progress("off"), rows_carry_data=is_carried)
        replicas = replicas_of(file, num_replicas, is_carried=is_carried, is_ray=is_ray)
        with Fleet(replicas, RowQueue(book.num_rows), driver) as fleet:
            fleet.load()
            peak_before, used = peak_kib(), time.process_time()
            served = time.perf_counter()
            fleet.begin(None)
            record, spent = JobRecord(num_rows=scan.num_rows, tally=tally), Spent()
            record.serve_began = time.monotonic()
            with (
                Delivery(Writers(AnswerWriter(descriptor, str(output), path=output)), tally) as delivery,
                watched(record, fleet, output, spent) if is_watched else nullcontext(lambda: None) as look,
            ):
                serve = functools.partial(driver.run, fleet, delivery, tally, lambda: False, look)
                if profiler is None:
                    serve()
                else:
                    profiler.runcall(serve)
            seconds, used, peak = time.perf_counter() - served, time.process_time() - used, peak_kib()
    with open(output, "rb") as answers:
        assert tally.num_answered == scan.num_rows == sum(1 for _ in answers), "each row once"
    output.unlink()
    return {
        "replicas": num_replicas,
        "watched": is_watched,
        "live_files_percent": round(100 * spent.seconds / seconds, 2),
        "live_files_percent_of_processor": round(100 * spent.processor_seconds / used, 2),
        "scan_rows_per_second": round(scan.num_rows / scan_seconds),
        "rows_per_second": round(scan.num_rows / seconds),
        "driver_us_per_row": round(used / scan.num_rows * 1e6, 1),
        "peak_growth_mib": round((peak - peak_before) / 1024, 1),
        "peak_mib": round(peak / 1024, 1),
    }


@dataclass
class Spent:
    """By the driver's thread in `Live.beat`."""

    seconds: float = 0.0
    processor_seconds: float = 0.0


@contextmanager
def watched(record: JobRecord, fleet: Fleet, output: Path, spent: Spent) -> Iterator[Callable[[], None]]:
    """What the driver calls after each look at its replicas, as in a job with a status and --metrics-file."""
    place = find_place("output", output)
    metrics = find_place("metrics_file", output.with_suffix(".prom"))
    live = Live(record, Accounts(record, place, None, print), place, metrics, print)
    live.fleet = fleet

    def look() -> None:
        began, used = time.perf_counter(), time.thread_time()
        live.beat()
        spent.seconds += time.perf_counter() - began
        spent.processor_seconds += time.thread_time() - used

    with live.of_this_run():
        yield look


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def show(figures: dict[str, Any]) -> None:
    print("  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
