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

from npu_runner.batch.files.destination import Destination, open_destination
from npu_runner.batch.files.durable import clear_file_errors, replacing
from npu_runner.batch.files.fingerprint import fingerprint_model
from npu_runner.batch.files.input_file import STANDARD_STREAM, InputFile, InputScan
from npu_runner.batch.files.manifest import Manifest, differences, start_time
from npu_runner.batch.job import serving
from npu_runner.batch.job.model_side import CheckpointSide, ModelSide
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.job.report import write_report
from npu_runner.batch.job.serving import ServingLoop
from npu_runner.batch.job.signals import Interrupted, StopSignals
from npu_runner.batch.job.tally import JobSummary, Tally
from npu_runner.batch.rows.input_row import InputRow
from npu_runner.batch.rows.openai_response import JobStamp
from npu_runner.batch.rows.preprocessing import RowPreprocessor
from npu_runner.checkpoint import resolve_checkpoint
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, JobError
from npu_runner.multimodal.media import MediaRules
from npu_runner.outputs import EngineStats
from npu_runner.workers.pool import PoolLimits, WorkerPool


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What is to do."""

    rows: InputScan
    wanted: np.ndarray
    model_folder: Path
    model_files: dict[str, str]
    started: float


def run_batch(
    config: RunnerConfig,
    options: BatchOptions,
    *,
    open_model: Callable[[RunnerConfig], ModelSide] = CheckpointSide,
) -> JobSummary:
    """Answer every row of the input that has no answer yet. Returns what was done, also when a signal cut it short.

    Raises ConfigError for what has to be changed before it can work, JobError and EngineDeadError when the same
    command may simply be run again. `open_model` stands in for a checkpoint and LLMEngine.
    """
    progress = Progress(options.progress)
    _check_names(options)
    with StopSignals() as signals:
        try:
            job = _Job(config, options, progress, signals, open_model)
            destination = open_destination(
                options.output, overwrite=options.overwrite, retry_errors=options.retry_errors
            )
            with destination, signals.interrupting():
                destination.look()
                summary = job.run(destination)
        except Interrupted as signal:
            raise JobError(f"interrupted by {signal} before the first row; the same command starts again") from None
        finally:
            progress.close()
        if options.summary is not None:
            _write_json(options.summary, summary.to_json())
        for line in summary.to_lines():
            progress.say(line)
    return summary


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

    def run(self, destination: Destination) -> JobSummary:
        started = time.monotonic()
        if self._options.report is not None and destination.path is None:
            raise ConfigError("report: it is made from the output file, and this output cannot be read again")
        with self._open_input(destination) as file:
            earlier = destination.earlier
            rows = file.scan(earlier.input if earlier else None)
            if not rows.continues_earlier:
                raise ConfigError(
                    f"input {file.name}: it is not the input that {destination.name} was begun with (rows may be added "
                    "at its end, not changed); restore it, choose another output, or --overwrite to start afresh"
                )
            folder = resolve_checkpoint(self._config.model, self._config.revision)
            files = fingerprint_model(folder)
            if earlier is not None and earlier.has_served:
                _refuse_changes(destination, "model", differences(earlier.model_files, files))
            wanted = ~destination.finished(rows)
            work = _Work(rows=rows, wanted=wanted, model_folder=folder, model_files=files, started=started)
            summary = self._serve(file, work, destination) if wanted.any() else self._nothing_to_do(work, destination)
            if not summary.is_interrupted:
                destination.finish(rows, is_ordered=self._options.ordered)
                self._report(file, rows, destination)
            return summary

    def _open_input(self, destination: Destination) -> InputFile:
        path = destination.path
        spool_folder = path.parent if path is not None else Path(tempfile.gettempdir())
        with clear_file_errors(f"copy of the input in {spool_folder}"):
            return InputFile(self._options.input, spool_folder)

    def _serve(self, file: InputFile, work: _Work, destination: Destination) -> JobSummary:
        num_before = work.rows.num_rows - int(work.wanted.sum())
        if num_before:
            self._progress.say(f"resuming: {num_before} of {work.rows.num_rows} rows are finished")
        # The folder that was looked at, whatever a hub id stands for a moment later.
        model = self._open_model(self._config.replace(model=str(work.model_folder), revision=None))
        # Workers prepare the first rows while the model loads.
        with self._start_pool(model, file, work.wanted) as pool, model.load() as engine:
            pool.raise_failure()
            facts = ", ".join(f"{name} {value}" for name, value in engine.describe().items())
            self._progress.say(f"model {work.model_folder}: {facts}\n{engine.ledger}")
            manifest = self._manifest(model, engine, work, destination)
            # From here on a signal lets the step under way end, and then the job.
            self._signals.defer()
            writer = destination.begin(manifest)
            ready = time.monotonic()
            try:
                self._progress.start(work.rows.num_rows, num_before)
                ServingLoop(
                    engine,
                    pool,
                    writer.put,
                    name_of=file.source.name,
                    stamp=self._stamp(manifest),
                    tally=self._tally,
                    progress=self._progress,
                    should_stop=lambda: self._signals.is_requested,
                    is_ordered=self._options.ordered,
                ).run()
            finally:
                writer.close()
                self._progress.close()
            stats = engine.stats()
        return self._summary(
            work, destination, stats, start_seconds=ready - work.started, serve_seconds=time.monotonic() - ready,
            num_replaced=pool.num_replaced,
        )  # fmt: skip

    def _manifest(self, model: ModelSide, engine: Any, work: _Work, destination: Destination) -> Manifest:
        """The manifest of this output: the earlier one, if nothing that shapes answers has changed since."""
        settings = {
            **engine.describe(),
            **{f"prompts.{name}": value for name, value in model.processor.identity().items()},
            **{f"generation_defaults.{name}": value for name, value in model.generation_defaults.items()},
        }
        earlier = destination.earlier
        if earlier is None or not earlier.has_served:
            return _first_manifest(work, json.loads(json.dumps(settings)))
        _refuse_changes(destination, "settings", differences(earlier.settings, settings))
        return earlier.with_input(work.rows.identity)

    def _stamp(self, manifest: Manifest) -> JobStamp:
        return JobStamp(
            created=manifest.created,
            system_fingerprint=manifest.system_fingerprint,
            model_name=manifest.model_name,
            with_cached_tokens=self._options.cached_tokens,
        )

    def _start_pool(self, model: ModelSide, file: InputFile, wanted: np.ndarray) -> WorkerPool[InputRow]:
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
        limits = PoolLimits(
            num_workers=options.num_workers,
            task_timeout_seconds=options.preprocessing_timeout,
            worker_memory_bytes=options.worker_memory_bytes,
            max_tasks=serving.MAX_ROWS_OUT_OF_ORDER if options.ordered else float("inf"),
        )
        return WorkerPool(preprocessor, file.rows(wanted), limits, [file.source.descriptor])

    def _nothing_to_do(self, work: _Work, destination: Destination) -> JobSummary:
        self._progress.say(f"nothing to do: all {work.rows.num_rows} rows are finished")
        self._signals.defer()
        earlier = destination.earlier
        manifest = _first_manifest(work, settings={})
        if earlier is not None and earlier.has_served:
            manifest = earlier.with_input(work.rows.identity)
        # No row is added, but the file is repaired, or made for an input that is empty so far.
        destination.begin(manifest).close()
        seconds = time.monotonic() - work.started
        return self._summary(work, destination, EngineStats(), start_seconds=seconds, serve_seconds=0, num_replaced=0)

    def _summary(
        self, work: _Work, destination: Destination, stats: EngineStats, *, start_seconds: float, serve_seconds: float,
        num_replaced: int,
    ) -> JobSummary:  # fmt: skip
        num_wanted = int(work.wanted.sum())
        return JobSummary(
            num_rows=work.rows.num_rows,
            num_resumed=work.rows.num_rows - num_wanted,
            num_failed_in_output=destination.num_failed_kept() + self._tally.num_failed,
            tally=self._tally,
            stats=replace(stats),
            start_seconds=start_seconds,
            serve_seconds=serve_seconds,
            num_workers=self._options.num_workers,
            num_workers_replaced=num_replaced,
            is_interrupted=self._tally.num_done < num_wanted,
        )

    def _report(self, file: InputFile, rows: InputScan, destination: Destination) -> None:
        if self._options.report is None:
            return
        assert destination.path is not None, "refused at the start"
        write_report(
            self._options.report, file, rows, destination.path,
            allowed_media_dir=self._options.allowed_media_dir, max_rows=self._options.report_rows,
        )  # fmt: skip
        self._progress.say(f"report    {self._options.report}")


def _first_manifest(work: _Work, settings: dict[str, Any]) -> Manifest:
    return Manifest(
        created=start_time(),
        model_name=work.model_folder.name,
        model_files=work.model_files,
        settings=settings,
        input=work.rows.identity,
    )


def _refuse_changes(destination: Destination, what: str, changes: list[str]) -> None:
    if changes:
        raise ConfigError(
            f"output {destination.name}: was begun with another {what}; answers of two would be mixed. Changed: "
            f"{'; '.join(changes)}. Choose another output, or --overwrite to start afresh"
        )


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
    with clear_file_errors(f"summary {path}"), replacing(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")
