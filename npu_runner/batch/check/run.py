"""Checks an input for a job: all of its rows without weights, then, if asked, some of them with the model.

Writes nothing but a nameless copy of a compressed input, and takes no lock. Knows nothing of how the result is shown.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from npu_runner.batch.check.sample import Sample, answer_sample
from npu_runner.batch.check.survey import Survey, survey_rows
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.replica_plan import local_plan
from npu_runner.batch.job.row_server import CheckpointSide
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found. `sample`: None where none was asked for."""

    survey: Survey
    sample: Sample | None


def check_input(config: RunnerConfig, options: BatchOptions, *, num_sampled: int = 0, most_model_len: int | None = None,
                seen: Callable[[int], None] = lambda count: None) -> Checked:
    """Check every row of `options.input`. `num_sampled`: rows to be answered. `most_model_len`: what memory leaves of
    the model's length; None: all. `seen` is called with how many rows have been looked at.

    Raises ConfigError for what a job refuses before it loads a model.
    """
    with InputFile(options.input) as file:
        scan = file.scan()
        if not scan.num_rows:
            raise ConfigError(f"input {file.name}: it has no row")
        survey, batch = _survey(config, options, file, RowBook(scan, np.ones(scan.num_rows, dtype=bool), file.source),
                                most_model_len, seen)
        sample = answer_sample(config, options, file, scan, survey, num_sampled, batch) if num_sampled else None
    return Checked(survey=survey, sample=sample)


def _survey(config: RunnerConfig, options: BatchOptions, file: InputFile, book: RowBook, most_model_len: int | None,
            seen: Callable[[int], None]) -> tuple[Survey, int]:
    """And the sequences that a replica decodes at a time."""
    from npu_runner.engine import bounds

    side = CheckpointSide(config)
    opened = side.checkpoint
    settings = bounds.known_limits(opened)
    max_model_len = min(settings.max_model_len, most_model_len or settings.max_model_len)
    check = functools.partial(bounds.check_request, processor=opened.processor, model_config=opened.model_config,
                              max_model_len=max_model_len)
    plan = local_plan(config, options, file.source, lambda config: side)
    return survey_rows(plan, book, check, max_model_len, seen), settings.max_num_seqs

