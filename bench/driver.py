"""What a job's driver costs a row, and so how many devices one driver feeds: replicas of this host that only echo.

Everything but the model is real: the input file and its index, the queue of rows, sockets, processes, the output file
with its fsyncs, the tally. A replica reads each row where it lies, as preprocessing would, and sends it back as answer.

    python -m bench.driver [--replicas 1 2 4 8 16] [--rows 200000] [--carry] [--ray] [--pairs 5]
                           [--fsync-ms 50 | --report-seconds 60]

`--carry`: rows travel with their bytes, as to another host. `--ray`: replicas are actors of a Ray cluster that is made
for it on this host (without `--carry` they read the input, as with --shared-input). `--pairs`: each count so often
without and with the files that are replaced while a job runs (status, metrics), in turn,
and which share of the driver's time these took. `--fsync-ms`: the pairs are without and with a slow disk instead, on
which each fsync takes longer; both have the files that are replaced. `--report-seconds`: the pairs are without and
with `npu-runner report`, which starts with the run and then again after that time, one at a time. `put_percent` is the
share of time in which the driver hands rows to the writer, and waits where that has no room.

`--report N`: in place of that, seconds and bytes of `npu-runner report` over a job of N rows with prompts of 200
characters and answers of 64 tokens of shapes-vl, without images.

Prints a table, then one JSON line: rows/s from the first row handed out to the last one on disk, microseconds of the
driver's processor a row, and how much the driver's peak of memory grew while it served (numpy, the index and the code
are there before).
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import itertools
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import npu_runner
from bench.common import SHAPES_VL, make_parser, print_result, show, start_child
from npu_runner.batch.files.answer_writer import AnswerWriter, Delivery
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.names import lock_path
from npu_runner.batch.files.row_book import CarriedRows, InputScan, RowBook, SharedFile
from npu_runner.batch.job.driver import Driver
from npu_runner.batch.job.history import JobHistory, JobSummary
from npu_runner.batch.job.live import Live
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.input_row import RowSource
from npu_runner.reports.metrics import metrics_of
from npu_runner.serving.replica import (
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
    Started,
)
from npu_runner.serving.replicas.fleet import Fleet
from npu_runner.serving.replicas.load_balancer import RowQueue
from npu_runner.serving.replicas.placement import Placement
from npu_runner.serving.replicas.process_replica import ProcessReplica

MAX_ROWS = 512
ROWS_A_STEP = 64
ANSWER = (b'{"custom_id": "row-%d", "response": {"status_code": 200, "body": {"choices": [{"index": 0, "message": '
          b'{"content": "Over the hill.", "request": %b}, "finish_reason": "stop"}]}}, "error": null}\n')
"""A result row that holds its request, so that it has as many bytes to read and to write."""
QUESTION = "Which of the three roads that lead out of the village is the shortest way to the mill by the river? " * 2


class TimedWriter(AnswerWriter):
    """Counts the seconds in which the driver waits for room in the queue of answers."""

    put_seconds = 0.0

    def put(self, row: bytes) -> None:
        began = time.perf_counter()
        super().put(row)
        self.put_seconds += time.perf_counter() - began


class EchoReplica(Replica):
    """Answers a row with itself, as many a step as a busy engine might finish."""

    name, can_restart, num_rows_ahead = "echo", False, MAX_ROWS

    def __init__(self, source: RowSource, makes_answers: bool = False):
        """`makes_answers`: a row comes back within a result row, so that a report can read it."""
        self._source, self._makes_answers = source, makes_answers
        self._rows: deque[Any] = deque()
        self._events: list[Event] = []
        self._rows_a_step = 0

    def start(self, wake: Callable[[], None], notify: Callable[[Event], None]) -> None:
        facts = ReplicaFacts(version=npu_runner.__version__, settings={}, ledger="", max_rows=MAX_ROWS)
        self._events.append(Ready(facts))

    def serve(self, stamp: Any) -> None:
        self._rows_a_step = ROWS_A_STEP

    def submit(self, run: RowRun) -> None:
        self._rows.extend(run.rows())

    def recall(self, num_rows: int, *, include_started: bool = False) -> None:
        self._events.append(Returned([self._rows.pop().number for _ in range(min(num_rows, len(self._rows)))]))

    def poll(self, timeout_seconds: float) -> list[Event]:
        rows = [self._rows.popleft() for _ in range(min(self._rows_a_step, len(self._rows)))]
        if rows:
            self._events.append(Started([row.number for row in rows]))
            self._events.append(Finished([self._answer(row) for row in rows]))
            self._events.append(Progressed(ReplicaStats()))
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, row: Any) -> FinishedRow:
        data = row.data or self._source.read(row)
        return FinishedRow(row.number, Counts(num_answered=1, num_prompt_tokens=30, num_completion_tokens=30),
                           ANSWER % (row.number, data.rstrip()) if self._makes_answers else data)


def main() -> None:
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--carry", action="store_true", help="rows travel with their bytes")
    parser.add_argument("--ray", action="store_true", help="replicas are Ray actors of this host")
    parser.add_argument("--pairs", type=int, default=0, metavar="N", help="so often without and with live files")
    parser.add_argument("--report", type=int, metavar="N", help="measure a report of N rows instead")
    parser.add_argument("--fsync-ms", type=float, default=0.0, metavar="MS", help="a slow disk, in pairs")
    parser.add_argument("--report-seconds", type=float, metavar="S", help="reports beside the job, in pairs")
    arguments = parser.parse_args()
    if arguments.report:
        measure_report(arguments.report, arguments)
        return
    with tempfile.TemporaryDirectory(prefix="bench_driver-") as folder, ExitStack() as opened:
        write_input(Path(folder) / "in.jsonl", arguments.rows)
        if arguments.ray:
            opened.enter_context(ray_cluster(max(arguments.replicas)))
        measured = []
        turns = [False, True] * arguments.pairs or [False] * arguments.repeats
        for count, is_second in itertools.product(arguments.replicas, turns):
            fsync_ms = arguments.fsync_ms if is_second else 0.0
            is_reported = arguments.report_seconds is not None
            with slow_fsync(fsync_ms):
                measured.append(measure(Path(folder), count, is_carried=arguments.carry, is_ray=arguments.ray,
                                        is_watched=is_second or arguments.fsync_ms > 0 or is_reported,
                                        makes_answers=is_reported,
                                        report_seconds=arguments.report_seconds if is_second else None))
            measured[-1] |= {"fsync_ms": fsync_ms, "reported": is_reported and is_second}
            print("  ".join(f"{name} {value}" for name, value in measured[-1].items()), flush=True)
    print_result("driver", arguments, measured=measured)


def measure_report(num_rows: int, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_input(folder / "in.jsonl", num_rows)
        files = ("-i", folder / "in.jsonl", "-o")
        run_command("batch", *files, folder / "out.jsonl", "--model", SHAPES_VL, "--platform", "cpu")
        seconds = [run_command("report", folder / "out.jsonl", *files, folder / "page", "--report-rows", num_rows)
                   for _ in range(arguments.repeats)]
        page = folder / "page"
        sizes = [path.stat().st_size for path in ([page] if page.is_file() else page.rglob("*")) if path.is_file()]
    print(f"a report of {num_rows} rows: {show(seconds, 2)} s, {len(sizes)} files, {sum(sizes) / 1e6:.2f} MB")
    print_result("report", arguments, seconds=seconds, num_files=len(sizes), num_bytes=sum(sizes))


def run_command(*arguments: Any) -> float:
    """Seconds of an npu-runner command."""
    started = time.perf_counter()
    child = start_child("npu_runner", *arguments)
    child.communicate()
    assert child.returncode == 0, f"npu-runner {arguments[0]} failed"
    return time.perf_counter() - started


@contextmanager
def slow_fsync(milliseconds: float) -> Iterator[None]:
    """Within, each fsync of this process takes so much longer, without the interpreter's lock."""
    fsync = os.fsync

    def slow(fd: Any) -> None:
        time.sleep(milliseconds / 1e3)
        fsync(fd)

    if milliseconds:
        os.fsync = slow
    try:
        yield
    finally:
        os.fsync = fsync


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


