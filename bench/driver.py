"""What a job's driver costs a row, and so how many devices one driver feeds: replicas of this host that only echo.

Everything but the model is real: the input file and its index, the queue of rows, sockets, processes, the output file
with its fsyncs, the tally. A replica reads each row where it lies, as preprocessing would, and sends it back within an
answer.

    python -m bench.driver [--replicas 1 2 4 8 16] [--rows 200000] [--carry] [--pairs 5]
                           [--fsync-ms 50 | --report-seconds 60]

`--carry`: rows travel with their bytes, as to another host. `--pairs`: each count so often without and with the files
that are replaced while a job runs (status, metrics), in turn. `--fsync-ms`: the pairs are without and with a slow disk
instead, on which each fsync takes longer. `--report-seconds`: the pairs are without and with `npu-runner report`, which
starts with the run and then again after that time, one at a time. Both sides of these pairs have the replaced files.

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
import os
import resource
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import npu_runner
from bench.common import make_parser, print_result, start_child
from npu_runner.batch.files.answer_writer import AnswerWriter, Delivery
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.names import lock_path
from npu_runner.batch.files.row_book import InputScan, RowBook
from npu_runner.batch.job.driver import Driver
from npu_runner.batch.job.history import JobHistory, JobSummary
from npu_runner.batch.job.live import Live
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.shape import RowSource
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


class EchoReplica(Replica):
    """Answers a row with itself, as many a step as a busy engine might finish."""

    name, can_restart, num_rows_ahead = "echo", False, MAX_ROWS

    def __init__(self, source: RowSource):
        self._source = source
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
                           ANSWER % (row.number, data.rstrip()))


def main() -> None:
    parser = make_parser(__doc__, repeats=1)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--carry", action="store_true", help="rows travel with their bytes")
    parser.add_argument("--pairs", type=int, default=0, metavar="N", help="so often without and with live files")
    parser.add_argument("--fsync-ms", type=float, default=0.0, metavar="MS", help="a slow disk, in pairs")
    parser.add_argument("--report-seconds", type=float, metavar="S", help="reports beside the job, in pairs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_driver-") as folder:
        write_input(Path(folder) / "in.jsonl", arguments.rows)
        measured = []
        turns = [False, True] * arguments.pairs or [False] * arguments.repeats
        for count, is_second in itertools.product(arguments.replicas, turns):
            measured.append(measure(Path(folder), count, arguments, is_second=is_second))
            print("  ".join(f"{name} {value}" for name, value in measured[-1].items()), flush=True)
    print_result("driver", arguments, measured=measured)


@contextmanager
def slow_fsync(milliseconds: float) -> Iterator[None]:
    """Each fsync of this process takes longer by that time within, without the interpreter's lock."""
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


def replicas_of(file: InputFile, num_replicas: int) -> list[Any]:
    """A factory of each replica."""
    from bench.driver import EchoReplica  # by its name, so that replicas can import what they are sent

    placement, make = Placement(platform="cpu", description="cpu"), functools.partial(EchoReplica, file.source)
    return [functools.partial(ProcessReplica, f"echo {number}", make, placement, num_rows_ahead=MAX_ROWS,
                              inherited=(file.source.descriptor,)) for number in range(num_replicas)]


def measure(folder: Path, num_replicas: int, arguments: argparse.Namespace, *, is_second: bool) -> dict[str, Any]:
    """One run; `is_second`: with what the pairs compare."""
    is_watched = is_second or arguments.fsync_ms > 0 or arguments.report_seconds is not None
    is_reported = is_second and arguments.report_seconds is not None
    fsync_ms = arguments.fsync_ms if is_second else 0.0
    output = folder / f"out-{num_replicas}.jsonl"
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC)
    tally = Counts()
    started = time.perf_counter()
    with InputFile(str(folder / "in.jsonl"), folder) as file, slow_fsync(fsync_ms):
        scan = file.scan()
        scan_seconds = time.perf_counter() - started
        book = RowBook(scan, np.ones(scan.num_rows, dtype=bool), file.source)
        driver = Driver(book, {}, rows_carry_data=arguments.carry)
        with Fleet(replicas_of(file, num_replicas), RowQueue(book.num_rows), driver) as fleet:
            fleet.load()
            peak_before, used = peak_kib(), time.process_time()
            served = time.perf_counter()
            fleet.serve(None)
            summary = JobSummary(num_rows=scan.num_rows, tally=tally)
            summary.serve_began = time.monotonic()
            writer = AnswerWriter(descriptor, str(output), path=output)
            with (
                Delivery(tally, writer) as delivery,
                live_files(summary, fleet, output) if is_watched else nullcontext(lambda: None) as beat,
                reported(scan, output, arguments.report_seconds) if is_reported else nullcontext(),
            ):
                driver.run(fleet, delivery, lambda: False, beat)
            seconds, used, peak = time.perf_counter() - served, time.process_time() - used, peak_kib()
    with open(output, "rb") as answers:
        assert tally.num_answered == scan.num_rows == sum(1 for _ in answers), "each row once"
    output.unlink()
    return {"replicas": num_replicas, "live_files": is_watched, "fsync_ms": fsync_ms, "reported": is_reported,
            "scan_rows_per_second": round(scan.num_rows / scan_seconds),
            "rows_per_second": round(scan.num_rows / seconds),
            "driver_us_per_row": round(used / scan.num_rows * 1e6, 1),
            "peak_growth_mib": round((peak - peak_before) / 1024, 1), "peak_mib": round(peak / 1024, 1)}


@contextmanager
def live_files(summary: JobSummary, fleet: Fleet, output: Path) -> Iterator[Callable[[], None]]:
    """The driver's call after each poll of its replicas, as in a job with a status and --metrics-file."""
    live = Live(summary, JobHistory(summary, print), print)
    live.fleet = fleet
    with live.writing(output, {output.with_suffix(".prom"): metrics_of}):
        yield live.beat


@contextmanager
def reported(scan: InputScan, output: Path, seconds: float) -> Iterator[None]:
    """Make reports of the output, as beside a job that holds its lock: the first at once, one at a time."""
    Manifest(created=1, model_name="echo", model_files={}, settings={}, input=scan.identity).save(output)
    command = ("npu_runner", "report", output, "-o", output.with_suffix(".html"), "-i", output.parent / "in.jsonl")
    ended = threading.Event()

    def make_reports() -> None:
        while not ended.is_set():
            due = time.monotonic() + seconds
            with start_child(*command, stderr=subprocess.DEVNULL) as process:
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
