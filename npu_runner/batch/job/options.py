"""Every option of a batch job, checked once. Knows nothing of how the job goes about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from npu_runner.errors import ConfigError
from npu_runner.request.limits import LIMITS
from npu_runner.serving.replicas.options import AUTO, ReplicaOptions
from npu_runner.serving.workers.options import PreprocessingOptions, default_num_workers

PROGRESS_STYLES = ("auto", "bar", "lines", "off")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What one batch job reads and writes, and how. Model settings are RunnerConfig's."""

    input: str
    """JSONL file of OpenAI batch rows; - reads standard input."""
    output: str
    """JSONL file of answers, resumed if it exists; - writes standard output (which cannot be resumed)."""
    error_file: Path | None = None
    """JSONL file of failed rows, which are there and not in the output, as in OpenAI's batch; no stream; None: in the
    output."""
    allowed_media_dir: Path | None = None
    """Pictures and films may be files below this folder; None: only data: URLs are allowed."""
    ordered: bool = False
    """Answers in the order of the input instead of the order in which they finish; a file gets it once it is whole."""
    retry_errors: bool = False
    """When resuming, try failed rows again."""
    overwrite: bool = False
    """Replace an existing output instead of resuming it."""
    summary: Path | None = None
    """Write the closing summary of this run to this file, as JSON, also when an error ended it; a resumed job counts
    what it added. - writes standard output, if nothing else does."""
    report: Path | None = None
    """Write a page to look at (pictures, strips of films, questions, answers) to this HTML file; - writes standard
    output, if nothing else does."""
    report_rows: int = 300
    """Most rows on the page; failed and unexpected answers come first."""
    cached_tokens: bool = False
    """Report each row's prefix-cache hits in its usage. They depend on timing, so rows are not reproducible then."""
    data_parallel_size: int | str = 1
    """Replicas of the model on this host, each on devices of its own (tensor_parallel_size of them); they share the
    rows of the job. auto: as many as there are devices for."""
    max_replica_restarts: int = 3
    """How often a replica that died is started again; its rows go to the others."""
    ray: str | None = field(default=None, metadata={"alone": AUTO})
    """Run the replicas as actors of the Ray cluster at HOST:PORT, on whatever hosts have room; auto, or the option
    alone: of the cluster that this host belongs to. data_parallel_size is the most of them then; they come and go with
    the hosts of the cluster."""
    shared_input: bool = False
    """With ray: every host sees the input under the same path, so rows travel as places in it and not as bytes."""
    preprocessing_workers: int | None = None
    """Processes that decode pictures and tokenize, for each replica; None: half of its CPU cores, 16 at most."""
    preprocessing_timeout: float = 120.0
    """Seconds after which preprocessing of one row is given up; inf: never."""
    max_row_bytes: int = LIMITS.max_row_bytes
    """A longer row fails."""
    max_media_bytes: int = LIMITS.max_media_bytes
    """A picture or a film whose file or decoded data: URL is larger fails its row."""
    max_prompt_media_bytes: int = LIMITS.max_prompt_media_bytes
    """A row whose different pictures and films are larger together fails."""
    worker_memory_bytes: int = LIMITS.worker_memory_bytes
    """Memory that preparing one row may take in its worker process, beside what the process has at its start; a row
    that needs more fails."""
    response_schema: Path | None = None
    """Answers are JSON that fits the schema in this file, but for rows that say themselves what theirs must be, and
    rows with tools."""
    max_thinking_tokens: int | None = None
    """In chats: a model that has thought for so many tokens ends its thinking; rows may say otherwise. None: when it
    likes."""
    progress: str = "auto"
    """bar, lines or off; auto: a bar on a terminal and lines elsewhere."""

    def __post_init__(self) -> None:
        ReplicaOptions(data_parallel_size=self.data_parallel_size, max_replica_restarts=self.max_replica_restarts)
        if self.shared_input and self.ray is None:
            raise ConfigError("shared_input: replicas of this host read the input as it is; it goes with ray")
        if self.preprocessing_workers is not None and self.preprocessing_workers < 1:
            raise ConfigError(f"preprocessing_workers: {self.preprocessing_workers} is not a positive number")
        if self.max_row_bytes < 1:
            raise ConfigError(f"max_row_bytes: {self.max_row_bytes} is not a positive number")
        self.preprocessing()
        if self.max_thinking_tokens is not None and self.max_thinking_tokens < 0:
            raise ConfigError(f"max_thinking_tokens: {self.max_thinking_tokens} is negative; 0 lets nothing be thought")
        if self.report_rows < 1:
            raise ConfigError(f"report_rows: {self.report_rows} is not a positive number")
        if self.progress not in PROGRESS_STYLES:
            raise ConfigError(f"progress: {self.progress!r} is not one of {', '.join(PROGRESS_STYLES)}")
        if self.allowed_media_dir is not None and not self.allowed_media_dir.is_dir():
            raise ConfigError(f"allowed_media_dir: {str(self.allowed_media_dir)!r} is not a folder")

    def preprocessing(self) -> PreprocessingOptions:
        """Those of the options that any preparing takes. Raises ConfigError for one out of range."""
        return PreprocessingOptions(
            preprocessing_workers=self.preprocessing_workers, preprocessing_timeout=self.preprocessing_timeout,
            max_media_bytes=self.max_media_bytes, max_prompt_media_bytes=self.max_prompt_media_bytes,
            worker_memory_bytes=self.worker_memory_bytes,
        )  # fmt: skip

    def num_workers(self, num_cores: int) -> int:
        """Preprocessing workers of a replica that has so many cores."""
        return self.preprocessing_workers or default_num_workers(num_cores)
