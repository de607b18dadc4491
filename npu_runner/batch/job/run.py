"""The batch job from its first look at the files to its summary. Knows nothing of what is in a row or how it is served.

Order matters: everything that can be refused is refused before the model is loaded, and nothing of an earlier run is
changed before the model stands ready.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from npu_runner.batch.files.destination import Destination, Writers
from npu_runner.batch.files.fingerprint import WeightDigests, fingerprint_model, refuse_changed_files
from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.joined import Joined, unparsed_keys
from npu_runner.batch.files.manifest import RULE_OF_JOB, Manifest, start_time
from npu_runner.batch.files.names import replaced_path
from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.files.suspects import Suspects
from npu_runner.batch.job import manifest_check
from npu_runner.batch.job.driver import Delivery, Driver, engine_stats
from npu_runner.batch.job.history import JobHistory
from npu_runner.batch.job.live import Live
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.places import Places, find_places
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.job.replica_plan import local_plan, num_present, planned_replicas
from npu_runner.batch.job.row_server import CheckpointSide
from npu_runner.batch.job.screening import RefusedRows
from npu_runner.batch.job.signals import Interrupted, StopSignals
from npu_runner.batch.job.summary import JobSummary
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.batch.rows.openai_response import JobStamp
from npu_runner.checkpoint.files import resolve_checkpoint
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, JobError, NpuRunnerError, OutputLostError, TooManyFailuresError
from npu_runner.processes.patient_streams import PatientStream, patient_stderr
from npu_runner.serving.options import num_cpus
from npu_runner.serving.replicas.fleet import Fleet
from npu_runner.serving.replicas.load_balancer import RowQueue

_MAX_DIGEST_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What is to do."""

    rows: InputScan
    wanted: np.ndarray
    model_folder: Path
    model_files: dict[str, str]


