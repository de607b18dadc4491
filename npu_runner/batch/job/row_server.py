"""A job's replica in this process: preprocessing workers and an engine. Knows nothing of the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import npu_runner
from npu_runner.batch.files.fingerprint import WeightDigests, fingerprint_model
from npu_runner.batch.job.answer_defaults import answer_defaults, shown_settings
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.row_endpoint import RowEndpoint
from npu_runner.batch.rows.input_row import RowSource
from npu_runner.batch.rows.preprocessing import RowPreprocessor
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.serving.engine_loop import max_waiting_requests
from npu_runner.serving.replica import ReplicaFacts
from npu_runner.serving.replicas.inline_replica import InlineReplica
from npu_runner.serving.workers.pool import PoolLimits


class ModelSide(Protocol):
    """A checkpoint that is about to be served: its processor is there at once, the engine takes its time to load."""

    @property
    def processor(self) -> Any:
        """A ChatProcessor, or what does as one does; picklable."""

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """SamplingParams fields that the checkpoint sets."""

    def load(self, wants_grammars: Callable[[], bool]) -> AbstractContextManager[Any]:
        """The engine, once it can serve; prompts of `processor` are what it takes. `wants_grammars`: LLMEngine's."""


class CheckpointSide:
    """A checkpoint folder and LLMEngine, which is given what was opened here."""

    def __init__(self, config: RunnerConfig):
        # torch comes with it: not before everything else is checked
        from npu_runner.strategies.opened import open_checkpoint

        self._checkpoint = open_checkpoint(config)
        self.processor, self.generation_defaults = self._checkpoint.processor, self._checkpoint.generation_defaults

    def load(self, wants_grammars: Callable[[], bool]) -> AbstractContextManager[Any]:
        """See ModelSide."""
        from npu_runner.engine.llm_engine import LLMEngine

        return LLMEngine(self._checkpoint, wants_grammars=wants_grammars)


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """What it takes to make a RowServer. Picklable as far as `open_model` and `source` are."""

    config: RunnerConfig
    source: RowSource
    """Where rows are read, in any worker process of the server."""
    media: MediaRules
    limits: PoolLimits
    max_row_bytes: int
    answer_defaults: dict[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that the job sets for rows that leave them open."""
    open_model: Callable[[RunnerConfig], ModelSide] = CheckpointSide
    inherited: tuple[int, ...] = ()
    """Descriptors that `source` reads through: of processes of this host that have inherited them."""
    digest_threads: int = 0
    """Threads that hash the weights while they load, for a server that sees another folder than the driver; 0: none."""


def server_plan(
    config: RunnerConfig, *, options: BatchOptions, source: RowSource, num_workers: int,
    open_model: Callable[[RunnerConfig], ModelSide] = CheckpointSide, inherited: tuple[int, ...] = (),
) -> ServerPlan:  # fmt: skip
    """A plan for a replica of a job. `num_workers`: its preprocessing workers. Raises ConfigError for a response_schema
    that cannot be served."""
    folder = options.allowed_media_dir
    if options.response_schema is not None:
        config = config.replace(prepare_structured_outputs=True)
    return ServerPlan(
        config=config,
        source=source,
        media=MediaRules(
            allowed_dir=None if folder is None else folder.resolve(),
            max_images=config.max_images_per_prompt,
            max_bytes=options.max_media_bytes,
            max_total_bytes=options.max_prompt_media_bytes,
        ),
        limits=PoolLimits(
            num_workers=num_workers,
            task_timeout_seconds=options.preprocessing_timeout,
            worker_memory_bytes=options.worker_memory_bytes,
            # Without a setting the platform's default counts, which is none above 256.
            max_ready=max_waiting_requests(config.max_num_seqs or 0),
        ),
        max_row_bytes=options.max_row_bytes,
        answer_defaults=answer_defaults(options),
        open_model=open_model,
        inherited=inherited,
    )


def num_rows_ahead(plan: ServerPlan) -> int:
    """Rows that a server has use for while its model loads."""
    return plan.limits.max_ready + 2 * plan.limits.num_workers


class RowServer(InlineReplica):
    """Serves the rows of a job's input."""

    endpoint: RowEndpoint

    def __init__(self, plan: ServerPlan, name: str = "this process"):
        super().__init__(name)
        self.num_rows_ahead = num_rows_ahead(plan)
        self._plan = plan

    def start(self, wake: Callable[[], None]) -> None:
        self._model = self._plan.open_model(self._plan.config)
        if self._plan.answer_defaults.get("max_thinking_tokens") is not None:
            try:
                self._model.processor.check_can_think()
            except RequestError as error:  # nobody's request: an option
                raise ConfigError(error.message) from error
        preprocessor = RowPreprocessor(
            source=self._plan.source,
            processor=self._model.processor,
            media=self._plan.media,
            max_row_bytes=self._plan.max_row_bytes,
            generation_defaults={**self._model.generation_defaults, **self._plan.answer_defaults},
            seed=self._plan.config.seed,
        )
        # Workers prepare the first rows while the model loads.
        self.endpoint = RowEndpoint(preprocessor, self._plan.limits, self._plan.inherited,
                                    name_of=self._plan.source.name)
        self._open.callback(self.endpoint.close)

    def _load(self) -> ReplicaFacts:
        with ExitStack() as hashing:
            digests = None
            folder = Path(self._plan.config.model)
            if self._plan.digest_threads:
                digests = hashing.enter_context(WeightDigests(folder, num_threads=self._plan.digest_threads))
            self._engine = self._open.enter_context(self._model.load(self.endpoint.wants_grammars.is_set))
            self.endpoint.raise_failure()
            weights = None if digests is None else {**fingerprint_model(folder), **digests.lines()}
        max_num_seqs = self._engine.max_num_seqs
        return ReplicaFacts(
            version=npu_runner.__version__,
            settings=self._settings(),
            ledger=self._engine.ledger,
            max_rows=max_num_seqs + max_waiting_requests(max_num_seqs) + self.num_rows_ahead,
            weights=weights,
            start_seconds=self._engine.start_seconds,
        )

    def _settings(self) -> dict[str, Any]:
        return {
            **self._engine.describe(),
            **{f"prompts.{name}": value for name, value in self._model.processor.identity().items()},
            **{f"generation_defaults.{name}": value for name, value in self._model.generation_defaults.items()},
            **{f"answers.{name}": value for name, value in shown_settings(self._plan.answer_defaults).items()},
        }
