"""A job's replica: rows are prepared in worker processes, and answered as lines of the output.

It works in the driver's thread, or in a process of its own. Knows nothing of files of answers, or of resuming.
"""

from __future__ import annotations

import dataclasses
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import npu_runner
from npu_runner.batch.files.durable import late_file_errors
from npu_runner.batch.files.fingerprint import WeightDigests, fingerprint_model
from npu_runner.batch.files.row_book import CarriedRows, RowBook, RowFile
from npu_runner.batch.job.attempts import Attempts
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.rows.attempt import ATTEMPTS, BEST_OF
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.endpoint import AnswerForm
from npu_runner.batch.rows.ladder import Ladder, read_ladder
from npu_runner.batch.rows.openai_response import JobStamp, answer_row, error_row, placed, why_unanswered
from npu_runner.batch.rows.preprocessing import RowPreprocessor
from npu_runner.batch.rows.shape import RowSource
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, RequestError
from npu_runner.grammars.compile import with_grammar
from npu_runner.prompts.media.media import MediaRules
from npu_runner.request.limits import LIMITS
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PageFacts
from npu_runner.request.repetition_detection import RepetitionDetectionParams
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.request.structured_outputs import JSON_KINDS, StructuredOutputsParams
from npu_runner.serving.endpoint import Endpoint, Prepared
from npu_runner.serving.options import num_cpus
from npu_runner.serving.replica import Event, FinishedRow, Opened, ReplicaFacts, RowRun
from npu_runner.serving.replicas.inline_replica import InlineReplica, RowsAhead, rows_ahead
from npu_runner.serving.workers.pool import PoolLimits

_IDLE_SECONDS = 0.2
_MAX_BYTES_IN_MEMORY = 64 << 20


class CheckpointSide:
    """A checkpoint that is about to be served: its processor, which can be pickled, is there at once, and LLMEngine
    loads later. `generation_defaults`: SamplingParams fields that the checkpoint sets. Tests put another class in its
    place."""

    def __init__(self, config: RunnerConfig):
        # torch comes with it: not before everything else is checked
        from npu_runner.strategies import open_checkpoint

        self.checkpoint = open_checkpoint(config)
        self.processor, self.generation_defaults = self.checkpoint.processor, self.checkpoint.generation_defaults

    def describe(self) -> Mapping[str, Any]:
        """The part of the engine's `describe` that is known before it loads."""
        from npu_runner.engine.bounds import settings_before_loading

        return settings_before_loading(self.checkpoint)

    def load(self, wants_grammars: Callable[[], bool], progress: Callable[[str], None]) -> AbstractContextManager[Any]:
        """The engine, once it can serve. `wants_grammars`, `progress`: LLMEngine's."""
        from npu_runner.engine.llm_engine import LLMEngine

        return LLMEngine(self.checkpoint, wants_grammars=wants_grammars, progress=progress)


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """The plan of a RowServer. Picklable as far as `open_model` and `source` are."""

    config: RunnerConfig
    source: RowSource
    """Where rows are read, in any worker process of the server."""
    media: MediaRules
    limits: PoolLimits
    max_row_bytes: int
    answer_defaults: dict[str, Any] = field(default_factory=dict)
    """Fields of SamplingParams that the job sets for rows that leave them open."""
    ladder: Ladder | None = None
    open_model: Callable[[RunnerConfig], CheckpointSide] = CheckpointSide
    inherited: tuple[int, ...] = ()
    """Descriptors that `source` reads through: of processes of this host that have inherited them."""
    digest_threads: int = 0
    """Threads that hash the weights while they load, for a server that sees another folder than the driver; 0: none."""


def server_plan(config: RunnerConfig, options: BatchOptions, source: RowSource,
                open_model: Callable[[RunnerConfig], CheckpointSide] = CheckpointSide,
                num_workers: int | None = None) -> ServerPlan:
    """A plan for a replica of a job. `num_workers`: its preprocessing workers; None: as many as this host's cores
    allow. Raises ConfigError for a response_schema that cannot be served, and for a wrong ladder."""
    folder = options.allowed_media_dir
    if options.response_schema is not None:
        config = config.replace(prepare_structured_outputs=True)
    if config.logprobs_mode.endswith("logits"):
        raise ConfigError(f"logprobs_mode {config.logprobs_mode}: rows have fields of log probabilities alone; use "
                          "raw_logprobs or processed_logprobs, or LLM, which returns logits")
    if config.hidden_state_layers is not None:
        raise ConfigError("hidden_state_layers: rows have no field for them; leave it out, or use LLM")
    return ServerPlan(
        config=config,
        source=source,
        media=MediaRules(
            allowed_dir=None if folder is None else folder.resolve(),
            max_bytes=options.workers.max_media_bytes, max_total_bytes=options.workers.max_prompt_media_bytes,
        ).with_passwords(options.pdf_passwords),
        limits=PoolLimits(
            num_workers=options.workers.num_workers(num_cpus()) if num_workers is None else num_workers,
            task_timeout_seconds=options.workers.preprocessing_timeout,
            worker_memory_bytes=options.workers.worker_memory_bytes,
            # Without a setting the platform's default counts, which is none above 256.
            max_ready=_rows_ahead(source, config.scheduler.max_num_seqs or 0).ready,
        ),
        max_row_bytes=options.max_row_bytes,
        answer_defaults=answer_defaults(options),
        ladder=read_ladder(options.ladder, options.ladder_reader),
        open_model=open_model,
        inherited=(source.descriptor,) if isinstance(source, RowFile) else (),
    )


