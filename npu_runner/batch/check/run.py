"""Checks an input for a job: all of its rows without weights, then, if asked, some of them with the model.

Writes nothing but a nameless copy of a compressed input, and takes no lock. Knows nothing of how the result is shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found. `sample`: None where none was asked for."""

    survey: Survey
    sample: Sample | None
    memory_may_cut: bool
    """The device's memory may leave less than `survey.max_model_len`."""


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
        book = RowBook(scan, np.ones(scan.num_rows, dtype=bool), file.source)
        survey, batch, memory_may_cut = _survey(config, options, file, book, most_model_len, seen)
        sample = answer_sample(config, options, file, scan, survey, num_sampled, batch) if num_sampled else None
    return Checked(survey=survey, sample=sample, memory_may_cut=memory_may_cut)


def _survey(config: RunnerConfig, options: BatchOptions, file: InputFile, book: RowBook, most_model_len: int | None,
            seen: Callable[[int], None]) -> tuple[Survey, int, bool]:
    """And the sequences that a replica decodes at a time, and whether memory may cut the length."""
    # Imported here: these import torch.
    from npu_runner.engine import bounds
    from npu_runner.engine.first_mask import FirstMasks

    side = CheckpointSide(config)
    opened = side.checkpoint
    settings = bounds.known_limits(opened)
    known = [most for most in (most_model_len, bounds.most_cached_tokens(opened, settings)) if most is not None]
    max_model_len = min([settings.max_model_len, *known])
    memory_may_cut = not known and not settings.max_model_len_is_given
    masks = FirstMasks(opened)

    def check(prompt: PromptInputs, params: Any) -> None:
        bounds.check_request(prompt, params, opened.processor, opened.model_config, max_model_len)
        if isinstance(params, SamplingParams):
            masks.check(prompt, params)

    plan = local_plan(config, options, file.source, lambda config: side)
    with contextlib.closing(masks):
        survey = survey_rows(plan, book, check, max_model_len, seen)
    return survey, settings.max_num_seqs, memory_may_cut