def replicas_of(file: InputFile, num_replicas: int, *, is_carried: bool, is_ray: bool,
                makes_answers: bool) -> list[Any]:
    """What makes each of them."""
    from bench.driver import EchoReplica  # by its name, so that replicas can import what they are sent

    names = [f"echo {number}" for number in range(num_replicas)]
    if not is_ray:
        placement = Placement(platform="cpu", description="cpu")
        make = functools.partial(EchoReplica, file.source, makes_answers)
        return [functools.partial(ProcessReplica, name, make, placement, num_rows_ahead=MAX_ROWS,
                                  inherited=(file.source.descriptor,)) for name in names]  # fmt: skip
    from npu_runner.serving.replicas.ray_cluster import Demand
    from npu_runner.serving.replicas.ray_replica import RayReplica

    make = functools.partial(EchoReplica, CarriedRows(file.name) if is_carried else SharedFile(file.name),
                             makes_answers)  # fmt: skip
    demand = Demand(platform="cpu", resource="CPU", amount=1)
    return [functools.partial(RayReplica, name, make, demand, num_rows_ahead=MAX_ROWS) for name in names]


def measure(folder: Path, num_replicas: int, *, is_carried: bool, is_ray: bool, is_watched: bool, makes_answers: bool,
            report_seconds: float | None) -> dict[str, Any]:
    output = folder / f"out-{num_replicas}.jsonl"
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC)
    tally = Counts()
    started = time.perf_counter()
    with InputFile(str(folder / "in.jsonl"), folder) as file:
        scan = file.scan()
        scan_seconds = time.perf_counter() - started
        book = RowBook(scan, np.ones(scan.num_rows, dtype=bool), file.source)
        driver = Driver(book, {}, rows_carry_data=is_carried)
        replicas = replicas_of(file, num_replicas, is_carried=is_carried, is_ray=is_ray, makes_answers=makes_answers)
        with Fleet(replicas, RowQueue(book.num_rows), driver) as fleet:
            fleet.load()
            peak_before, used = peak_kib(), time.process_time()
            served = time.perf_counter()
            fleet.serve(None)
            summary, spent = JobSummary(num_rows=scan.num_rows, tally=tally), Spent()
            summary.serve_began = time.monotonic()
            writer = TimedWriter(descriptor, str(output), path=output)
            with (
                Delivery(tally, writer) as delivery,
                watched(summary, fleet, output, spent) if is_watched else nullcontext(lambda: None) as look,
                nullcontext() if report_seconds is None else reported(scan, output, report_seconds),
            ):
                driver.run(fleet, delivery, lambda: False, look)
            seconds, used, peak = time.perf_counter() - served, time.process_time() - used, peak_kib()
    with open(output, "rb") as answers:
        assert tally.num_answered == scan.num_rows == sum(1 for _ in answers), "each row once"
    output.unlink()
    return {
        "replicas": num_replicas,
        "watched": is_watched,
        "put_percent": round(100 * writer.put_seconds / seconds, 2),
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
def watched(summary: JobSummary, fleet: Fleet, output: Path, spent: Spent) -> Iterator[Callable[[], None]]:
    """What the driver calls after each look at its replicas, as in a job with a status and --metrics-file."""
    live = Live(summary, JobHistory(summary, print), print)
    live.fleet = fleet

    def look() -> None:
        began, used = time.perf_counter(), time.thread_time()
        live.beat()
        spent.seconds += time.perf_counter() - began
        spent.processor_seconds += time.thread_time() - used

    with live.writing(output, {output.with_suffix(".prom"): metrics_of}):
        yield look


@contextmanager
def reported(scan: InputScan, output: Path, seconds: float) -> Iterator[None]:
    """Make reports of the output, as beside a job that holds its lock: the first at once, one at a time."""
    Manifest(created=1, model_name="echo", model_files={}, settings={}, input=scan.identity).save(output)
    command = [sys.executable, "-m", "npu_runner", "report", str(output), "-o", str(output.with_suffix(".html")),
               "-i", str(output.parent / "in.jsonl")]  # fmt: skip
    ended = threading.Event()

    def make_reports() -> None:
        while not ended.is_set():
            due = time.monotonic() + seconds
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
                while process.poll() is None:
                    if ended.wait(0.2):
                        process.kill()
            ended.wait(max(0.0, due - time.monotonic()))

    with open(lock_path(output), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=make_reports)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