def _rows_ahead(source: RowSource, max_num_seqs: int) -> RowsAhead:
    return rows_ahead(max_num_seqs, are_large=isinstance(source, CarriedRows))


def num_rows_ahead(plan: ServerPlan) -> int:
    """Rows that a server has use for while its model loads."""
    return plan.limits.max_ready + 2 * plan.limits.num_workers


class RowServer(InlineReplica):
    """Serves the rows of a job's input."""

    def __init__(self, plan: ServerPlan, name: str = "this process"):
        super().__init__(name)
        self._stamp: JobStamp | None = None
        """Known when the job begins."""
        self.num_rows_ahead = num_rows_ahead(plan)
        self._plan = plan
        self._attempts: Attempts | None = None
        if plan.ladder is not None:
            self._attempts = Attempts(plan.ladder, lambda row: self.endpoint.submit([row]))

    def start(self, wake: Callable[[], None], notify: Callable[[Event], None]) -> None:
        super().start(wake, notify)
        self._model = self._plan.open_model(self._plan.config)
        if self._plan.answer_defaults.get("max_thinking_tokens") is not None:
            try:
                self._model.processor.check_can_think()
            except RequestError as error:  # of an option
                raise ConfigError(error.message) from error
        preprocessor = RowPreprocessor(
            source=self._plan.source,
            processor=self._model.processor,
            media=self._plan.media,
            max_row_bytes=self._plan.max_row_bytes,
            generation_defaults={**self._model.generation_defaults, **self._plan.answer_defaults},
            seed=self._plan.config.seed,
            has_ladder=self._plan.ladder is not None)
        # Workers prepare the first rows while the model loads.
        are_forked = self._model.processor.transformers_images is not None
        limits = replace(self._plan.limits, are_forked=are_forked)
        self.endpoint = Endpoint(preprocessor, self._finish_row, limits, self._plan.inherited,
                                 failed=preprocessor.failed, pages_of=preprocessor.pages_of)
        self._open.callback(self.endpoint.pool.close)

    def serve(self, stamp: JobStamp) -> None:
        self._stamp = stamp
        super().serve(stamp)

    def submit(self, run: RowRun) -> None:
        self.endpoint.submit(run.rows() if self._attempts is None else self._attempts.start(run.rows()))

    def _recall(self, num_rows: int, *, include_started: bool) -> list[int]:
        found = super()._recall(num_rows, include_started=include_started)
        if self._attempts is not None:
            self._attempts.forget(found)
        return found

    def _finish_row(self, prepared: Prepared, result: RequestOutput | RequestError) -> FinishedRow | None:
        result = _error(prepared.form, result) or result
        counts = _counts(prepared, result)
        if self._attempts is None:
            return self._written(prepared, result, counts, prepared.pages)
        ended = self._attempts.end(prepared, result, counts)
        if ended is None:
            return None
        more = {name: value for name, value in ((ATTEMPTS, ended.later), (BEST_OF, ended.best_of)) if value}
        return self._written(ended.prepared, ended.result, ended.counts, ended.pages, more)

    def _written(self, prepared: Prepared, result: RequestOutput | RequestError, counts: Counts,
                 pages: list[PageFacts], more: Mapping[str, Any] = {}) -> FinishedRow:
        if isinstance(result, RequestError):
            data = error_row(result, custom_id=prepared.name, line=prepared.line, more=more)
            return FinishedRow(prepared.number, counts, data)
        assert self._stamp is not None, "no row is answered before the job begins"
        assert prepared.name is not None, "only a row that cannot be served has no name"
        data = answer_row(result, custom_id=prepared.name, form=prepared.form, stamp=self._stamp,
                          is_unparsed=bool(counts.num_unparsed), pages=pages, more=more)
        renderer = next((page.renderer for page in pages if page.renderer is not None), None)
        return FinishedRow(prepared.number, counts, data, renderer, prepared.may_be_copied)

    def prepare(self, book: RowBook) -> Iterator[Prepared]:
        """All rows of `book`, in the order in which the workers are done, once the server was started."""
        num_submitted = num_prepared = 0
        while num_prepared < book.num_rows:
            last = min(book.num_rows, num_prepared + self.num_rows_ahead)
            if last > num_submitted:
                self.submit(book.run(range(num_submitted, last)))
                num_submitted = last
            prepared = self.endpoint.next(_IDLE_SECONDS)
            if prepared is not None:
                num_prepared += 1
                yield prepared

    def _load(self) -> ReplicaFacts:
        self._notify(Opened(self.known_settings()))
        with ExitStack() as hashing:
            digests = None
            folder = Path(self._plan.config.model)
            if self._plan.digest_threads:
                digests = hashing.enter_context(WeightDigests(folder, num_threads=self._plan.digest_threads))
            self._engine = self._open.enter_context(
                self._model.load(self.endpoint.wants_grammars.is_set, self._report))
            self.endpoint.pool.raise_failure()
            weights = None if digests is None else {**fingerprint_model(folder), **digests.lines()}
        max_num_seqs = self._engine.max_num_seqs
        return ReplicaFacts(
            version=npu_runner.__version__,
            settings={**self._engine.describe(), **self.known_settings()},
            ledger=self._engine.ledger,
            max_rows=max_num_seqs + _rows_ahead(self._plan.source, max_num_seqs).waiting + self.num_rows_ahead,
            weights=weights,
            start_seconds=self._engine.start_seconds)

    def known_settings(self) -> dict[str, Any]:
        """Everything beside the checkpoint and the row that shapes an answer, as far as it is known before the engine
        loads: all names with a dot are."""
        return {
            **self._model.describe(),
            **{f"prompts.{name}": value for name, value in self._model.processor.identity().items()},
            **{f"generation_defaults.{name}": value for name, value in self._model.generation_defaults.items()},
            **{f"answers.{name}": value for name, value in shown_settings(self._plan.answer_defaults).items()},
            **({} if (ladder := self._plan.ladder) is None else {"answers.ladder": ladder.to_json()}),
        }


