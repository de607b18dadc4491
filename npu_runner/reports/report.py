"""Makes the report of a job from its files: after `batch --report`, or by `npu-runner report` at any time.

Knows nothing of what stands on the page.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.durable import late_file_errors
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.joined import Joined
from npu_runner.batch.files.manifest import RULE_OF_JOB
from npu_runner.batch.files.place import Place
from npu_runner.batch.job.history import JobHistory, JobSummary
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.job.run import Views, check_settings, job_places, run_batch
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, JobError
from npu_runner.reports.metrics import metrics_of
from npu_runner.reports.page import Page
from npu_runner.reports.run_summary import run_json, run_lines
from npu_runner.reports.summary import NO_INPUT, PastJob, Totals
from npu_runner.reports.survey import spread, survey
from npu_runner.reports.thumbnails import ThumbnailMaker, ThumbnailPool, side_for
from npu_runner.request.limits import LIMITS
from npu_runner.serving.workers.pool import PoolLimits


def check_batch(config: RunnerConfig, options: BatchOptions) -> None:
    """Raises ConfigError for what `run_batch_and_report` refuses whatever the rows and the model are: settings, and
    views that cannot be written. The folder of the output is there."""
    check_settings(config, options)
    with contextlib.ExitStack() as entered:
        for option, place in job_places(options, config).items():
            if option != "output":
                entered.enter_context(place)


def run_batch_and_report(config: RunnerConfig, options: BatchOptions, *, unit: str = "row", **more: Any) -> JobSummary:
    """Run the job as the command does: with `options.metrics_file`, its last lines, `options.summary`, and then
    `options.report`, if every row has its line. `unit`: the word for a row. `more`: arguments of `run_batch`.

    A file that cannot be written is refused before the model is loaded. Raises JobError if it fails later.
    """
    places = job_places(options, config)
    report, summary_file, metrics, output = (
        places.get("report"), places.get("summary"), places.get("metrics_file"), places["output"].path)
    if report is not None and output is None:
        raise ConfigError("report: it is made from the output file, and this output cannot be read again")
    with contextlib.ExitStack() as entered:
        for place in (report, summary_file, metrics):
            if place is not None:
                entered.enter_context(place)
        file = None
        if report is not None and output is not None:
            # The job and the report read one opened input: standard input can be read only once.
            file = entered.enter_context(InputFile(options.input, output.parent))
        views = Views({metrics.path: metrics_of} if metrics is not None and metrics.path is not None else {},
                      partial(_report_end, places["output"].name, summary_file), unit)
        summary = run_batch(config, replace(options, report=None, summary=None, metrics_file=None), input=file,
                            views=views, **more)
        if report is not None and file is not None and not summary.is_interrupted:
            try:
                said = _write(report, PastJob(options.output), file, options)
            except ConfigError as error:
                raise JobError(f"{error}. The job has ended; the report alone is missing") from error
            if options.progress != "off":
                print(f"report    {report.name}: {said}", file=sys.stderr)
    return summary


def _report_end(output: str, file: Place | None, summary: JobSummary, history: JobHistory, progress: Progress) -> None:
    """Print the last lines and write --summary's file. Raises JobError."""
    totals = Totals(output=output, num_rows=summary.num_rows, rows=summary.rows, runs=history.runs)
    for line in [*run_lines(summary), *([totals.to_line()] if history.has_earlier else [])]:
        progress.say(line, is_last=True)
    summary.silence = progress.silence  # these lines may have been the first to be lost
    if file is not None:
        with file.writing() as target:
            fields = {**totals.to_json(), "this_run": run_json(summary)}
            target.write(json.dumps(fields, indent=2).encode() + b"\n")


def report_job(options: BatchOptions) -> str:
    """Make `options.report` of an output, whose job may be at work. Returns a line that says what it shows.

    The input may be NO_INPUT: then the page shows answers without questions. Raises ConfigError and JobError.
    """
    job = PastJob(options.output)
    place = job_places(options)["report"]
    with place, contextlib.ExitStack() as opened:
        file = None if options.input == NO_INPUT else opened.enter_context(InputFile(options.input))
        return f"report    {place.name}: {_write(place, job, file, options)}"


def _write(place: Place, job: PastJob, file: InputFile | None, options: BatchOptions) -> str:
    """Returns a sentence on what the page shows. Raises ConfigError for files of no job, JobError for any other fault.
    """
    manifest = job.manifest
    if manifest is None or not job.output.is_file():
        raise ConfigError(f"output {job.name}: it is not there yet, or not any more; run its job again, or wait for it")
    rows = None if file is None else file.scan_for(job.name, manifest.input)
    missing = f"No answer in {job.name} is affected; the report alone is missing"
    try:
        with AnswerFile(job.files, file_errors=late_file_errors) as answers, place.late_errors():
            answers.scan().refuse_other_files()
            joined = Joined(file, rows, answers, options.max_row_bytes)
            found = survey(joined, has_schema=RULE_OF_JOB in manifest.settings)
            page = Page(output=job.output.name, joined=joined, found=found, shown=spread(found, options.report_rows),
                        manifest=manifest, runs=job.runs)
            with _thumbnails(page, options) as pool, place.writing() as target:
                page.write(target, pool)
            return f"{page.num_shown:,} of {joined.num_rows:,} rows are shown"
    except ConfigError:
        raise
    except JobError as error:
        raise JobError(f"{error}. {missing}") from error
    except Exception as error:  # the border where a fault of the page becomes a reported failure
        raise JobError(f"{place.title}: cannot be made ({type(error).__name__}: {error}). {missing}") from error


def _thumbnails(page: Page, options: BatchOptions) -> ThumbnailPool:
    most_pixels = int(page.manifest.settings.get("prompts.max_source_pixels", LIMITS.max_source_pixels))
    make = ThumbnailMaker(options.allowed_media_dir, most_pixels, options.workers.max_media_bytes,
                          side_for(page.num_media))
    return ThumbnailPool(make, PoolLimits(
        num_workers=1, task_timeout_seconds=options.workers.preprocessing_timeout,
        worker_memory_bytes=options.workers.worker_memory_bytes))
