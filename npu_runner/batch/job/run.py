"""The batch job from its first look at the files to its summary. Knows nothing of what is in a row or how it is served.

Order matters: everything that can be refused is refused before the model is loaded, and nothing of an earlier run is
changed before the model stands ready.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, cast

import numpy as np

from npu_runner.batch.files.destination import Destination, Writers, open_destination
from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.fingerprint import WeightDigests, fingerprint_model, refuse_changed_files
from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.files.suspects import Suspects
from npu_runner.batch.job import delivery, manifest_check
from npu_runner.batch.job.delivery import Delivery, OrderedDelivery
from npu_runner.batch.job.driver import Driver, hooks_for, known_suspects
from npu_runner.batch.job.job_outputs import make_report, save_summary
from npu_runner.batch.job.model_side import CheckpointSide, ModelSide
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.places import Places, find_places
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.job.replica_plan import ReplicaPlan, planned_replicas, report_of
from npu_runner.batch.job.signals import Interrupted, StopSignals
from npu_runner.batch.job.summary import JobSummary, ReplicaReport
from npu_runner.batch.job.tally import Tally
from npu_runner.batch.rows.openai_response import JobStamp
from npu_runner.checkpoint.location import resolve_checkpoint
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, JobError, NpuRunnerError, OutputLostError
from npu_runner.processes.patient_streams import PatientStream, patient_stderr
from npu_runner.serving.replicas.base import ReplicaStats
from npu_runner.serving.replicas.fleet import Fleet
from npu_runner.serving.replicas.row_queue import RowQueue
from npu_runner.serving.workers.options import num_cpus

_MAX_DIGEST_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What is to do."""

    rows: InputScan
    wanted: np.ndarray
    model_folder: Path
    model_files: dict[str, str]


def run_batch(
    config: RunnerConfig,
    options: BatchOptions,
    *,
    open_model: Callable[[RunnerConfig], ModelSide] = CheckpointSide,
) -> JobSummary:
    """Answer every row of the input that has no answer yet. Returns what was done, also when a signal cut it short.

    Raises ConfigError for what has to be changed before it can work, JobError and EngineDeadError when the same
    command may simply be run again. Of a job that ended so after its input was read there is a summary as well.
    `open_model` stands in for a checkpoint and LLMEngine.
    """
    places = find_places(options, config.model)
    with StopSignals() as signals, _quiet_streams() as stderr, places.beside_the_answers():
        progress = Progress(options.progress, stderr)
        job = _Job(config, options, places, progress, signals, open_model)
        try:
            _run_locked(job, options, places, signals)
        except NpuRunnerError as error:
            if job.has_something_to_say(error):
                job.say_summary(error)
            raise
        finally:
            progress.close()
        return job.say_summary()


@contextlib.contextmanager
def _quiet_streams() -> Iterator[PatientStream]:
    """Within, whatever is printed goes to a standard error that raises nothing: no words of a library end a job."""
    with patient_stderr() as stderr, contextlib.redirect_stdout(cast(TextIO, stderr)):
        yield stderr


def _run_locked(job: _Job, options: BatchOptions, places: Places, signals: StopSignals) -> None:
    destination = open_destination(
        places.output, overwrite=options.overwrite, retry_errors=options.retry_errors, errors=places.error_file)
    try:
        with destination, signals.interrupting():
            job.run(destination)
    except Interrupted as signal:
        job.is_interrupted = True
        raise JobError(f"interrupted by {signal} before the first row; the same command starts again") from None


