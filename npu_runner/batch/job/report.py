"""The report of a job: what its options, its manifest and its record of runs say of it. Knows nothing of pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.place import Place
from npu_runner.batch.files.runs import Run, Runs
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.report.head import About
from npu_runner.batch.report.report import Source, write_report
from npu_runner.batch.report.thumbnails import ThumbnailMaker
from npu_runner.serving.workers.pool import PoolLimits


def make_report(place: Place, options: BatchOptions, max_source_pixels: int, file: InputFile | None,
                rows: InputScan | None, outputs: Sequence[Path], *, has_schema: bool, about: About | None,
                ends: Sequence[int] | None = None) -> None:
    """The report of a job's output, with a worker process that decodes its images. `ends`: Source's. See
    `write_report`."""
    worker = PoolLimits(
        num_workers=1, task_timeout_seconds=options.workers.preprocessing_timeout,
        worker_memory_bytes=options.workers.worker_memory_bytes)
    source = Source(file=file, rows=rows, outputs=outputs, max_row_bytes=options.max_row_bytes, has_schema=has_schema,
                    about=about, ends=ends)
    write_report(
        place, source, worker=worker, max_rows=options.report_rows,
        thumbnails=ThumbnailMaker(options.allowed_media_dir, max_source_pixels, options.workers.max_media_bytes))


def about_job(manifest: Manifest | None, runs: Runs) -> About | None:
    """The head of a report. None: there is no manifest."""
    if manifest is None:
        return None
    last: Run = runs.last[-1] if runs.last else {"platform": None, "devices": 0, "npu_runner": None}
    seconds, computed = runs.sums("seconds"), runs.sums("computed")
    return About(
        model=manifest.model_name, created=manifest.created, platform=last["platform"], num_devices=last["devices"],
        version=last["npu_runner"], num_runs=len(runs),
        start_seconds=seconds.get("start", 0.0), serve_seconds=seconds.get("serve", 0.0),
        num_drafted=computed.get("draft_proposed", 0), num_accepted=computed.get("draft_accepted", 0))
