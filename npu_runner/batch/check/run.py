"""Checks an input for a job: all of its rows without weights, then, if requested, some of them with the model.

Writes nothing but nameless and temporary copies, and takes no lock. Knows nothing of how the result is shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from npu_runner.batch.check.survey import Survey
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.row_book import InputScan, RowBook
from npu_runner.batch.job.history import JobSummary
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.row_server import CheckpointSide, RowServer, server_plan
from npu_runner.batch.job.run import run_batch
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, JobError
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams

# The largest difference between two runs of the same work on one host, where nothing else ran on it.
_NOISE = 0.10
_LEAST_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of a check. `sample`: None where none was requested."""

    survey: Survey
    sample: Sample | None
    memory_may_cut: bool
    """The device's memory may leave less than `survey.max_model_len`."""
    num_equal: int
    """Rows that equal an earlier one. A job may copy their answers; all else here counts them as served."""


def check_input(config: RunnerConfig, options: BatchOptions, *, num_sampled: int = 0, most_model_len: int | None = None,
                seen: Callable[[int], None] = lambda count: None) -> Checked:
    """Check every row of `options.input`. `num_sampled`: rows to be answered. `most_model_len`: the length that memory
    leaves the model; None: all of it. `seen` is called with the number of rows that were checked.

    Raises ConfigError for what a job refuses before it loads a model.
    """
    with InputFile(options.input) as file:
        scan = file.scan(with_equal=True)
        if not scan.num_rows:
            raise ConfigError(f"input {file.name}: it has no row")
        book = RowBook(scan, np.ones(scan.num_rows, dtype=bool), file.source)
        survey, batch, memory_may_cut = _survey(config, options, file, book, most_model_len, seen)
        sample = _answer_sample(config, options, file, scan, survey, num_sampled, batch) if num_sampled else None
    return Checked(survey=survey, sample=sample, memory_may_cut=memory_may_cut,
                   num_equal=len(scan.equal_E) - len(np.unique(scan.groups_E)))


def _survey(config: RunnerConfig, options: BatchOptions, file: InputFile, book: RowBook, most_model_len: int | None,
            seen: Callable[[int], None]) -> tuple[Survey, int, bool]:
    """The survey, the sequences that a replica decodes at a time, and whether memory may cut the length."""
    # Imported here: these import torch.
    from npu_runner.engine import bounds
    from npu_runner.engine.first_mask import FirstMasks

    side = CheckpointSide(config)
    opened = side.checkpoint
    settings = bounds.known_limits(opened)
    known = [most for most in (most_model_len, bounds.most_cached_tokens(opened, settings)) if most is not None]
    max_model_len = min([settings.max_model_len, *known])
    memory_may_cut = not known and not settings.max_model_len_is_given
    masks, survey = FirstMasks(opened), Survey(max_model_len)

    def check(prompt: PromptInputs, params: Any) -> None:
        bounds.check_request(prompt, params, opened.processor, opened.model_config, max_model_len)
        if isinstance(params, SamplingParams):
            masks.check(prompt, params)

    server = RowServer(server_plan(config, options, file.source, lambda config: side))
    with contextlib.closing(masks), server:
        server.start(lambda: None, lambda event: None)
        for count, prepared in enumerate(server.prepare(book), 1):
            survey.add(prepared, check)
            seen(count)
    return survey, settings.max_num_seqs, memory_may_cut