def run_batch(config: RunnerConfig, options: BatchOptions, *,
              open_model: Callable[[RunnerConfig], CheckpointSide] = CheckpointSide,
              input: InputFile | None = None) -> JobSummary:
    """Answer every row of the input that has no answer yet. Returns what was done, also when a signal cut it short.

    Raises ConfigError for what has to be changed before it can work, JobError and EngineDeadError when the same
    command may simply be run again. Of a job that ended so after its input was read there is a summary as well.
    `open_model` stands in for a checkpoint and LLMEngine. `input`: the opened input, which stays open; None: it is
    opened by its name.
    """
    if options.report is not None:
        raise ConfigError("report: run_batch makes no report; call npu_runner.reports.report.run_batch_and_report")
    start_time()  # raises ConfigError
    places = find_places(options, config)
    with StopSignals() as signals, _quiet_streams() as stderr, places.beside_the_answers():
        progress = Progress(options.progress, stderr)
        job = _Job(config, options, places, progress, signals, open_model, input)
        try:
            job.run()
        except NpuRunnerError as error:
            if job.summary.is_worth_saying(error):
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
    """`run` holds the output and does all of it, step by step; `summary` has what was done, wherever it ends."""

    def __init__(self, config: RunnerConfig, options: BatchOptions, places: Places, progress: Progress,
                 signals: StopSignals, open_model: Callable[[RunnerConfig], CheckpointSide],
                 input: InputFile | None):
        self._config = config
        self._options = options
        self._places = places
        self._progress = progress
        self._signals = signals
        self._open_model = open_model
        self._input = input
        self.summary = JobSummary()
        self.history = JobHistory(self.summary, progress.say)
        self.live = Live(self.summary, self.history, progress.say)
        self._failure_limit = options.failure_limit
        self._fails_too_often = self._retries_errors = False

    def run(self) -> None:
        """With the output locked: look, plan, answer."""
        places, options = self._places, self._options
        destination = Destination(places.output, overwrite=options.overwrite, errors=places.error_file)
        metrics = None if places.metrics_file is None else places.metrics_file.path
        try:
            with destination:
                self.history.read(destination.state, destination.path, overwrite=options.overwrite)
                with self.live.told(destination.path, metrics), self._signals.interrupting():
                    destination.scan()
                    with self._open_input(destination) as file:
                        work = self._plan(file, destination)
                        with self.history.ending():
                            self._answer(file, work, destination)
        except Interrupted as signal:
            self.summary.is_interrupted = True
            raise JobError(f"interrupted by {signal} before the first row; the same command starts again") from None

    def _answer(self, file: InputFile, work: _Work, destination: Destination) -> None:
        """The rows that were planned, as far as they are wanted."""
        try:
            if not work.wanted.any():
                self._nothing_to_do(work, destination)
            elif not self._all_are_refused_again(file, work, destination):
                self._refuse_earlier_failures()
                self._serve(file, work, destination)
            if not self.summary.is_cut_short:
                self._finish(file, work, destination)
        except OutputLostError:
            # Whoever wrote them, runs before or this one: what counts is what is still there.
            self.summary.tally, self.summary.kept = Counts(), destination.counts_now()
            self.summary.num_resumed = self.summary.kept.num_done
            raise

    def _open_input(self, destination: Destination) -> AbstractContextManager[InputFile]:
        if self._input is not None:
            return contextlib.nullcontext(self._input)
        path = destination.path
        return InputFile(self._options.input, None if path is None else path.parent)

    def _plan(self, file: InputFile, destination: Destination) -> _Work:
        """Everything that can be refused before a model is loaded is refused here."""
        earlier = destination.earlier
        rows = file.scan(earlier.input if earlier else None)
        if not rows.num_rows:
            raise ConfigError(f"input {file.name}: it has no row; whatever was to write it has written nothing, or not "
                              "there")
        self._decide_retry(file, rows, destination)
        manifest_check.refuse_another_input(destination, file, rows, retry=self._options.retried)
        folder = resolve_checkpoint(self._config.model, self._config.revision)
        files = fingerprint_model(folder)
        manifest_check.refuse_another_model(destination, files)
        finished = destination.finished(rows)
        self.summary.num_resumed, self.summary.kept = int(finished.sum()), destination.kept_counts()
        self.summary.num_rows = rows.num_rows
        return _Work(rows=rows, wanted=~finished, model_folder=folder, model_files=files)

    def _decide_retry(self, file: InputFile, rows: InputScan, destination: Destination) -> None:
        """Which rows of earlier runs are tried again."""
        asked = self._options.retried
        decided = destination.retry(asked, rows)
        kept, limit = destination.kept_counts(), self._failure_limit
        if Flaw.ERRORS in asked and limit is not None and limit.is_exceeded(kept.num_failed, kept.num_done):
            decided |= Flaw.ERRORS  # a run that was cut short by its failures has to try them again
        unparsed = None
        if Flaw.UNPARSED in decided and destination.earlier is not None:
            has_rule = RULE_OF_JOB in destination.earlier.settings
            joined = Joined(file, rows, destination.rows, self._options.max_row_bytes)
            unparsed = unparsed_keys(joined, rows, has_rule)
        destination.decide(decided, unparsed)
        self._retries_errors = Flaw.ERRORS in decided

    def _all_are_refused_again(self, file: InputFile, work: _Work, destination: Destination) -> bool:
        """Whether only failed rows are left, to be tried again, and preprocessing refuses all: their errors are written
        without a model.

        Where rows are read on other hosts, only those know what is refused.
        """
        earlier, options = destination.earlier, self._options
        are_left = int(work.wanted.sum()) == destination.num_retried_failures()
        if earlier is None or not are_left or options.ray is not None:
            return False
        book = RowBook(work.rows, work.wanted, file.source)
        config = manifest_check.config_to_go_on_with(self._config_of(work), earlier)
        plan = local_plan(config, options, file.source, self._open_model)
        with contextlib.closing(RefusedRows()) as refused:
            if not refused.add_all(plan, book, self._check(destination)):
                return False
            self.summary.num_workers = plan.limits.num_workers
            self._say_without_model(f"no model is loaded: preprocessing refuses all {book.num_rows} rows")
            self._signals.defer()
            self.history.is_counted = True
            self._write_refused(refused, self._begin(destination, earlier.with_input(work.rows.identity)))
        return True

    def _write_refused(self, refused: RefusedRows, writers: Writers) -> None:
        record = self.summary
        record.serve_began = time.monotonic()
        with Delivery(writers, record.tally) as delivery:
            for row in refused:
                delivery.put(row)
        record.serve_ended = time.monotonic()

    def _check(self, destination: Destination) -> Callable[[Mapping[str, Any]], None]:
        """Of settings that are known before the weights load."""
        return functools.partial(manifest_check.refuse_other_settings, destination, accept=self._options.accept_changed,
                                 is_retry=bool(self._options.retried))

    def _config_of(self, work: _Work) -> RunnerConfig:
        """Of the folder that was looked at, whatever a hub id stands for a moment later."""
        return self._config.replace(model=str(work.model_folder), revision=None)

    def _serve(self, file: InputFile, work: _Work, destination: Destination) -> None:
        """Load replicas of the model, and have them answer the rows that are wanted."""
        options, record = self._options, self.summary
        self.history.start()
        if record.num_resumed:
            self._progress.say(f"resuming: {record.num_resumed} of {work.rows.num_rows} rows are finished")
        if num_replaced := destination.num_replaced():
            self._progress.say(f"retry: {num_replaced} answers are replaced; copies go to "
                               f"{replaced_path(Path(destination.name)).name}")
        self._loading(f"opening {work.model_folder.name}")
        given = self._config_of(work)
        taken = manifest_check.config_to_go_on_with(given, destination.earlier)
        book = RowBook(work.rows, work.wanted, file.source)
        earlier = destination.earlier
        suspects = Suspects({} if earlier is None else earlier.suspects,
                            lambda rows: destination.state.update(suspects=dict(rows)),
                            retry_errors=self._retries_errors)
        queue = RowQueue(book.num_rows)
        with planned_replicas(taken, options, file.source, self._open_model) as plan:
            record.num_workers = round(plan.workers_each * len(plan.replicas))
            if plan.notice is not None:
                self._progress.say(plan.notice)
            driver = Driver(book, suspects, self._progress, check=self._check(destination), loading=self._loading,
                            rows_carry_data=plan.rows_carry_data)
            with Fleet(plan.replicas, queue, driver, max_restarts=plan.max_restarts, scale_up=plan.scale_up,
                       given_up=driver.known_suspects(queue)) as fleet:
                self.live.fleet = fleet
                self._hold(lambda: len(plan.replicas))
                manifest = self._load(fleet, work, destination, manifest_check.loading(given, taken, destination))
                # From here on a signal lets the step under way end, and then the job.
                self._signals.defer()
                self.history.is_counted = True
                writers = self._begin(destination, replace(manifest, suspects=dict(suspects.rows)))
                self._hold(lambda: num_present(fleet.states))
                fleet.serve(self._stamp(manifest))
                try:
                    delivery = Delivery(writers, record.tally)
                    with self._serving(fleet, delivery):
                        driver.run(fleet, delivery, record.tally, functools.partial(self._should_stop, fleet),
                                   self.live.beat)
                finally:
                    record.num_workers = round(plan.workers_each * len(fleet.states))

    def _load(self, fleet: Fleet, work: _Work, destination: Destination,
              loading: AbstractContextManager[None]) -> Manifest:
        """Have the replicas load while the weights are hashed. Returns the manifest of what they serve."""
        num_threads = max(1, min(_MAX_DIGEST_THREADS, num_cpus() // 2))
        with WeightDigests(work.model_folder, num_threads=num_threads) as digests:
            try:
                with loading:
                    facts = fleet.load()
            finally:
                self._hold(lambda: len(fleet.states))
                self.live.measure()
            refuse_changed_files(work.model_folder, work.model_files)
            self.summary.start_phases, self.summary.platform = facts.start_seconds, facts.settings.get("platform")
            shown = ", ".join(f"{name} {value}" for name, value in facts.settings.items() if "." not in name)
            self._progress.say(f"model {work.model_folder}: {shown}\n{facts.ledger}")
            if not digests.is_done:
                self._progress.say("the model is ready; waiting until its weights are hashed")
            return manifest_check.manifest_of(
                destination, facts, model_name=work.model_folder.name, model_files=work.model_files,
                weights=digests.lines(), input=work.rows.identity, accept=self._options.accept_changed,
                is_retry=bool(self._options.retried))

    def _begin(self, destination: Destination, manifest: Manifest) -> Writers:
        return destination.open_writers(replace(manifest, runs=self.history.runs))

    def _stamp(self, manifest: Manifest) -> JobStamp:
        return JobStamp(
            created=manifest.created,
            system_fingerprint=manifest.system_fingerprint,
            model_name=manifest.model_name,
            splits_reasoning="prompts.reasoning_tokens" in manifest.settings,
            with_cached_tokens=self._options.cached_tokens)

    @contextlib.contextmanager
    def _serving(self, fleet: Fleet, delivery: Delivery) -> Iterator[None]:
        """Within this context, rows are served."""
        record = self.summary
        record.serve_began = time.monotonic()
        try:
            with delivery:
                self._progress.start(record.num_rows or 0, record.num_resumed)
                self.live.enter("serving")
                yield
            self._progress.update(record.tally, functools.partial(engine_stats, fleet), is_last=True)
            if record.is_cut_short and self._fails_too_often:
                raise self._too_many_failures()
        finally:
            record.serve_ended = time.monotonic()
            self.live.measure()
            record.replicas = tuple(fleet.states) if len(fleet.states) > 1 else ()
            self._progress.close()

    def _should_stop(self, fleet: Fleet) -> bool:
        if self._failure_limit is not None and not self._fails_too_often:
            rows = self._rows_done
            # With the rows that engines have: they take a look at each replica, so the limit is held against the others
            # alone before.
            self._fails_too_often = self._failure_limit.is_exceeded(*rows) and self._failure_limit.is_exceeded(
                *rows, sum(len(state.started) for state in fleet.states))
        return self._signals.is_requested or self._fails_too_often

    @property
    def _rows_done(self) -> tuple[int, int]:
        """Failed rows, and all, of all runs, in the output."""
        summary = self.summary
        return summary.kept.num_failed + summary.tally.num_failed, summary.num_resumed + summary.tally.num_done

    def _refuse_earlier_failures(self) -> None:
        """Before a model is loaded for rows that the limit would not let be served."""
        if self._failure_limit is not None and self._failure_limit.is_exceeded(*self._rows_done):
            raise self._too_many_failures()

    def _too_many_failures(self) -> TooManyFailuresError:
        num_failed, num_done = self._rows_done
        return TooManyFailuresError(
            f"{num_failed} of {num_done} finished rows have failed, more than --max-failures "
            f"{self._options.max_failures} allows: ended early. Finished rows are kept; mend what fails and try it "
            "again with --retry-errors, or raise the limit")

    def _loading(self, doing: str) -> None:
        self._progress.loading(doing)
        self.live.enter("loading", doing)

    def _hold(self, num_replicas: Callable[[], int]) -> None:
        """From here on the run holds the devices of this number of replicas."""
        self.live.num_held = lambda: num_replicas() * self._config.parallel.tensor_parallel_size

    def _nothing_to_do(self, work: _Work, destination: Destination) -> None:
        self._say_without_model(f"nothing to do: all {work.rows.num_rows} rows are finished")
        self._signals.defer()
        manifest = manifest_check.manifest_without_model(
            destination, model_name=work.model_folder.name, model_files=work.model_files, input=work.rows.identity)
        # No row is added, but the file is repaired.
        self._begin(destination, manifest).close()

    def _say_without_model(self, line: str) -> None:
        names = ", ".join(self._options.accept_changed)
        self._progress.say(f"{line}; accept_changed {names}: without effect, the manifest's settings stay" if names
                           else line)

    def _finish(self, file: InputFile, work: _Work, destination: Destination) -> None:
        """Every row is there: put them in order."""
        file.refuse_changes()
        self.live.enter("ordering")
        if self._options.ordered:
            destination.sort(work.rows)
        self.history.is_complete = True

    def say_summary(self, error: NpuRunnerError | None = None) -> JobSummary:
        """Tell what was done, on the terminal and in the summary's file. After an `error` it raises no second one."""
        summary, output = self.summary, self._places.output.name
        summary.error = error
        summary.is_interrupted |= error is None and summary.is_cut_short
        for line in [*summary.to_lines(), *self.history.lines(output)]:
            self._progress.say(line, is_last=True)
        summary.silence = self._progress.silence  # these lines may have been the first to be lost
        try:
            if self._places.summary is not None:
                self.history.write(self._places.summary, output)
        except JobError as second:
            if error is None:
                raise
            self._progress.say(str(second))
        return summary
