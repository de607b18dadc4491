"""The batch job from its first look at the files to its summary. Knows nothing of what is in a row or how it is served.

Order matters: everything that can be refused is refused before the model is loaded, and nothing of an earlier run is
changed before the model stands ready.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.destination import Destination, open_destination
from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, replacing
from npu_runner.batch.files.fingerprint import WeightDigests, fingerprint_model
from npu_runner.batch.files.input_file import STANDARD_STREAM, InputFile, InputScan
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.suspects import Suspects
from npu_runner.batch.job import delivery, making
from npu_runner.batch.job.delivery import Delivery, OrderedDelivery
from npu_runner.batch.job.model_side import CheckpointSide, ModelSide
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.job.report import write_report
from npu_runner.batch.job.serving import ServingLoop
from npu_runner.batch.job.signals import Interrupted, StopSignals
from npu_runner.batch.job.tally import JobSummary, Tally
from npu_runner.batch.job.thumbnails import ThumbnailMaker
from npu_runner.batch.rows.input_row import InputRow
from npu_runner.batch.rows.openai_response import JobStamp
from npu_runner.batch.rows.preprocessing import RowPreprocessor
from npu_runner.checkpoint import resolve_checkpoint
from npu_runner.config import RunnerConfig
from npu_runner.engine.waiting import max_waiting_requests
from npu_runner.errors import ConfigError, JobError, NpuRunnerError, OutputLostError
from npu_runner.multimodal.media import MediaRules
from npu_runner.outputs import EngineStats
from npu_runner.workers.options import num_cpus
from npu_runner.workers.pool import PoolLimits, WorkerPool

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
    progress = Progress(options.progress)
    _check_names(options)
    with StopSignals() as signals:
        job = _Job(config, options, progress, signals, open_model)
        try:
            _run_locked(job, options, signals)
        except NpuRunnerError as error:
            if job.has_something_to_say(error):
                job.say_summary(error)
            raise
        finally:
            progress.close()
        return job.say_summary()


def _run_locked(job: _Job, options: BatchOptions, signals: StopSignals) -> None:
    destination = open_destination(options.output, overwrite=options.overwrite, retry_errors=options.retry_errors)
    try:
        with destination, signals.interrupting():
            job.run(destination)
    except Interrupted as signal:
        raise JobError(f"interrupted by {signal} before the first row; the same command starts again") from None


class _Job:
    def __init__(
        self,
        config: RunnerConfig,
        options: BatchOptions,
        progress: Progress,
        signals: StopSignals,
        open_model: Callable[[RunnerConfig], ModelSide],
    ):
        self._config = config
        self._options = options
        self._progress = progress
        self._signals = signals
        self._open_model = open_model
        self._tally = Tally()
        self._started = time.monotonic()
        self._serve_began: float | None = None
        self._serve_ended: float | None = None
        self._work: _Work | None = None
        self._num_resumed = self._num_failed_kept = 0
        self._stats = EngineStats()
        self._num_replaced = 0

    def run(self, destination: Destination) -> None:
        destination.look()
        if self._options.report is not None and destination.path is None:
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
        making.refuse_another_model(destination, files)
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
            self._report(file, work.rows, destination)

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
        taken = making.config_to_go_on_with(given, destination.earlier)
        model = self._open_model(taken)
        # Workers prepare the first rows while the model loads, and its weights are hashed.
        with (
            self._start_pool(model, file, work.wanted, destination) as pool,
            self._digests(work) as digests,
            making.load(model, given, taken, destination) as engine,
        ):
            pool.raise_failure()
            facts = ", ".join(f"{name} {value}" for name, value in engine.describe().items())
            self._progress.say(f"model {work.model_folder}: {facts}\n{engine.ledger}")
            if not digests.is_done:
                self._progress.say("the model is ready; waiting until its weights are hashed")
            manifest = making.manifest_of(
                destination, model, engine, model_name=work.model_folder.name, model_files=work.model_files,
                weights=digests.lines(), input=work.rows.identity,
            )  # fmt: skip
            # From here on a signal lets the step under way end, and then the job.
            self._signals.defer()
            self._serve_rows(engine, pool, destination, manifest, file)

    def _digests(self, work: _Work) -> WeightDigests:
        return WeightDigests(work.model_folder, num_threads=max(1, min(_MAX_DIGEST_THREADS, num_cpus() // 2)))

    def _serve_rows(
        self, engine: Any, pool: WorkerPool[InputRow], destination: Destination, manifest: Manifest, file: InputFile
    ) -> None:
        assert self._work is not None, "no work was planned yet"
        writer = destination.begin(manifest)
        suspects = Suspects(destination.path, overwrite=self._options.overwrite)
        self._serve_began = time.monotonic()
        try:
            with self._delivery(writer, pool) as rows_out:
                self._progress.start(self._work.rows.num_rows, self._num_resumed)
                ServingLoop(
                    engine,
                    pool,
                    rows_out,
                    name_of=file.source.name,
                    stamp=self._stamp(manifest),
                    tally=self._tally,
                    progress=self._progress,
                    should_stop=lambda: self._signals.is_requested,
                    suspects=suspects,
                ).run()
            self._progress.update(self._tally, engine.stats, is_last=True)
            if not self._is_cut_short:
                suspects.clear()
        finally:
            self._serve_ended = time.monotonic()
            self._stats, self._num_replaced = replace(engine.stats()), pool.num_replaced
            self._progress.close()

    def _delivery(self, writer: AnswerWriter, pool: WorkerPool[InputRow]) -> Delivery:
        # A file is put in order when all of its rows are there; only a stream has to keep to it.
        if self._options.ordered and writer.is_stream:
            return OrderedDelivery(writer, self._tally, pool.allow)
        return Delivery(writer, self._tally)

    def _stamp(self, manifest: Manifest) -> JobStamp:
        return JobStamp(
            created=manifest.created,
            system_fingerprint=manifest.system_fingerprint,
            model_name=manifest.model_name,
            splits_reasoning="prompts.reasoning_tokens" in manifest.settings,
            with_cached_tokens=self._options.cached_tokens,
        )

    def _start_pool(
        self, model: ModelSide, file: InputFile, wanted: np.ndarray, destination: Destination
    ) -> WorkerPool[InputRow]:
        options, folder = self._options, self._options.allowed_media_dir
        preprocessor = RowPreprocessor(
            source=file.source,
            processor=model.processor,
            media=MediaRules(
                allowed_dir=None if folder is None else folder.resolve(),
                max_images=self._config.max_images_per_prompt,
                max_bytes=options.max_media_bytes,
                max_total_bytes=options.max_prompt_media_bytes,
            ),
            max_row_bytes=options.max_row_bytes,
            generation_defaults=dict(model.generation_defaults),
            seed=self._config.seed,
        )
        is_windowed = self._options.ordered and destination.path is None
        limits = PoolLimits(
            num_workers=options.num_workers,
            task_timeout_seconds=options.preprocessing_timeout,
            worker_memory_bytes=options.worker_memory_bytes,
            # Without a setting the platform's default counts, which is none above 256.
            max_ready=max_waiting_requests(self._config.max_num_seqs or 0),
            max_tasks=delivery.MAX_ROWS_OUT_OF_ORDER if is_windowed else float("inf"),
        )
        return WorkerPool(preprocessor, file.rows(wanted), limits, [file.source.descriptor])

    def _nothing_to_do(self, work: _Work, destination: Destination) -> None:
        self._progress.say(f"nothing to do: all {work.rows.num_rows} rows are finished")
        self._signals.defer()
        manifest = making.manifest_without_model(
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
        try:
            if self._options.summary is not None:
                _write_json(self._options.summary, summary.to_json())
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
            stats=self._stats,
            start_seconds=began - self._started,
            serve_seconds=ended - began,
            num_workers=self._options.num_workers,
            num_workers_replaced=self._num_replaced,
            is_interrupted=error is None and self._is_cut_short,
            error=error,
        )

    def _report(self, file: InputFile, rows: InputScan, destination: Destination) -> None:
        if self._options.report is None:
            return
        assert destination.path is not None, "refused at the start"
        options = self._options
        worker = PoolLimits(
            num_workers=1,
            task_timeout_seconds=options.preprocessing_timeout,
            worker_memory_bytes=options.worker_memory_bytes,
        )
        write_report(
            self._options.report, file, rows, destination.path, worker=worker, max_rows=options.report_rows,
            thumbnails=ThumbnailMaker(
                options.allowed_media_dir, self._config.max_source_pixels, options.max_media_bytes
            ),
            max_row_bytes=options.max_row_bytes,
        )  # fmt: skip
        self._progress.say(f"report    {options.report}")


def _check_names(options: BatchOptions) -> None:
    """No file may stand for two. The report and the summary are written last: that they cannot be is said first."""
    names = {"input": options.input, "output": options.output, "report": options.report, "summary": options.summary}
    taken: dict[Path, str] = {}
    for name, value in names.items():
        if value is None or value == STANDARD_STREAM:
            continue
        path = Path(value).resolve()
        if path in taken:
            raise ConfigError(f"{name} {value}: is the {taken[path]} as well; choose another name")
        taken[path] = name
        if name in ("report", "summary") and (path.is_dir() or not path.parent.is_dir()):
            raise ConfigError(f"{name} {value}: is a folder or in no existing folder; name a file")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with late_file_errors(f"summary {path}"), replacing(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")