# -- --sample: some of the rows are answered in a job of their own, whose answers are thrown away ----------------------


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The figures of some rows of a job, and estimates for all of them."""

    summary: JobSummary
    num_rows: int
    """Rows of the sample."""
    num_all: int
    """Rows of the job that would be served."""
    batch: int
    """Sequences that its replicas decode at a time, together."""
    spread: float
    """Standard deviation of a row's tokens, as a share of their mean."""
    growth: float
    """Prompt tokens that no earlier row has, over those of the sample: `num_all / num_rows` where no row repeats
    another's text or images."""

    @property
    def is_too_small(self) -> bool:
        """Its batches were not full for long enough to tell how long full ones take."""
        return self.num_rows < min(self.num_all, _LEAST_BATCHES * self.batch)

    @property
    def seconds(self) -> tuple[float, float] | None:
        """The least and the most time of the job, from its start to its last row. None: the sample is too small.

        At most: rows take what they took here, where batches empty at the end and what repeats is mostly new. At least:
        every decode step is full and takes no longer, and of the prompts only what no earlier row has is computed.
        Both are widened by two standard errors of the rows' tokens, and by the difference between runs.
        """
        if self.is_too_small:
            return None
        stats, summary = self.summary.stats, self.summary
        num_replicas = max(1, len(summary.replicas))
        most = summary.serve_seconds
        decoding = stats.decode_seconds / num_replicas
        room = stats.num_decode_steps * self.batch / num_replicas
        filled = min(1.0, stats.num_decode_tokens / room) if room else 1.0
        scale = self.num_all / self.num_rows
        known = stats.prefill_seconds / num_replicas * max(0.0, scale - self.growth)
        least = max(0.0, (most - decoding * (1 - filled)) * scale - known)
        doubt = 2 * self.spread / math.sqrt(self.num_rows) * math.sqrt(1 - self.num_rows / self.num_all) + _NOISE
        start = summary.start_seconds
        return (start + least) * (1 - min(doubt, 1.0)), (start + most * scale) * (1 + doubt)

    @property
    def tokens(self) -> int:
        """Estimated tokens of all answers together."""
        return round(self.summary.tally.num_completion_tokens * self.num_all / self.num_rows)

    def share(self, count: int) -> float:
        return count / max(1, self.summary.tally.num_answered)

    def to_json(self) -> dict[str, Any]:
        tally, seconds = self.summary.tally, self.seconds
        return {
            "rows": self.num_rows, "too_few_to_say": self.is_too_small,
            "seconds": None if seconds is None else [round(value, 1) for value in seconds],
            "completion_tokens": self.tokens, "failed": tally.num_failed,
            "failures_by_code": dict(tally.failures_by_code),
            "cut_off": self.share(tally.num_cut_off), "repetition": self.share(tally.num_repetition),
            "unparsed": self.share(tally.num_unparsed)}


def _answer_sample(config: RunnerConfig, options: BatchOptions, file: InputFile, scan: InputScan, survey: Survey,
                   num_rows: int, batch: int) -> Sample:
    """Answer `num_rows` of the rows that would be served, evenly spread over the input. `batch`: sequences that one
    replica decodes at a time.

    Raises what a job raises. ConfigError if no row would be served.
    """
    places = np.frombuffer(survey.places, dtype=np.uint64)
    if not len(places):
        raise ConfigError("sample: no row would be served, so none can be answered")
    count = min(num_rows, len(places))
    chosen = np.sort(places)[np.arange(count) * len(places) // count]
    wanted = np.zeros(scan.num_rows, dtype=bool)
    wanted[chosen.astype(np.int64)] = True
    book = RowBook(scan, wanted, file.source)
    with tempfile.TemporaryDirectory(prefix="npu-runner-check-") as name:
        folder = Path(name)
        with (folder / "rows.jsonl").open("wb") as rows:
            for index in range(book.num_rows):
                rows.write(file.source.read(book.row(index)).rstrip(b"\n") + b"\n")
        output = folder / "answers.jsonl"
        summary = run_batch(config, dataclasses.replace(
            options, input=str(folder / "rows.jsonl"), output=str(output), progress="off"))
        if summary.error is not None:
            raise summary.error
        if summary.is_interrupted:
            raise JobError("interrupted while the sample was answered; nothing is left of it")
        num_replicas = max(1, len(summary.replicas))
        return Sample(summary=summary, num_rows=count, num_all=len(places), batch=batch * num_replicas,
                      spread=_spread(output),
                      growth=survey.repeats.num_new_tokens() / survey.repeats.num_new_tokens(chosen))


def _spread(output: Path) -> float:
    """Standard deviation of the tokens of an answered row, over their mean."""
    tokens = []
    with output.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["error"] is None:
                tokens.append(row["response"]["body"]["usage"]["total_tokens"])
    return float(np.std(tokens) / np.mean(tokens)) if tokens else 0.0
