"""What a job leaves beside its answers when it ends: a summary and a report. Knows nothing of how rows are served."""

from __future__ import annotations

import json

from npu_runner.batch.files.destination import Destination
from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.place import Place
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.report import write_report
from npu_runner.batch.job.summary import JobSummary
from npu_runner.batch.job.thumbnails import ThumbnailMaker
from npu_runner.serving.workers.pool import PoolLimits


def make_report(
    place: Place, options: BatchOptions, max_source_pixels: int, file: InputFile, rows: InputScan,
    destination: Destination,
) -> None:  # fmt: skip
    """The page to look at, made from the output; pictures are decoded in a worker process."""
    assert destination.path is not None, "refused at the start"
    worker = PoolLimits(
        num_workers=1,
        task_timeout_seconds=options.workers.preprocessing_timeout,
        worker_memory_bytes=options.workers.worker_memory_bytes,
    )
    write_report(
        place, file, rows, destination.path, errors=destination.error_path, worker=worker,
        max_rows=options.report_rows,
        thumbnails=ThumbnailMaker(options.allowed_media_dir, max_source_pixels, options.workers.max_media_bytes),
        max_row_bytes=options.max_row_bytes,
    )  # fmt: skip


def save_summary(place: Place, summary: JobSummary) -> None:
    with place.late_errors(), place.writing() as file:
        file.write(json.dumps(summary.to_json(), indent=2).encode() + b"\n")
