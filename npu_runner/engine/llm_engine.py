"""Requests in, finished requests out. Schedules, has every rank run the steps, turns tokens into text and finishes.

While the ranks run a step the next one is planned and handed over, as far as `RunnerInfo.num_steps_under_way` goes.

Knows nothing of files, rows or processes; the executor owns the ranks.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, replace

import numpy as np

from npu_runner.checkpoint.model_config import ClassPooling
from npu_runner.core.batch import ScheduledBatch
from npu_runner.core.drafts import Drafter
from npu_runner.core.scheduler import Scheduler
from npu_runner.core.sequence import Sequence
from npu_runner.core.state_snapshots import SnapshotCounters
from npu_runner.engine import bounds
from npu_runner.engine.culprit_search import CulpritSearch
from npu_runner.engine.detokenizer import token_text
from npu_runner.engine.executors.executor import Executor, Progress, silent
from npu_runner.engine.generation import (
    End,
    Generation,
    PlainRows,
    PromptLogprobsRecord,
    UnfinishedRequest,
    not_followed,
)
from npu_runner.engine.rule_room import RuleRoom
from npu_runner.errors import EngineDeadError, NpuRunnerError, OutOfMemoryError, RequestError, StepError, blame_for
from npu_runner.prompts.text.reasoning import SplitAnswer, split_answer
from npu_runner.request.outputs import CompletionOutput, EngineStats, RequestOutput
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams, num_top_logprobs
from npu_runner.runner.base import ModelRunnerOutput
from npu_runner.sampling.sampler import NO_TOKEN
from npu_runner.strategies import OpenedCheckpoint

# Where nothing runs a rule that is being built is waited for so long at a time: an interrupt comes through, and rows
# whose rules are built together begin together.
_PATIENCE_SECONDS = 0.05
_POOLED_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)


class LLMEngine:
    """Continuous batching over one model. Not thread-safe; close it, or use it as a context manager."""

    def __init__(self, checkpoint: OpenedCheckpoint, *, wants_grammars: Callable[[], bool] = lambda: False,
                 progress: Progress = silent):
        """`wants_grammars` is called while the model loads: whether a request with a grammar is expected. Several ranks
        ignore it. `progress` is called with what the engine, or rank 0 of several, does until it is ready."""
        self.config, self.model_config = checkpoint.config, checkpoint.model_config
        self.processor, self.generation_defaults = checkpoint.processor, checkpoint.generation_defaults
        self._eos_token_ids = checkpoint.end_token_ids
        bounds.warn_of_unsupported_parts(self.model_config)
        self._known_settings = bounds.settings_before_loading(checkpoint)
        fallbacks = bounds.find_fallbacks(checkpoint)
        self._executor: Executor
        if self.config.parallel.tensor_parallel_size == 1:
            from npu_runner.engine.executors.inline_executor import InlineExecutor

            self._executor = InlineExecutor(checkpoint, wants_grammars, progress, fallbacks)
        else:
            from npu_runner.engine.executors.shared_memory import SharedMemoryExecutor

            self._executor = SharedMemoryExecutor(checkpoint.config, checkpoint.path, progress, fallbacks)
        self.info = info = self._executor.info
        self.max_model_len, self.max_num_seqs = info.max_model_len, info.max_num_seqs
        self.max_num_batched_tokens = info.max_num_batched_tokens
        has_prefix_cache = self.config.cache.enable_prefix_caching
        self.block_manager = bounds.make_block_manager(info, enable_prefix_caching=has_prefix_cache)
        self._drafter = None if info.speculative is None else Drafter(info.speculative)
        self.scheduler = Scheduler(bounds.scheduler_limits(info), self.block_manager, self._drafter)
        self._under_way: deque[ScheduledBatch] = deque()
        self._planned: ScheduledBatch | None = None
        """A step with requests that were in none before: `pop_started` names them before it runs."""
        self._begun: set[str] = set()
        self._started: list[str] = []
        self._last_end = 0.0
        """When the last step was collected, or the first of those under way was planned."""
        self._search = CulpritSearch(self.scheduler, self._executor, uses_mrope=info.uses_mrope)
        self._token_text = functools.partial(token_text, self.processor.tokenizer)
        self._requests: dict[str, UnfinishedRequest] = {}
        self._generation_of: dict[int, Generation] = {}
        self._rows = PlainRows(info.max_num_seqs)
        self._rules = RuleRoom()
        self._next_seq_id = 0
        self._ready: list[RequestOutput] = []
        self._stats = EngineStats(kv_blocks_total=self.block_manager.num_usable)

    # -- requests --------------------------------------------------------------------------------------------------

    def add_request(self, request_id: str, prompt: PromptInputs | SequenceOf[PromptInputs],
                    params: SamplingParams | PoolingParams) -> list[int]:
        """Queue a prompt, or with PoolingParams one or several. `params`: as `ChatProcessor.resolve_params` made them.
        Returns of each of its sequences the tokens to compute, less those that the prefix cache has now. Raises
        RequestError, and queues nothing, when it cannot be served."""
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is already running", code="duplicate_request_id")
        prompts = [prompt] if isinstance(prompt, PromptInputs) else list(prompt)
        if isinstance(params, PoolingParams):
            for index, each in enumerate(prompts):
                try:
                    self._check(each, params)
                except RequestError as error:
                    raise RequestError(error.message, error.code, error.param, prompt_index=index) from error
            self._add_poolings(request_id, prompts, params)
        else:
            (only,) = prompts
            self._check(only, params)
            self._add_generations(request_id, only, params)
        return [each.sequence.num_tokens - self.block_manager.num_findable_tokens(each.sequence)
                for each in self._requests[request_id].generations]

    def pop_started(self) -> list[str]:
        """The requests of which the next call of `step` runs the first step: that step is planned, and not yet
        submitted."""
        started, self._started = self._started, []
        return started

    def _check(self, prompt: PromptInputs, params: SamplingParams | PoolingParams) -> None:
        bounds.check_request(prompt, params, self.processor, self.model_config, self.max_model_len)
        bounds.check_images(prompt, self.info)

    def _add_generations(self, request_id: str, prompt: PromptInputs, params: SamplingParams) -> None:
        room = self.max_model_len - len(prompt.token_ids)
        eos_tokens = () if params.ignore_eos else self._eos_token_ids
        end_tokens = frozenset(params.stop_token_ids).union(eos_tokens)
        request = self._requests[request_id] = UnfinishedRequest(request_id, [prompt])
        if params.prompt_logprobs is not None:
            num_top = num_top_logprobs(params.prompt_logprobs, self.model_config.vocab_size)
            request.prompt_logprobs = PromptLogprobsRecord(prompt.token_ids, num_top)
        for index in range(params.n):
            sequence = Sequence(
                seq_id=self._next_seq_id, arrival=self._next_seq_id, request_id=request_id, index=index,
                prompt=prompt, params=params, seed=self._seed(request_id, params, index),
                max_num_tokens=len(prompt.token_ids) + min(room, params.max_tokens or room),
                scores_prompt=index == 0 and params.prompt_logprobs is not None)
            self._queue(request, self._generation(sequence, end_tokens))

    def _add_poolings(self, request_id: str, prompts: list[PromptInputs], params: PoolingParams) -> None:
        """A sequence for each prompt, which ends with what stands where its first token would."""
        labels = params.label_token_ids
        request = self._requests[request_id] = UnfinishedRequest(request_id, prompts, has_labels=labels is not None)
        pooling = self.model_config.pooling
        if isinstance(pooling, ClassPooling) and pooling.pad_token_id is not None and not params.keeps_tokens:
            prompts = [prompt.without_trailing(pooling.pad_token_id) for prompt in prompts]
        for index, prompt in enumerate(prompts):
            for label in labels or ((),):
                sequence = Sequence(
                    seq_id=self._next_seq_id, arrival=self._next_seq_id, request_id=request_id, index=index,
                    prompt=prompt, params=_POOLED_PARAMS, seed=0, pooling=None if labels else params,
                    output_token_ids=list(label), scored_ends=self._eos_token_ids if labels else (),
                    max_num_tokens=len(prompt.token_ids) + len(label) + 1)
                self._queue(request, self._generation(sequence, frozenset()))

    def _generation(self, sequence: Sequence, end_tokens: frozenset[int]) -> Generation:
        return Generation(sequence, self.processor.tokenizer, end_tokens, self.model_config.vocab_size)

    def _queue(self, request: UnfinishedRequest, generation: Generation) -> None:
        self._next_seq_id += 1
        request.generations.append(generation)
        self._generation_of[generation.sequence.seq_id] = generation
        self._enqueue(generation.sequence)
        if self._rules.is_building and self._executor.builds_here:  # while the caller prepares its next requests
            self._rules.record(self._executor.build_rules(self._rules.to_ask(), 0.0))

    def _enqueue(self, sequence: Sequence) -> None:
        """For the scheduler, once its rule is built: no step waits for that."""
        if not self._rules.holds(sequence):
            self.scheduler.add(sequence)

    def abort_request(self, request_id: str) -> None:
        """End a request now; its unfinished completions get finish_reason `abort` in the next step's outputs.

        An unknown or finished id is ignored: it may have finished a moment ago.
        """
        request = self._requests.get(request_id)
        for generation in request.generations if request else []:
            if generation.finished is None:
                self._finish(generation, End("abort"))

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._ready)

    def step(self) -> list[RequestOutput]:
        """Hand over what steps may be under way, and book one; returns the requests that finished.

        A request that makes steps fail ends with finish_reason `error`, and the others go on. Raises EngineDeadError
        when the device or a rank is lost. After any other exception, an interrupt too, the steps under way are as if
        they had never been scheduled.
        """
        try:
            self._search.drop_the_aborted()
            self._submit()
            if self._under_way and self._planned is None:
                self._collect()
            if not self._requests:
                self._drain()
        except BaseException as error:
            if isinstance(error, EngineDeadError) and not error.request_ids:
                error.request_ids = tuple(dict.fromkeys(name for step in self._under_way for name in step.request_ids))
            self._start_again()
            raise
        ready, self._ready = self._ready, []
        return ready

    def _submit(self) -> None:
        """Plan and hand over steps. Where nothing runs, wait a moment for rules that are being built."""
        self._admit_what_is_built()
        if self._rules.is_building and not (self._under_way or self.scheduler.running):
            self._rules.record(self._executor.build_rules(self._rules.to_ask(), _PATIENCE_SECONDS))
            self._admit_what_is_built()
        self._launch()

    def _admit_what_is_built(self) -> None:
        for sequence in self._rules.pop_ready():
            self.scheduler.add(sequence)
        for sequence, error in self._rules.pop_failed():
            self._finish(self._generation_of[sequence.seq_id], not_followed(error.message, error.code))

    def _launch(self) -> None:
        """While a culprit is looked for there is one step at a time."""
        most = 1 if self._search.is_on else self.info.num_steps_under_way
        while len(self._under_way) < most and (batch := self._planned or self.scheduler.schedule()) is not None:
            if self._planned is None and self._starts_requests(batch):
                self._planned = batch
                return
            self._planned = None
            if not self._under_way:
                self._last_end = time.perf_counter()
            self._under_way.append(batch)
            batch.new_rules = self._rules.to_ask()
            self._executor.submit(batch)

    def _starts_requests(self, batch: ScheduledBatch) -> bool:
        """Whether requests of a step were in none before; `pop_started` has them from now on."""
        if batch.is_prefill:
            self._started = [name for name in dict.fromkeys(batch.request_ids) if name not in self._begun]
            self._begun.update(self._started)
        return batch.is_prefill and bool(self._started)

    def _collect(self) -> None:
        """Book what the oldest step under way brings."""
        batch = self._under_way[0]
        try:
            output = self._executor.collect()
        except (RequestError, OutOfMemoryError, StepError) as error:
            culprit = self._search.step_failed(batch, error)
            self._under_way.clear()
            self._rules.ask_again()
            if culprit is not None:
                self._give_up(culprit.request_id, error)
            return
        self._under_way.popleft()
        self._rules.record(output.rules)
        sequences = self.scheduler.complete()
        self._book(batch, sequences, output)
        num_tokens = batch.num_tokens if batch.is_prefill else len(sequences) - sequences.count(None)
        if self._drafter is not None:
            num_tokens += self.scheduler.resolve_drafts()
            self._drafter.record_next(sequences, output.spec_token_ids, output.num_forced)
        self._search.step_ended()
        self._count(batch.is_prefill, num_tokens)

    def _drain(self) -> None:
        """Collect the steps in flight and drop their results."""
        if self._planned is not None:
            self._launch()
        while self._under_way:
            self._collect()

    def _book(self, batch: ScheduledBatch, sequences: list[Sequence | None], output: ModelRunnerOutput) -> None:
        """Book the results of a step. It is short, because it runs for every generated token."""
        if output.pooled is not None:
            self._book_pooled(sequences, output, output.pooled)
            return
        if output.prompt_scores:
            self._book_prompt_scores(sequences, output)
        self._book_states(sequences, output)
        slots, tokens_B = batch.slots_B, output.sampled_token_ids
        of_interest = range(len(sequences)) if batch.is_prefill else self._rows.book(slots, sequences, tokens_B)
        for row in of_interest:
            sequence, tokens = sequences[row], output.tokens_of(row)
            if sequence is None or not tokens:
                continue
            if tokens[0] == NO_TOKEN and self.scheduler.compute_apart(sequence):
                continue
            if batch.is_prefill:
                self._record_cached_tokens(sequence)
            generation = self._generation_of[sequence.seq_id]
            if sequence.scored_ends:
                self._finish(generation, generation.receive_label())
                continue
            end, place = generation.append(tokens[0], output.logprobs, row), 0
            while end is None and (place := place + 1) < len(tokens):  # drafts that were kept, and one more
                if tokens[place] == NO_TOKEN and self.scheduler.compute_apart(sequence):
                    break
                end = generation.append(tokens[place], output.logprobs_at(place), row)
            if end is None:
                self._rows.record(int(slots[row]), generation)
            else:
                has_reason = row in output.problems and tokens[place] < 0
                self._finish(generation, not_followed(output.problems[row]) if has_reason else end)

    def _book_prompt_scores(self, sequences: list[Sequence | None], output: ModelRunnerOutput) -> None:
        for row, place, records in output.prompt_scores:
            sequence = sequences[row]
            if sequence is not None and sequence.scored_ends:
                self._generation_of[sequence.seq_id].put_label(place, records)
            elif sequence is not None:
                record = self._requests[sequence.request_id].prompt_logprobs
                assert record is not None, "the log probabilities of this prompt were not requested"
                record.put(place, records)
                sequence.scores_prompt = not record.is_whole

    def _book_states(self, sequences: list[Sequence | None], output: ModelRunnerOutput) -> None:
        for row, place, states_LD in output.prompt_states:
            if (sequence := sequences[row]) is not None:
                self._generation_of[sequence.seq_id].put_states(place, states_LD)

    def _book_pooled(self, sequences: list[Sequence | None], output: ModelRunnerOutput,
                     pooled: Mapping[int, np.ndarray]) -> None:
        self._book_states(sequences, output)
        for row, values_W in pooled.items():
            sequence = sequences[row]
            if sequence is not None:
                request, generation = self._requests[sequence.request_id], self._generation_of[sequence.seq_id]
                end = generation.receive_pooled(values_W)
                if end.reason == "error" and self.scheduler.compute_apart(sequence):
                    continue
                request.record_first_token()
                request.num_cached_tokens = (request.num_cached_tokens or 0) + sequence.num_cached_tokens
                self._finish(generation, end)

    def _give_up(self, request_id: str, error: NpuRunnerError) -> None:
        code = blame_for(error)
        reason = str(error).partition("\n")[0]
        for generation in list(self._requests[request_id].generations):
            if generation.finished is None:
                self._finish(generation, End("error", error=f"alone in its step, this request fails: {reason}",
                                             code=code))

    # -- completions -----------------------------------------------------------------------------------------------

    def _record_cached_tokens(self, sequence: Sequence) -> None:
        request = self._requests[sequence.request_id]
        request.record_first_token()
        if request.num_cached_tokens is None:
            request.num_cached_tokens = sequence.num_cached_tokens

    def _finish(self, generation: Generation, end: End) -> None:
        sequence = generation.sequence
        self._rules.leave(sequence)
        self.scheduler.finish(sequence, end.reason)
        token_ids, record = sequence.output_token_ids, generation.logprobs
        answer, is_whole = self._split(generation.finish_text(), sequence), end.reason in ("stop", "length")
        generation.finished = CompletionOutput(
            index=sequence.index, text=answer.content, token_ids=token_ids, finish_reason=end.reason,
            stop_reason=end.stop_reason, error=end.error, error_code=end.code, reasoning_content=answer.reasoning,
            num_reasoning_tokens=answer.num_reasoning_tokens,
            pooled=generation.pooled if end.reason == "stop" and not sequence.params.return_hidden_states else None,
            hidden_states=generation.hidden_states(self.config.hidden_state_layers or ()) if is_whole else None,
            logprobs=None if record is None else record.finish(token_ids, self._token_text))
        del self._generation_of[sequence.seq_id]
        self._answer_if_whole(self._requests[sequence.request_id])

    def _answer_if_whole(self, request: UnfinishedRequest) -> None:
        """Once all of its completions have ended; whatever an interrupt has left of a call before this one."""
        completions = [g.finished for g in request.generations if g.finished is not None]
        if len(completions) < len(request.generations):
            return
        if not self._ready or self._ready[-1].request_id != request.request_id:
            self._ready.append(request.output(completions, self._token_text))
        self._begun.discard(request.request_id)
        del self._requests[request.request_id]

    def _split(self, text: str, sequence: Sequence) -> SplitAnswer:
        return split_answer(
            text, sequence.output_token_ids, thinking=sequence.prompt.thinking, tokens=self.processor.reasoning_tokens,
            tokenizer=self.processor.tokenizer, skip_special_tokens=sequence.params.skip_special_tokens)

    # -- checks, figures, end --------------------------------------------------------------------------------------

    def _seed(self, request_id: str, params: SamplingParams, index: int) -> int:
        if params.seed is not None or params.is_greedy:  # greedy rows never read theirs
            return (params.seed or 0) + index
        text = f"{self.config.seed}:{request_id}:{index}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def _count(self, is_prefill: bool, num_tokens: int) -> None:
        """A step takes the time since the one before it was collected."""
        stats, now = self._stats, time.perf_counter()
        seconds, self._last_end = now - self._last_end, now
        if is_prefill:
            stats.num_prefill_steps += 1
            stats.num_prefill_tokens += num_tokens
            stats.prefill_seconds += seconds
        else:
            stats.num_decode_steps += 1
            stats.num_decode_tokens += num_tokens
            stats.decode_seconds += seconds

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a step, or for their rule. Asked in every turn, where all of `stats` takes long."""
        return self.scheduler.num_waiting + self._rules.num_waiting

    def stats(self) -> EngineStats:
        """A copy of the counters, with the gauges of this moment."""
        prefix, snapshots = self.block_manager.counters, self.block_manager.snapshots
        states = SnapshotCounters() if snapshots is None else snapshots.counters
        return replace(
            self._stats,
            num_preemptions=self.scheduler.num_preemptions,
            num_running=len(self.scheduler.running),
            num_waiting=self.num_waiting,
            prefix_cache_queries=prefix.queries,
            prefix_cache_hits=prefix.hits,
            state_snapshots_taken=states.taken,
            state_snapshots_used=states.used,
            state_snapshots_evicted=states.evicted,
            kv_blocks_used=self.block_manager.num_used,
            kv_blocks_peak=self.block_manager.peak_used,
            **({} if self._drafter is None else asdict(self._drafter.counters)),
            **asdict(self._executor.counters()))

    @property
    def ledger(self) -> str:
        """Where the device's memory went, in lines."""
        return self.info.ledger

    @property
    def start_seconds(self) -> dict[str, float]:
        """Where the start of the first rank went, by phase, in order."""
        return self.info.start_seconds

    def describe(self) -> dict[str, str]:
        """Everything beside the checkpoint and the request that shapes an answer."""
        return {**self.info.description, "max_model_len": str(self.max_model_len), **self._known_settings}

    def reset(self) -> None:
        """Forget every request and the prefix cache, whatever state an interrupt has left them in."""
        self._requests, self._generation_of, self._ready = {}, {}, []
        self._begun.clear()
        self._start_again()

    def _start_again(self) -> None:
        """Every unfinished sequence begins anew with the tokens it has. Nothing is repaired, all is made again: an
        interrupt may come between any two lines."""
        self._executor.rollback()
        self._under_way.clear()
        self._planned, self._started = None, []
        self._search.reset()
        self._rows.reset()
        self._rules.reset()
        self.scheduler.reset()
        for _, generation in sorted(self._generation_of.items()):
            generation.rollback()
            generation.sequence.reset()
            self._enqueue(generation.sequence)
        for request in list(self._requests.values()):
            self._answer_if_whole(request)

    def close(self) -> None:
        """End all processes and free the device. May be called twice."""
        self._executor.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
