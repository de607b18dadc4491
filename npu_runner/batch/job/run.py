"""The batch job from its first read of the files to its end. Knows nothing of rows' content or how they are served.

Order matters: everything that can be refused is refused before the model is loaded, and nothing of an earlier run is
changed before the model stands ready.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO, cast

from npu_runner.batch.files.answer_writer import Delivery
from npu_runner.batch.files.destination import Destination
from npu_runner.batch.files.fingerprint import (
    WeightDigests,
    fingerprint_model,
    num_digest_threads,
    refuse_changed_files,
)
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.joined import Joined, unparsed_keys
from npu_runner.batch.files.manifest import RULE_OF_JOB, Manifest, start_time
from npu_runner.batch.files.names import replaced_path
from npu_runner.batch.files.place import Place, find_places, read_by
from npu_runner.batch.files.row_book import CarriedRows, InputScan, RowBook
from npu_runner.batch.files.status_file import Status
from npu_runner.batch.job import manifest_check
from npu_runner.batch.job.copies import EqualRows
from npu_runner.batch.job.driver import Driver, stats_of
from npu_runner.batch.job.history import JobHistory, JobSummary
from npu_runner.batch.job.live import Live
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.job.replica_plan import num_present, planned_replicas
from npu_runner.batch.job.row_server import CheckpointSide, all_refused, check_known_settings, server_plan
from npu_runner.batch.job.signals import Interrupted, StopSignals
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.batch.rows.openai_response import JobStamp
from npu_runner.checkpoint.files import resolve_checkpoint
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, JobError, NpuRunnerError, OutputLostError, TooManyFailuresError
from npu_runner.processes.patient_streams import PatientStream, patient_stderr
from npu_runner.prompts.media.pdf_fonts import fonts_of_host
from npu_runner.serving.options import num_cpus
from npu_runner.serving.replica import FinishedRow
from npu_runner.serving.replicas.fleet import Fleet
from npu_runner.serving.replicas.load_balancer import RowQueue

_VIEWS = ("report", "summary", "metrics_file")
_WRITTEN = ("output", "error_file", *_VIEWS)


@dataclass(frozen=True)
class Views:
    """The views of a run that a command has: files that show each status, and a report of the end."""

    files: Mapping[Path, Callable[[Status], bytes]] = field(default_factory=dict)
    end: Callable[[JobSummary, JobHistory, Progress], None] = lambda summary, history, progress: None
    unit: str = "row"
    """The word for a row in lines of progress."""


def job_places(options: BatchOptions, config: RunnerConfig | None = None) -> dict[str, Place]:
    """The places by their options, before anything starts. Raises ConfigError for a name that cannot be written.

    `config`: the files that it names are no places to write to; None: no model is used.
    """
    named = [(option, getattr(options, option)) for option in _WRITTEN]
    places = find_places(named, read_by(options, *([] if config is None else [config])))
    is_stream = {option: place.is_stream for option, place in places.items()}
    if is_stream.get("metrics_file"):
        raise ConfigError(f"{places['metrics_file'].title}: is a stream, and it is replaced every other second; name a "
                          "file")
    if options.ordered and is_stream["output"]:
        raise ConfigError(f"ordered: {places['output'].title} is a stream, whose rows go out as they finish and cannot "
                          "be sorted afterwards; name a file as output, or leave --ordered out and sort what comes out "
                          "by custom_id")
    if "error_file" in places and is_stream["output"]:
        raise ConfigError(f"{places['error_file'].title}: the output is a stream, and who resumes the one cannot "
                          "resume the other; name a file as output, or leave it out")
    if is_stream.get("error_file"):
        raise ConfigError(f"{places['error_file'].title}: is no file; a stream cannot be resumed")
    return places


def check_settings(config: RunnerConfig, options: BatchOptions) -> None:
    """Raises ConfigError for settings that are wrong whatever the rows, the model and the places are."""
    server_plan(config, options, CarriedRows(options.input))


def run_batch(config: RunnerConfig, options: BatchOptions, *,
              open_model: Callable[[RunnerConfig], CheckpointSide] = CheckpointSide, input: InputFile | None = None,
              views: Views = Views()) -> JobSummary:
    """Answer every row of the input that has no answer yet. Returns its figures, also when a signal cut it short.

    Raises ConfigError for what has to be changed before it can work, JobError and EngineDeadError when the same
    command may simply be run again. `open_model` stands in for a checkpoint and LLMEngine. `input`: the opened input,
    which stays open; None: it is opened by its name. `views.end` is called once, also before an error is raised, if the
    input was read.
    """
    for name in _VIEWS:
        if getattr(options, name) is not None:
            raise ConfigError(f"{name}: run_batch writes none; call npu_runner.reports.report.run_batch_and_report")
    start_time()  # raises ConfigError
    places = job_places(options, config)
    with StopSignals() as signals, _quiet_streams() as stderr:
        progress = Progress(options.progress, stderr, views.unit)
        job = _Job(config, options, places, progress, signals, open_model, input, views)
        try:
            job.run()
        except NpuRunnerError as error:
            if job.summary.is_worth_reporting(error):
                job.end(error)
            raise
        finally:
            progress.close()
        return job.end()


@contextlib.contextmanager
def _quiet_streams() -> Iterator[PatientStream]:
    """Within, whatever is printed goes to a standard error that raises nothing: no words of a library end a job."""
    with patient_stderr() as stderr, contextlib.redirect_stdout(cast(TextIO, stderr)):
        yield stderr


class _Job:
    """`run` holds the output and does all of it, step by step; `summary` has the figures, wherever it ends."""

    _file: InputFile
    _rows: InputScan
    _book: RowBook
    """The rows to be answered."""
    _equal: EqualRows
    _find_equal: Callable[[], EqualRows]
    _model_folder: Path
    _new: Manifest
    """The state if the output had no earlier runs."""

    def __init__(self, config: RunnerConfig, options: BatchOptions, places: dict[str, Place], progress: Progress,
                 signals: StopSignals, open_model: Callable[[RunnerConfig], CheckpointSide],
                 input: InputFile | None, views: Views):
        self._config = config
        self._options = options
        self._progress = progress
        self._signals = signals
        self._open_model = open_model
        self._input = input
        self._views = views
        self._output = Destination(places["output"], overwrite=options.overwrite, errors=places.get("error_file"))
        self.summary = JobSummary()
        self._history = JobHistory(self.summary, progress.say)
        self._live = Live(self.summary, self._history, progress.say)
        self._failure_limit = options.failure_limit
        self._fails_too_often = self._retries_errors = False

    def run(self) -> None:
        """With the output locked: read, plan, answer."""
        output = self._output
        try:
            with output:
                self._history.read(output.state, output.path, overwrite=self._options.overwrite)
                with self._live.writing(output.path, self._views.files), self._signals.interrupting():
                    output.scan()
                    with self._open_input() as self._file:
                        self._plan()
                        with self._history.ending(), self._counting_anew():
                            if not self._book.num_rows:
                                self._finish_without_rows()
                            elif not self._are_all_copies() and not self._are_all_refused_again():
                                self._refuse_earlier_failures()
                                self._serve()
                            if not self.summary.is_cut_short:
                                self._finish()
        except Interrupted as signal:
            self.summary.is_interrupted = True
            raise JobError(f"interrupted by {signal} before the first row; the same command starts again") from None

    @contextlib.contextmanager
    def _counting_anew(self) -> Iterator[None]:
        """If the output is lost, the rows that are still there count, whichever run wrote them."""
        try:
            yield
        except OutputLostError:
            self.summary.tally, self.summary.kept = Counts(), self._output.counts_now()
            self.summary.num_resumed = self.summary.kept.num_done
            raise

    def _open_input(self) -> AbstractContextManager[InputFile]:
        if self._input is not None:
            return contextlib.nullcontext(self._input)
        path = self._output.path
        return InputFile(self._options.input, None if path is None else path.parent)

    def _plan(self) -> None:
        """Everything that can be refused before a model is loaded is refused here."""
        output, file, earlier = self._output, self._file, self._output.earlier
        self._rows = rows = file.scan(earlier.input if earlier else None, with_equal=self._options.copy_equal_rows)
        if not rows.num_rows:
            raise ConfigError(f"input {file.name}: it has no row; whatever was to write it has written nothing, or not "
                              "there")
        self._decide_retry()
        manifest_check.refuse_another_input(output, file, rows, retry=self._options.retried)
        self._model_folder = resolve_checkpoint(self._config.model, self._config.revision)
        self._new = Manifest(created=start_time(), model_name=self._model_folder.name, settings={}, input=rows.identity,
                             model_files=fingerprint_model(self._model_folder))
        # The folder that was read, whatever a hub id stands for a moment later.
        self._config = self._config.replace(model=str(self._model_folder), revision=None)
        manifest_check.refuse_another_model(output, self._new.model_files)
        finished = output.finished(rows)
        self._book = RowBook(rows, ~finished, file.source)
        is_answered_E = output.answered(rows.keys[rows.equal_E])
        if earlier is None or earlier.changes or self._options.accept_changed or self._options.retried:
            is_answered_E[:] = False  # other settings may have made those answers
        self._find_equal = functools.partial(EqualRows.from_scan, self._book, rows, is_answered_E,
                                             self._options.max_row_bytes)
        self._equal = self._find_equal()
        self.summary.num_resumed, self.summary.kept = int(finished.sum()), output.kept_counts()
        self.summary.num_rows = rows.num_rows

    def _decide_retry(self) -> None:
        output, requested = self._output, self._options.retried
        decided = output.retry(requested, self._rows)
        kept, limit = output.kept_counts(), self._failure_limit
        if Flaw.ERRORS in requested and limit is not None and limit.is_exceeded(kept.num_failed, kept.num_done):
            decided |= Flaw.ERRORS  # a run that was cut short by its failures has to try them again
        unparsed = None
        if Flaw.UNPARSED in decided and output.earlier is not None:
            joined = Joined(self._file, self._rows, output.rows, self._options.max_row_bytes)
            unparsed = unparsed_keys(joined, self._rows, RULE_OF_JOB in output.earlier.settings)
        output.decide(decided, unparsed)
        self._retries_errors = Flaw.ERRORS in decided

    def _are_all_copies(self) -> bool:
        """Whether all rows that are left equal answered ones: they are written without a model."""
        def copies(equal: EqualRows) -> Iterator[tuple[int, FinishedRow | None]]:
            equal.read_earlier(self._output.rows, self._rows.keys, settings,
                               with_cached_tokens=self._options.cached_tokens)
            return equal.copies(self._book.num_rows)

        earlier, num_rows = self._output.earlier, self._book.num_rows
        if earlier is None or not self._equal.is_all or self._options.ray is not None:
            return False
        settings = earlier.settings
        if any(row is None for _, row in copies(self._find_equal())):
            return False
        config = manifest_check.config_to_go_on_with(self._config, earlier)
        check_known_settings(server_plan(config, self._options, self._file.source, self._open_model), self._check)
        self._say_without_model(f"no model is loaded: {num_rows} rows equal answered ones")
        delivery = self._start_writing(manifest_check.manifest_without_model(self._output, self._new))
        self.summary.serve_began = time.monotonic()
        with delivery:
            for _, row in copies(self._equal):
                if self._signals.is_requested:
                    break
                assert row is not None, "the answers were read before"
                delivery.put(row)
        self.summary.serve_ended = time.monotonic()
        return True

    def _are_all_refused_again(self) -> bool:
        """Whether only failed rows are left, to be tried again, and preprocessing refuses all: their errors are written
        without a model.

        Where rows are read on other hosts, only those know what is refused.
        """
        earlier, book = self._output.earlier, self._book
        if earlier is None or book.num_rows != self._output.num_retried_failures() or self._options.ray is not None:
            return False
        config = manifest_check.config_to_go_on_with(self._config, earlier)
        plan = server_plan(config, self._options, self._file.source, self._open_model)
        with all_refused(plan, book, self._check) as refused:
            if refused is None:
                return False
            self.summary.num_workers = plan.limits.num_workers
            self._say_without_model(f"no model is loaded: preprocessing refuses all {book.num_rows} rows")
            delivery = self._start_writing(manifest_check.manifest_without_model(self._output, self._new))
            self.summary.serve_began = time.monotonic()
            with delivery:
                for row in refused:
                    delivery.put(row)
            self.summary.serve_ended = time.monotonic()
        return True

    @property
    def _check(self) -> manifest_check.CheckSettings:
        """Refuses settings that are known before the weights load."""
        return functools.partial(manifest_check.refuse_other_settings, self._output, **self._accepted)

    @property
    def _accepted(self) -> dict[str, Any]:
        return {"accept": self._options.accept_changed, "is_retry": bool(self._options.retried),
                "renderer": self._renderer}

    @functools.cached_property
    def _renderer(self) -> Mapping[str, str]:
        """This host's, if pages of PDFs are rendered here and the output has some; {}: it is not known."""
        if self._options.ray is not None or not manifest_check.renderer_of(self._output.earlier):
            return {}
        fonts = fonts_of_host()
        return {} if fonts is None else fonts.renderer

    def _serve(self) -> None:
        options, summary, output, book = self._options, self.summary, self._output, self._book
        self._history.start()
        if summary.num_resumed:
            self._progress.say(f"resuming: {summary.num_resumed} of {self._rows.num_rows} rows are finished")
        if num_replaced := output.num_replaced():
            self._progress.say(f"retry: {num_replaced} answers are replaced; copies go to "
                               f"{replaced_path(Path(output.name)).name}")
        self._report_loading(f"opening {self._model_folder.name}")
        config = manifest_check.config_to_go_on_with(self._config, output.earlier)
        queue = RowQueue(book.num_rows)
        with planned_replicas(config, options, self._file.source, self._open_model) as plan:
            summary.num_workers = round(plan.workers_each * len(plan.replicas))
            if plan.notice is not None:
                self._progress.say(plan.notice)
            driver = Driver(book, {} if output.earlier is None else output.earlier.suspects,
                            retry_errors=self._retries_errors,
                            save_suspects=lambda rows: output.state.update(suspects=rows), say=self._progress.say,
                            check=self._check,
                            check_renderer=functools.partial(manifest_check.check_renderer, output.state),
                            loading=self._report_loading, rows_carry_data=plan.rows_carry_data, equal=self._equal)
            with Fleet(plan.replicas, queue, driver, max_restarts=plan.max_restarts, scale_up=plan.scale_up,
                       given_up=driver.known_suspects(queue)) as fleet:
                self._live.fleet = fleet
                self._hold(lambda: len(plan.replicas))
                manifest = self._load(fleet, manifest_check.explain_memory(self._config, config, output))
                delivery = self._start_writing(replace(manifest, suspects=dict(driver.suspects)))
                self._hold(lambda: num_present(fleet.states))
                fleet.serve(self._stamp(manifest))
                if self._equal.has_earlier:
                    self._equal.read_earlier(output.rows, self._rows.keys, manifest.settings,
                                             with_cached_tokens=options.cached_tokens)
                try:
                    with self._serving(fleet, delivery):
                        driver.run(fleet, delivery, functools.partial(self._should_stop, fleet),
                                   functools.partial(self._report_progress, fleet))
                finally:
                    summary.num_workers = round(plan.workers_each * len(fleet.states))

    def _load(self, fleet: Fleet, explain_memory: AbstractContextManager[None]) -> Manifest:
        """Have the replicas load while the weights are hashed. Returns the manifest of what they serve."""
        folder = self._model_folder
        with WeightDigests(folder, num_threads=num_digest_threads(num_cpus())) as digests:
            try:
                with explain_memory:
                    facts = fleet.load()
            finally:
                self._hold(lambda: len(fleet.states))
                self._live.measure()
            refuse_changed_files(folder, self._new.model_files)
            self.summary.start_phases, self.summary.platform = facts.start_seconds, facts.settings.get("platform")
            shown = ", ".join(f"{name} {value}" for name, value in facts.settings.items() if "." not in name)
            self._progress.say(f"model {folder}: {shown}\n{facts.ledger}")
            if not digests.is_done:
                self._progress.say("the model is ready; waiting until its weights are hashed")
            new = replace(self._new, weights=digests.lines())
            return manifest_check.manifest_of(self._output, new, facts, **self._accepted)

    def _start_writing(self, manifest: Manifest) -> Delivery:
        # From here on a signal lets the step under way end, and then the job.
        self._signals.defer()
        self._history.is_counted = self._book.num_rows > 0
        return self._output.open_writers(replace(manifest, runs=self._history.runs), self.summary.tally,
                                         keeps_rows=self._equal.has_earlier)

    def _stamp(self, manifest: Manifest) -> JobStamp:
        return JobStamp(
            created=manifest.created, system_fingerprint=manifest.system_fingerprint, model_name=manifest.model_name,
            splits_reasoning="prompts.reasoning_tokens" in manifest.settings,
            with_cached_tokens=self._options.cached_tokens)

    @contextlib.contextmanager
    def _serving(self, fleet: Fleet, delivery: Delivery) -> Iterator[None]:
        summary = self.summary
        summary.serve_began = time.monotonic()
        try:
            with delivery:
                self._progress.start(summary.num_rows or 0, summary.num_resumed)
                self._live.enter("serving")
                yield
            self._progress.update(summary.tally, lambda: stats_of(fleet).engine, is_last=True)
            if summary.is_cut_short and self._fails_too_often:
                raise self._too_many_failures()
        finally:
            summary.serve_ended = time.monotonic()
            self._live.measure()
            summary.replicas = tuple(fleet.states) if len(fleet.states) > 1 else ()
            self._progress.close()

    def _report_progress(self, fleet: Fleet) -> None:
        self._progress.update(self.summary.tally, lambda: stats_of(fleet).engine)
        self._live.beat()

    def _should_stop(self, fleet: Fleet) -> bool:
        if self._failure_limit is not None and not self._fails_too_often:
            rows = self._rows_done
            # With the rows that engines have: counting them visits each replica, so the limit is held against the
            # others alone before.
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
            "again with --retry errors, or raise the limit")

    def _report_loading(self, phase: str) -> None:
        self._progress.loading(phase)
        self._live.enter("loading", phase)

    def _hold(self, num_replicas: Callable[[], int]) -> None:
        """From here on the run holds the devices of this number of replicas."""
        self._live.num_held = lambda: num_replicas() * self._config.parallel.tensor_parallel_size

    def _finish_without_rows(self) -> None:
        """No row is added, but the file is repaired."""
        self._say_without_model(f"nothing to do: all {self._rows.num_rows} rows are finished")
        with self._start_writing(manifest_check.manifest_without_model(self._output, self._new)):
            pass

    def _say_without_model(self, line: str) -> None:
        names = ", ".join(self._options.accept_changed)
        self._progress.say(f"{line}; accept_changed {names}: without effect, the manifest's settings stay" if names
                           else line)

    def _finish(self) -> None:
        """Every row is there: put them in order."""
        self._file.refuse_changes()
        self._live.enter("ordering")
        if self._options.ordered:
            self._output.sort(self._rows)
        self._history.is_complete = True

    def end(self, error: NpuRunnerError | None = None) -> JobSummary:
        """Have the end reported. After an `error` it raises no second one."""
        summary = self.summary
        summary.error = error
        summary.is_interrupted |= error is None and summary.is_cut_short
        try:
            self._views.end(summary, self._history, self._progress)
        except JobError as second:
            if error is None:
                raise
            self._progress.say(str(second))
        return summary
