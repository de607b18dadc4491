"""The batch job from its first look at the files to its summary. Knows nothing of what is in a row or how it is served.

Order matters: everything that can be refused is refused before the model is loaded, and nothing of an earlier run is
changed before the model stands ready.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, cast

import numpy as np

from npu_runner.batch.files.destination import Destination, open_destination
from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.fingerprint import WeightDigests, fingerprint_model, refuse_changed_files
from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.files.suspects import Suspects
from npu_runner.batch.job import manifest_check
from npu_runner.batch.job.delivery import Delivery, delivery_for, window_of
from npu_runner.batch.job.driver import Driver, hooks_for, known_suspects
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.places import Places, find_places
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.job.replica_plan import planned_replicas, report_of
from npu_runner.batch.job.report import make_report
from npu_runner.batch.job.row_server import CheckpointSide, ModelSide
from npu_runner.batch.job.signals import Interrupted, StopSignals
from npu_runner.batch.job.summary import JobRecord, JobSummary, Tally
from npu_runner.batch.rows.openai_response import JobStamp
from npu_runner.checkpoint.files import resolve_checkpoint
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, JobError, NpuRunnerError, OutputLostError
from npu_runner.processes.patient_streams import PatientStream, patient_stderr
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
            job.run()
        except NpuRunnerError as error:
            if job.record.is_worth_saying(error):
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


class _Job:
    """`run` holds the output and does all of it, step by step; `record` has what was done, wherever it ends."""

    def __init__(self, config: RunnerConfig, options: BatchOptions, places: Places, progress: Progress,
                 signals: StopSignals, open_model: Callable[[RunnerConfig], ModelSide]):
        self._config = config
        self._options = options
        self._places = places
        self._progress = progress
        self._signals = signals
        self._open_model = open_model
        self.record = JobRecord()

    def run(self) -> None:
        destination = open_destination(self._places.output, overwrite=self._options.overwrite,
                                       retry_errors=self._options.retry_errors, errors=self._places.error_file)
        try:
            with destination, self._signals.interrupting():
                self._run(destination)
        except Interrupted as signal:
            self.record.is_interrupted = True
            raise JobError(f"interrupted by {signal} before the first row; the same command starts again") from None

    def _run(self, destination: Destination) -> None:
        """With the output locked: look, plan, serve, finish."""
        destination.look()
        if self._places.report is not None and destination.path is None:
            raise ConfigError("report: it is made from the output file, and this output cannot be read again")
        with self._open_input(destination) as file:
            work = self._plan(file, destination)
            try:
                if work.wanted.any():
                    self._serve(file, work, destination)
                else:
                    self._nothing_to_do(work, destination)
                if not self.record.is_cut_short:
                    self._finish(file, work, destination)
            except OutputLostError:
                # Whoever wrote them, runs before or this one: what counts is what is still there.
                self.record.tally = Tally()
                self.record.num_resumed, self.record.num_failed_kept = destination.num_there(work.rows)
                raise

    def _open_input(self, destination: Destination) -> InputFile:
        path = destination.path
        spool_folder = path.parent if path is not None else Path(tempfile.gettempdir())
        with clear_file_errors(f"copy of the input in {spool_folder}"):
            return InputFile(self._options.input, spool_folder)

    def _plan(self, file: InputFile, destination: Destination) -> _Work:
        """Everything that can be refused before a model is loaded is refused here."""
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
        self.record.num_resumed, self.record.num_failed_kept = int(finished.sum()), destination.num_failed_kept()
        self.record.num_rows = rows.num_rows
        return _Work(rows=rows, wanted=~finished, model_folder=folder, model_files=files)

    def _serve(self, file: InputFile, work: _Work, destination: Destination) -> None:
        """Load replicas of the model, and have them answer the rows that are wanted."""
        options, record = self._options, self.record
        if record.num_resumed:
            self._progress.say(f"resuming: {record.num_resumed} of {work.rows.num_rows} rows are finished")
        # The folder that was looked at, whatever a hub id stands for a moment later.
        given = self._config.replace(model=str(work.model_folder), revision=None)
        taken = manifest_check.config_to_go_on_with(given, destination.earlier)
        book = RowBook(work.rows, work.wanted, file.source)
        suspects = Suspects(destination.path, overwrite=options.overwrite, retry_errors=options.retry_errors)
        queue = RowQueue(book.num_rows)
        with planned_replicas(taken, options, file.source, self._open_model) as plan:
            record.num_workers = round(plan.workers_each * len(plan.replicas))
            if plan.notice is not None:
                self._progress.say(plan.notice)
            window = window_of(len(plan.replicas))
            if options.ordered and destination.path is None:
                queue.allow(window)
            hooks = hooks_for(book, suspects, self._progress.say, rows_carry_data=plan.rows_carry_data,
                              scale_up=plan.scale_up)  # fmt: skip
            given_up = known_suspects(queue, book, suspects)
            with Fleet(plan.replicas, queue, hooks, max_restarts=plan.max_restarts, given_up=given_up) as fleet:
                manifest = self._load(fleet, work, destination, manifest_check.loading(given, taken, destination))
                # From here on a signal lets the step under way end, and then the job.
                self._signals.defer()
                writers = destination.begin(manifest)
                if options.overwrite:
                    suspects.clear()
                fleet.begin(self._stamp(manifest))
                delivery = delivery_for(writers, record.tally, queue.allow, is_ordered=options.ordered, window=window)
                try:
                    self._drive(fleet, book, suspects, delivery)
                finally:
                    record.num_workers = round(plan.workers_each * len(fleet.states))

    def _load(self, fleet: Fleet, work: _Work, destination: Destination,
              loading: AbstractContextManager[None]) -> Manifest:
        """Have the replicas load while the weights are hashed. Returns the manifest of what they serve."""
        num_threads = max(1, min(_MAX_DIGEST_THREADS, num_cpus() // 2))
        with WeightDigests(work.model_folder, num_threads=num_threads) as digests:
            with loading:
                facts = fleet.load()
            refuse_changed_files(work.model_folder, work.model_files)
            self.record.start_phases = facts.start_seconds
            shown = ", ".join(f"{name} {value}" for name, value in facts.settings.items() if "." not in name)
            self._progress.say(f"model {work.model_folder}: {shown}\n{facts.ledger}")
            if not digests.is_done:
                self._progress.say("the model is ready; waiting until its weights are hashed")
            return manifest_check.manifest_of(
                destination, facts, model_name=work.model_folder.name, model_files=work.model_files,
                weights=digests.lines(), input=work.rows.identity,
            )  # fmt: skip

    def _stamp(self, manifest: Manifest) -> JobStamp:
        return JobStamp(
            created=manifest.created,
            system_fingerprint=manifest.system_fingerprint,
            model_name=manifest.model_name,
            splits_reasoning="prompts.reasoning_tokens" in manifest.settings,
            with_cached_tokens=self._options.cached_tokens,
        )

    def _drive(self, fleet: Fleet, book: RowBook, suspects: Suspects, delivery: Delivery) -> None:
        record = self.record
        record.serve_began = time.monotonic()
        driver = Driver(
            fleet, book, delivery, tally=record.tally, progress=self._progress,
            should_stop=lambda: self._signals.is_requested, suspects=suspects,
        )  # fmt: skip
        try:
            with delivery:
                self._progress.start(record.num_rows or 0, record.num_resumed)
                driver.run()
            self._progress.update(record.tally, driver.engine_stats, is_last=True)
            if not record.is_cut_short:
                suspects.clear()
        finally:
            record.serve_ended = time.monotonic()
            record.stats = driver.stats()
            record.replicas = tuple(map(report_of, fleet.states)) if len(fleet.states) > 1 else ()
            self._progress.close()

    def _nothing_to_do(self, work: _Work, destination: Destination) -> None:
        self._progress.say(f"nothing to do: all {work.rows.num_rows} rows are finished")
        self._signals.defer()
        manifest = manifest_check.manifest_without_model(
            destination, model_name=work.model_folder.name, model_files=work.model_files, input=work.rows.identity
        )
        # No row is added, but the file is repaired, or made for an input that is empty so far.
        destination.begin(manifest).close()

    def _finish(self, file: InputFile, work: _Work, destination: Destination) -> None:
        """Every row is there: put them in order, and make the report."""
        file.refuse_changes()
        destination.finish(work.rows, is_ordered=self._options.ordered)
        if self._places.report is not None:
            most_pixels = self._config.prompts.max_source_pixels
            make_report(self._places.report, self._options, most_pixels, file, work.rows, destination)
            self._progress.say(f"report    {self._places.report.name}")

    def say_summary(self, error: NpuRunnerError | None = None) -> JobSummary:
        """Tell what was done, on the terminal and in the summary's file. After an `error` it raises no second one."""
        summary = self.record.summary(error)
        for line in summary.to_lines():
            self._progress.say(line)
        summary = replace(summary, silence=self._progress.silence)  # these lines may have been the first to be lost
        try:
            if self._places.summary is not None:
                summary.save(self._places.summary)
        except JobError as second:
            if error is None:
                raise
            self._progress.say(str(second))
        return summary