def _counts(prepared: Prepared, result: RequestOutput | RequestError) -> Counts:
    if isinstance(result, RequestError):
        return Counts.from_failure(result.code)
    rule = getattr(prepared.params, "structured_outputs", None)
    has_json_rule = isinstance(rule, StructuredOutputsParams) and rule.kind in JSON_KINDS
    form: AnswerForm = prepared.form
    return Counts.from_answer(result, form.compared_text(result), form.expected, has_json_rule=has_json_rule)


def _error(form: AnswerForm | None, result: RequestOutput | RequestError) -> RequestError | None:
    if isinstance(result, RequestOutput):
        return why_unanswered(result, form)
    return placed(result, form, result.prompt_index)


def check_known_settings(plan: ServerPlan, check: Callable[[Mapping[str, Any]], None]) -> None:
    """Call `check` as `all_refused` does; no row is prepared."""
    server = RowServer(plan)
    with server:
        server.start(lambda: None, lambda event: None)
        check(server.known_settings())


@contextmanager
def all_refused(plan: ServerPlan, book: RowBook, check: Callable[[Mapping[str, Any]], None]
                ) -> Iterator[Iterator[FinishedRow] | None]:
    """The error rows, if preprocessing refuses all rows of `book`; None: it does not. No weights are loaded.

    64 MiB of them are in memory, more in a nameless file. `check` is called with the settings that are known without
    weights. Raises what it raises, and what a replica raises while it opens the checkpoint and prepares rows; JobError
    when the disk is full.
    """
    with tempfile.SpooledTemporaryFile(_MAX_BYTES_IN_MEMORY) as file:
        server = RowServer(plan)
        with server:
            server.start(lambda: None, lambda event: None)
            check(server.known_settings())
            for prepared in server.prepare(book):
                row = None if prepared.error is None else server.endpoint.finish(prepared, prepared.error)
                if row is None:  # it is served, or a step of the ladder fits its error
                    break
                with late_file_errors(f"error rows in {tempfile.gettempdir()}", was_tried=False):
                    pickle.dump(row, file)
            is_one_fit = row is None
        file.seek(0)
        yield None if is_one_fit else (pickle.load(file) for _ in range(book.num_rows))


# -- what a job asks of the answers of rows that say nothing else ------------------------------------------------------


def answer_defaults(options: BatchOptions) -> dict[str, Any]:
    """Fields of SamplingParams. Raises ConfigError for a file that cannot be read, and for what cannot be served."""
    found: dict[str, Any] = {}
    if options.response_schema is not None:
        found["structured_outputs"] = _read_schema(options.response_schema)
    for name in ("max_thinking_tokens", "no_repeat_ngram_size", "no_repeat_ngram_window", "no_repeat_ngram_exempt_ids"):
        if (value := getattr(options, name)) not in (None, ()):
            found[name] = list(value) if isinstance(value, tuple) else value
    try:
        if options.repetition_detection is not None:
            detection = RepetitionDetectionParams.from_value(options.repetition_detection)
            found["repetition_detection"] = dataclasses.asdict(detection)
        SamplingParams(**found)
    except RequestError as error:  # of an option
        raise ConfigError(error.message) from error
    return found


def shown_settings(defaults: dict[str, Any]) -> dict[str, Any]:
    """The same as they stand in a manifest: JSON."""
    rule = defaults.get("structured_outputs")
    return {**defaults, "structured_outputs": rule.json} if isinstance(rule, StructuredOutputsParams) else defaults


def _read_schema(path: Path) -> StructuredOutputsParams:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LIMITS.max_schema_chars + 1)  # one more says that it is too long
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"response_schema: {str(path)!r} cannot be read ({error})") from error
    try:
        return with_grammar(StructuredOutputsParams(json=text, origin="response_schema"))
    except RequestError as error:
        raise ConfigError(f"{error.message} ({path})") from error