class _Job:
    def __init__(
        self,
        config: RunnerConfig,
        options: BatchOptions,
        places: Places,
        progress: Progress,
        signals: StopSignals,
        open_model: Callable[[RunnerConfig], ModelSide],
    ):
        self._config = config
        self._options = options
        self._places = places
        self._progress = progress
        self._signals = signals
        self._open_model = open_model
        self.is_interrupted = False
        """By a signal that came before the first row."""
        self._tally = Tally()
        self._started = time.monotonic()
        self._serve_began: float | None = None
        self._serve_ended: float | None = None
        self._work: _Work | None = None
        self._num_resumed = self._num_failed_kept = 0
        self._stats = ReplicaStats()
        self._replicas: tuple[ReplicaReport, ...] = ()
        self._num_workers = 0
        self._start_phases: Mapping[str, float] = {}

    def run(self, destination: Destination) -> None:
        destination.look()
        if self._places.report is not None and destination.path is None:
            raise ConfigError("report: it is made from the output file, and this output cannot be read again")
        with self._open_input(destination) as file:
            work = self._work = self._plan(file, destination)
            try:
                self._work_off(file, work, destination)
            except OutputLostError:
                # Whoever wrote them, runs before or this one: what counts is what is still there.
                self._tally = Tally()
                self._num_resumed, self._num_failed_kept = destination.num_there(work.rows)
                raise

    def _plan(self, file: InputFile, destination: Destination) -> _Work:
        earlier = destination.earlier
        rows = file.scan(earlier.input if earlier else None)
        if not rows.continues_earlier:
            raise ConfigError(
                f"input {file.name}: it is not the input that {destination.name} was begun with (rows may be added "
                "at its end, not changed); restore it, choose another output, or --overwrite to start afresh"
            )
        folder = resolve_checkpoint(self._config.model, self._config.revision)
        files = fingerprint_model(folder)
        manifest_check.refuse_another_model(destination, files)
        finished = destination.finished(rows)
        self._num_resumed, self._num_failed_kept = int(finished.sum()), destination.num_failed_kept()
        return _Work(rows=rows, wanted=~finished, model_folder=folder, model_files=files)

    def _work_off(self, file: InputFile, work: _Work, destination: Destination) -> None:
        if work.wanted.any():
            self._serve(file, work, destination)
        else:
            self._nothing_to_do(work, destination)
        if not self._is_cut_short:
            file.refuse_changes()
            destination.finish(work.rows, is_ordered=self._options.ordered)
            if self._places.report is not None:
                most_pixels = self._config.prompts.max_source_pixels
                make_report(self._places.report, self._options, most_pixels, file, work.rows, destination)
                self._progress.say(f"report    {self._places.report.name}")

    def _open_input(self, destination: Destination) -> InputFile:
        path = destination.path
        spool_folder = path.parent if path is not None else Path(tempfile.gettempdir())
        with clear_file_errors(f"copy of the input in {spool_folder}"):
            return InputFile(self._options.input, spool_folder)

    def _serve(self, file: InputFile, work: _Work, destination: Destination) -> None:
        if self._num_resumed:
            self._progress.say(f"resuming: {self._num_resumed} of {work.rows.num_rows} rows are finished")
        # The folder that was looked at, whatever a hub id stands for a moment later.
        given = self._config.replace(model=str(work.model_folder), revision=None)
        taken = manifest_check.config_to_go_on_with(given, destination.earlier)
        book = RowBook(work.rows, work.wanted, file.source)
        suspects = Suspects(destination.path, overwrite=self._options.overwrite,
                            retry_errors=self._options.retry_errors)
        with planned_replicas(taken, self._options, file.source, self._open_model) as plan:
            self._num_workers = round(plan.workers_each * len(plan.replicas))
            if plan.notice is not None:
                self._progress.say(plan.notice)
            loading = manifest_check.loading(given, taken, destination)
            self._serve_with(plan, work, destination, book, suspects, loading=loading)

    def _serve_with(
        self, plan: ReplicaPlan, work: _Work, destination: Destination, book: RowBook, suspects: Suspects, *,
        loading: AbstractContextManager[None],
    ) -> None:  # fmt: skip
        queue = RowQueue(book.num_rows)
        if self._options.ordered and destination.path is None:
            queue.allow(self._window(plan))
        hooks = hooks_for(book, suspects, self._progress.say, rows_carry_data=plan.rows_carry_data,
                          scale_up=plan.scale_up)  # fmt: skip
        given_up = known_suspects(queue, book, suspects)
        with (
            Fleet(plan.replicas, queue, hooks, max_restarts=plan.max_restarts, given_up=given_up) as fleet,
            self._digests(work) as digests,
        ):
            with loading:
                facts = fleet.load()
            refuse_changed_files(work.model_folder, work.model_files)
            self._start_phases = facts.start_seconds
            shown = ", ".join(f"{name} {value}" for name, value in facts.settings.items() if "." not in name)
            self._progress.say(f"model {work.model_folder}: {shown}\n{facts.ledger}")
            if not digests.is_done:
                self._progress.say("the model is ready; waiting until its weights are hashed")
            manifest = manifest_check.manifest_of(
                destination, facts, model_name=work.model_folder.name, model_files=work.model_files,
                weights=digests.lines(), input=work.rows.identity,
            )  # fmt: skip
            # From here on a signal lets the step under way end, and then the job.
            self._signals.defer()
            writers = destination.begin(manifest)
            if self._options.overwrite:
                suspects.clear()
            fleet.begin(self._stamp(manifest))
            try:
                self._drive(fleet, book, suspects, self._delivery(writers, queue, plan))
            finally:
                self._num_workers = round(plan.workers_each * len(fleet.states))

    def _digests(self, work: _Work) -> WeightDigests:
        return WeightDigests(work.model_folder, num_threads=max(1, min(_MAX_DIGEST_THREADS, num_cpus() // 2)))

    def _drive(self, fleet: Fleet, book: RowBook, suspects: Suspects, delivery: Delivery) -> None:
        assert self._work is not None, "no work was planned yet"
        self._serve_began = time.monotonic()
        driver = Driver(
            fleet, book, delivery, tally=self._tally, progress=self._progress,
            should_stop=lambda: self._signals.is_requested, suspects=suspects,
        )  # fmt: skip
        try:
            with delivery:
                self._progress.start(self._work.rows.num_rows, self._num_resumed)
                driver.run()
            self._progress.update(self._tally, driver.engine_stats, is_last=True)
            if not self._is_cut_short:
                suspects.clear()
        finally:
            self._serve_ended = time.monotonic()
            self._stats = driver.stats()
            self._replicas = tuple(report_of(state) for state in fleet.states) if len(fleet.states) > 1 else ()
            self._progress.close()

    def _delivery(self, writers: Writers, queue: RowQueue, plan: ReplicaPlan) -> Delivery:
        # A file is put in order when all of its rows are there; only a stream has to keep to it.
        if self._options.ordered and writers.answers.is_stream:
            return OrderedDelivery(writers, self._tally, queue.allow, window=self._window(plan))
        return Delivery(writers, self._tally)

    def _window(self, plan: ReplicaPlan) -> int:
        return delivery.MAX_ROWS_OUT_OF_ORDER * len(plan.replicas)

    def _stamp(self, manifest: Manifest) -> JobStamp:
        return JobStamp(
            created=manifest.created,
            system_fingerprint=manifest.system_fingerprint,
            model_name=manifest.model_name,
            splits_reasoning="prompts.reasoning_tokens" in manifest.settings,
            with_cached_tokens=self._options.cached_tokens,
        )

    def _nothing_to_do(self, work: _Work, destination: Destination) -> None:
        self._progress.say(f"nothing to do: all {work.rows.num_rows} rows are finished")
        self._signals.defer()
        manifest = manifest_check.manifest_without_model(
            destination, model_name=work.model_folder.name, model_files=work.model_files, input=work.rows.identity
        )
        # No row is added, but the file is repaired, or made for an input that is empty so far.
        destination.begin(manifest).close()

    @property
    def _is_cut_short(self) -> bool:
        assert self._work is not None, "no work was planned yet"
        return self._num_resumed + self._tally.num_done < self._work.rows.num_rows

    def has_something_to_say(self, error: NpuRunnerError) -> bool:
        """A refused setting (exit status 2) changed nothing, and the summary of an earlier run is still true."""
        return self._work is not None and (self._serve_began is not None or not isinstance(error, ConfigError))

    def say_summary(self, error: NpuRunnerError | None = None) -> JobSummary:
        """Tell what was done, on the terminal and in the summary's file. After an `error` it raises no second one."""
        summary = self._summary(error)
        for line in summary.to_lines():
            self._progress.say(line)
        summary = replace(summary, silence=self._progress.silence)  # these lines may have been the first to be lost
        try:
            if self._places.summary is not None:
                save_summary(self._places.summary, summary)
        except JobError as second:
            if error is None:
                raise
            self._progress.say(str(second))
        return summary

    def _summary(self, error: NpuRunnerError | None) -> JobSummary:
        assert self._work is not None, "no work was planned yet"
        now = time.monotonic()
        began, ended = self._serve_began or now, self._serve_ended or now
        return JobSummary(
            num_rows=self._work.rows.num_rows,
            num_resumed=self._num_resumed,
            num_failed_in_output=self._num_failed_kept + self._tally.num_failed,
            tally=self._tally,
            stats=self._stats.engine,
            wait_seconds=self._stats.wait_seconds,
            replicas=self._replicas,
            start_seconds=began - self._started,
            start_phases=self._start_phases,
            serve_seconds=ended - began,
            num_workers=self._num_workers,
            num_workers_replaced=self._stats.num_workers_replaced,
            is_interrupted=self.is_interrupted or (error is None and self._is_cut_short),
            error=error,
        )
