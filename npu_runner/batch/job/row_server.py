"""A job's replica in this process: preprocessing workers and an engine. Knows nothing of the output."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import npu_runner
from npu_runner.batch.files.carried_rows import CarriedRow
from npu_runner.batch.files.fingerprint import WeightDigests, fingerprint_model
from npu_runner.batch.job.answer_defaults import answer_defaults, shown_settings
from npu_runner.batch.job.model_side import CheckpointSide, ModelSide
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.serving import ServingLoop
from npu_runner.batch.rows.input_row import InputRow, RowSource
from npu_runner.batch.rows.preprocessing import PreparedRow, RowPreprocessor
from npu_runner.config import RunnerConfig
from npu_runner.engine.waiting import max_waiting_requests
from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.serving.replicas.base import RawRow, ReplicaFacts, RowRun
from npu_runner.serving.replicas.inline import InlineReplica
from npu_runner.serving.workers.pool import NOT_YET, PoolLimits, WorkerPool


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
            max_images=config.prompts.max_images_per_prompt,
            max_bytes=options.workers.max_media_bytes,
            max_total_bytes=options.workers.max_prompt_media_bytes,
        ),
        limits=PoolLimits(
            num_workers=num_workers,
            task_timeout_seconds=options.workers.preprocessing_timeout,
            worker_memory_bytes=options.workers.worker_memory_bytes,
            # Without a setting the platform's default counts, which is none above 256.
            max_ready=max_waiting_requests(config.scheduler.max_num_seqs or 0),
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

    def __init__(self, plan: ServerPlan, name: str = "this process"):
        super().__init__(name)
        self.num_rows_ahead = num_rows_ahead(plan)
        self._plan = plan
        self._feed = _Feed()
        self._wants_grammars = threading.Event()
        """A row that was prepared has a grammar. Of use while the model loads."""

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
        self._pool: WorkerPool[InputRow] = self._open.enter_context(
            WorkerPool(preprocessor, self._feed, self._plan.limits, self._plan.inherited, seen=self._look_at)
        )

    def _look_at(self, prepared: Any) -> None:
        """In the pool's thread."""
        if isinstance(prepared, PreparedRow) and getattr(prepared.params, "structured_outputs", None) is not None:
            self._wants_grammars.set()

    def begin(self, terms: Any) -> None:
        self._loop = ServingLoop(self._engine, self._pool, name_of=self._plan.source.name, stamp=terms)

    def submit(self, run: RowRun) -> None:
        self._feed.add([_input_row(row) for row in run.rows()])
        self._pool.look_again()

    def recall(self, num_rows: int, *, begun: bool = False) -> None:
        found = self._feed.take_back(num_rows)
        if self._loop is not None and len(found) < num_rows:
            found += self._loop.give_back(num_rows - len(found), begun=begun)
        self._give_back(found)

    def _wait_to_begin(self) -> None:
        self._pool.raise_failure()

    def _num_workers_replaced(self) -> int:
        return self._pool.num_replaced

    def _load(self) -> ReplicaFacts:
        with ExitStack() as hashing:
            digests = None
            folder = Path(self._plan.config.model)
            if self._plan.digest_threads:
                digests = hashing.enter_context(WeightDigests(folder, num_threads=self._plan.digest_threads))
            self._engine = self._open.enter_context(self._model.load(self._wants_grammars.is_set))
            self._pool.raise_failure()
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


def _input_row(row: RawRow) -> InputRow:
    number, line, start, num_bytes, checksum, data = row
    if data is None:
        return InputRow(number, line, start, num_bytes, checksum)
    return CarriedRow(number, line, start, num_bytes, checksum, data)


class _Feed:
    """Rows that no worker has begun. Filled here, read by the pool's thread."""

    def __init__(self) -> None:
        self._rows: deque[InputRow] = deque()

    def add(self, rows: Sequence[InputRow]) -> None:
        self._rows.extend(rows)

    def take_back(self, num_rows: int) -> list[int]:
        found: list[int] = []
        while len(found) < num_rows:
            try:
                found.append(self._rows.pop().sequence)
            except IndexError:
                break
        return found

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> InputRow:
        try:
            return self._rows.popleft()
        except IndexError:
            return NOT_YET  # type: ignore[no-any-return]
