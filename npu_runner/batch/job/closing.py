"""What a job leaves beside its answers when it ends: a summary and a report. Knows nothing of how rows are served."""

from __future__ import annotations

import json
from pathlib import Path

from npu_runner.batch.files.destination import Destination
from npu_runner.batch.files.durable import late_file_errors, replacing
from npu_runner.batch.files.input_file import STANDARD_STREAM, InputFile, InputScan
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.report import write_report
from npu_runner.batch.job.summary import JobSummary
from npu_runner.batch.job.thumbnails import ThumbnailMaker
from npu_runner.errors import ConfigError
from npu_runner.workers.pool import PoolLimits


def check_names(options: BatchOptions) -> None:
    """No file may stand for two. The report and the summary are written last: that they cannot be is said first."""
    names = {"input": options.input, "output": options.output, "error_file": options.error_file,
             "report": options.report, "summary": options.summary}
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


def make_report(
    options: BatchOptions, max_source_pixels: int, file: InputFile, rows: InputScan, destination: Destination
) -> None:
    """The page to look at, made from the output; pictures are decoded in a worker process."""
    assert destination.path is not None, "refused at the start"
    assert options.report is not None, "nobody asked for a report"
    worker = PoolLimits(
        num_workers=1,
        task_timeout_seconds=options.preprocessing_timeout,
        worker_memory_bytes=options.worker_memory_bytes,
    )
    write_report(
        options.report, file, rows, destination.path, errors=destination.error_path, worker=worker,
        max_rows=options.report_rows,
        thumbnails=ThumbnailMaker(options.allowed_media_dir, max_source_pixels, options.max_media_bytes),
        max_row_bytes=options.max_row_bytes,
    )  # fmt: skip


def save_summary(path: Path, summary: JobSummary) -> None:
    with late_file_errors(f"summary {path}"), replacing(path) as file:
        file.write(json.dumps(summary.to_json(), indent=2).encode() + b"\n")
