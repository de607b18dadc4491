"""What the benchmarks share: which commit, which versions, and what a job prepares before its model is there."""

from __future__ import annotations

import importlib.metadata
import subprocess
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_runner.config import RunnerConfig

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """The short hash of the checkout, with + when files differ from it; "unknown" outside of a repository."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def measure_head_start(config: RunnerConfig, requests: Path) -> float:
    """Seconds that as many rows take, one after the other, as our job can have prepared before its model is loaded.

    Images lie in the folder of `requests`.
    """
    from npu_runner.batch.files.input_file import InputFile
    from npu_runner.batch.job.row_server import CheckpointSide
    from npu_runner.batch.rows.preprocessing import RowPreprocessor
    from npu_runner.prompts.media.media import MediaRules
    from npu_runner.serving.workers.pool import PoolLimits

    with InputFile(str(requests), requests.parent) as file:
        media = MediaRules(allowed_dir=requests.parent)
        prepare = RowPreprocessor(source=file.source, processor=CheckpointSide(config).processor, media=media)
        rows = list(islice(file.rows(), PoolLimits(num_workers=1, task_timeout_seconds=1.0).max_ready))
        prepare(rows[0])  # imports
        started = time.perf_counter()
        for row in rows:
            prepare(row)
        return time.perf_counter() - started
