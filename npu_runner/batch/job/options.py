"""Every option of a batch job, checked once. Knows nothing of the job itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from npu_runner.batch.rows.flaw import WHOLE, Flaw
from npu_runner.config import READ, WRITTEN, check_choices, from_keywords, one_of
from npu_runner.errors import ConfigError
from npu_runner.request.limits import LIMITS
from npu_runner.serving.options import AUTO, PreprocessingOptions, ReplicaOptions

ROWS_BEFORE_A_SHARE = 200
"""Finished rows from which a share counts."""
_FORM = re.compile(r"([0-9]{1,12})|([0-9]{1,3}(?:\.[0-9]{1,6})?)%", re.ASCII)


@dataclass(frozen=True)
class FailureLimit:
    """`num_rows`: the most failed rows, or None; `percent`: their most percent of all finished rows, or None."""

    num_rows: int | None
    percent: Fraction | None

    @classmethod
    def parse(cls, text: str) -> FailureLimit:
        """`25` or `2.5%`. Raises ConfigError for anything else."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(f"max_failures: {text!r} is neither a number of rows like 25 nor a share like 2.5%")
        if found[1] is not None:
            return cls(int(found[1]), None)
        percent = Fraction(found[2])
        if percent > 100:
            raise ConfigError(f"max_failures: {text} is more than all rows; 100% is the most")
        return cls(None, percent)

    def is_exceeded(self, num_failed: int, num_finished: int, num_begun: int = 0) -> bool:
        """Whether more rows have failed than may.

        `num_begun`: rows that the engines have, which count as finished and not failed in a share. A row that
        preprocessing refuses is finished long before those that are answered, so without them the first share of a job
        would be too high.
        """
        if self.num_rows is not None:
            return num_failed > self.num_rows
        assert self.percent is not None, "one of the two is given"
        return num_finished >= ROWS_BEFORE_A_SHARE and num_failed * 100 > self.percent * (num_finished + num_begun)


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The options of one batch job. Model settings are RunnerConfig's."""

    input: str = field(metadata={"short": "-i", "values": "FILE", "file": READ})
    """JSONL file of OpenAI batch rows; - reads standard input."""
    output: str = field(metadata={"short": "-o", "values": "FILE", "file": WRITTEN})
    """JSONL file of answers, resumed if it exists; - writes standard output, which cannot be resumed."""
    error_file: Path | None = field(default=None, metadata={"file": WRITTEN})
    """JSONL file of failed rows, which are then not in the output, as in OpenAI's batch. It is a file and no stream.
    None: failed rows are in the output."""
    allowed_media_dir: Path | None = field(default=None, metadata={"file": READ})
    """Images and videos may be files below this folder; None: only data: URLs are allowed."""
    pdf_passwords: Path | None = field(default=None, metadata={"file": READ})
    """JSON file of an object: for the path of a PDF, as rows name it, or * for all others, its password."""
    ordered: bool = False
    """Answers in the order of the input instead of the order in which they finish. The file is sorted once it is whole;
    a stream is refused."""
    retry: tuple[str, ...] = field(default=(), metadata={"values": "KIND,..."})
    """When resuming, try rows again that are of these kinds: errors (failed rows), cut_off, repetition and unparsed
    (answers that are not whole); with commas between them. These rows may be corrected in the input, under the same
    custom_id. Limits that only make rows fail or end answers may differ: max_images_per_prompt, limit_mm_per_prompt,
    max_source_pixels, repetition_detection, and a higher max_model_len. Answers that are replaced are first copied to
    OUTPUT.replaced.jsonl."""
    retry_errors: bool = False
    """The same as retry errors. If preprocessing refuses all failed rows again, no model is loaded."""
    accept_changed: tuple[str, ...] = field(default=(), metadata={"values": "NAME"})
    """When resuming, go on although this setting of the manifest is another one than before; may be repeated. Answers
    of before stay, and system_fingerprint tells them from later ones. A model's files are no settings."""
    overwrite: bool = False
    """Replace an existing output instead of resuming it."""
    summary: Path | None = field(default=None, metadata={"file": WRITTEN})
    """Write what all runs of the job add up to, and this run under `this_run`, to this file, as JSON, also when an
    error ended it. The file is written once, at the end. - writes standard output, if nothing else does."""
    report: Path | None = field(default=None, metadata={"file": WRITTEN})
    """When the job has ended, write an HTML page of its rows (images, frames of videos, questions, answers) to this
    file. - writes standard output, if nothing else does."""
    report_rows: int = 2000
    """Most rows in that report: an equal share of each failure's code, of answers that are unexpected, cut off,
    repetitions or unparsed, and of good ones."""
    metrics_file: Path | None = field(default=None, metadata={"values": "FILE", "file": WRITTEN})
    """Write figures of the job in Prometheus' text form to this file, every 2 seconds. It is a file and no stream."""
    max_failures: str | None = field(default=None, metadata={"values": "N|P%"})
    """End the job early, with exit status 4, once more than N rows of the output have failed, or more than P percent of
    its finished rows, which counts from 200 finished rows. Failed rows of earlier runs count until retry_errors tries
    them again. Finished rows are kept."""
    cached_tokens: bool = False
    """Report each row's prefix-cache hits in its usage. They depend on timing, so rows are not reproducible then."""
    copy_equal_rows: bool = True
    """Serve the first of the rows that are equal but for custom_id and metadata. If it is greedy or has a seed of its
    own, its answer is written for the others, too."""
    ray: str | None = field(default=None, metadata={"alone": AUTO})
    """Run the replicas as actors of the Ray cluster at HOST:PORT, on every host that has room. auto, or the option
    alone: the cluster that this host belongs to. data_parallel_size is then the most of them; replicas are added and
    removed with the hosts of the cluster."""
    shared_input: bool = False
    """With ray: every host sees the input under the same path, so rows are sent as offsets in it and not as bytes."""
    max_row_bytes: int = LIMITS.max_row_bytes
    """Most bytes of a row; a longer one fails."""
    response_schema: Path | None = field(default=None, metadata={"file": READ})
    """Answers are JSON that fits the schema in this file. Rows with a rule of their own, and rows with tools, are
    excepted."""
    max_thinking_tokens: int | None = None
    """In chats: tokens of reasoning after which the end-of-thinking token is forced; rows may say otherwise. None: no
    limit."""
    repetition_detection: Mapping[str, Any] | None = None
    """Answers end when their last tokens are one pattern over and over: a JSON object with max_pattern_size,
    min_pattern_size and min_count, as in vLLM. Rows may say otherwise."""
    no_repeat_ngram_size: int | None = None
    """An answer repeats no sequence of N tokens that it has already; rows may say otherwise. None: it may."""
    no_repeat_ngram_window: int | None = None
    """Only the last N tokens of the answer count for no_repeat_ngram_size. None: the last 8192."""
    no_repeat_ngram_exempt_ids: tuple[int, ...] = ()
    """Token ids that no_repeat_ngram_size does not ban."""
    ladder: str | None = field(default=None, metadata={"values": "FILE|READER|none", "file": READ})
    """Try a row again if its answer has a fault: a JSON file of steps, or a reader whose file has them. A step is
    {"when": [reasons], "change": {fields}}; a row has at most 8 attempts. none: no ladder, also in read."""
    ladder_reader: str | None = None
    """The reader whose parser reads the answers, if the ladder is a file of steps."""
    progress: str = one_of("auto", "bar", "lines", "off")
    """bar, lines or off; auto: a bar on a terminal and lines elsewhere. It begins with how far the model is loaded.
    off: the last lines alone, which count the rows."""
    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)
    workers: PreprocessingOptions = field(default_factory=PreprocessingOptions)

    def __post_init__(self) -> None:
        check_choices(self)
        object.__setattr__(self, "accept_changed", tuple(self.accept_changed))
        object.__setattr__(self, "retry", (self.retry,) if isinstance(self.retry, str) else tuple(self.retry))
        _ = self.retried  # raises ConfigError for an unknown kind
        if self.shared_input and self.ray is None:
            raise ConfigError("shared_input: replicas of this host read the input as it is; it goes with ray")
        if self.workers.preprocessing_workers == 0:
            raise ConfigError("preprocessing_workers: 0 is not a positive number; a job needs one at least")
        if self.max_row_bytes < 1:
            raise ConfigError(f"max_row_bytes: {self.max_row_bytes} is not a positive number")
        if self.max_thinking_tokens is not None and self.max_thinking_tokens < 0:
            raise ConfigError(f"max_thinking_tokens: {self.max_thinking_tokens} is negative; 0 lets nothing be thought")
        if self.report_rows < 1:
            raise ConfigError(f"report_rows: {self.report_rows} is not a positive number")
        _ = self.failure_limit  # raises ConfigError for one that cannot be read
        if self.allowed_media_dir is not None and not self.allowed_media_dir.is_dir():
            raise ConfigError(f"allowed_media_dir: {str(self.allowed_media_dir)!r} is not a folder")

    @property
    def retried(self) -> Flaw:
        """The kinds of rows that are tried again. Raises ConfigError."""
        names = [name.strip() for item in self.retry for name in item.split(",")]
        try:
            return Flaw.parse(names) | (Flaw.ERRORS if self.retry_errors else WHOLE)
        except ValueError as error:
            raise ConfigError(f"retry: {error}") from None

    @property
    def failure_limit(self) -> FailureLimit | None:
        """`max_failures`, read. Raises ConfigError."""
        return None if self.max_failures is None else FailureLimit.parse(str(self.max_failures))

    @classmethod
    def from_keywords(cls, **options: Any) -> BatchOptions:
        """The options under their flat names. Raises ConfigError for an unknown one, with the nearest names."""
        if "report_every" in options:
            raise ConfigError("report_every: a job makes no report while it runs; npu-runner report works beside a "
                              "running job")
        (made,) = from_keywords(options, cls)
        return made  # type: ignore[no-any-return]
