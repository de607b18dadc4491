"""Decode steps with drafts: one forward computes several tokens of each row, which are then sampled and verified.

If drafts change a later position only through a grammar's mask, all positions are sampled in one call, and the host
accepts each row's tokens up to its first rejected draft. Otherwise the sampler samples the first position of all rows,
then the second of the rows whose first draft was accepted, and so on. So each position has the history that plain
steps would have left: counts, penalties, bans, bad words, n-grams. The host waits for each position then. A rejected
draft never reaches the sampler; the token sampled in its place is the row's last token of the step.

To the network a token is a row of its own: it attends to its slot's blocks up to itself, as in a step of one token. A
layer with a state goes from token to token of a row, and leaves the state of each in a slot of its own. The scheduler
knows which of them becomes the row's (core/state_slots.py).

B sequences in the step, T tokens in the step, R rows that still sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from npu_runner.core.batch import ScheduledBatch
from npu_runner.platforms.attention import ends_of_tokens, sequences_of_tokens
from npu_runner.platforms.step_inputs import StepInputs
from npu_runner.request.speculative import SpeculativeConfig
from npu_runner.runner.base import ModelRunnerOutput, StepLogprobs
from npu_runner.runner.buckets import Bucket
from npu_runner.runner.decode_forward import DecodeStep, DraftedDecodeStep, TogetherStep
from npu_runner.runner.step import Launched, PreparedStep, StepRunner, StepUnderWay
from npu_runner.runner.step_arrays import SAMPLER_ARRAYS, step_arrays, to_device
from npu_runner.sampling.sampler import HostSample, Sampler, SamplerOutput

_OF_TOKENS = ("positions", "slot_mapping", "context_lens", "token_slots", "state_slots", "runs")


@dataclass
class VerifiedStep:
    """The results of the rows of a step with drafts, filled position by position. A step that is repeated after an
    out-of-memory error resumes where it stopped."""

    batch: ScheduledBatch
    tokens: list[list[int]] = field(init=False)
    logprobs: list[StepLogprobs | None] = field(default_factory=list)
    """The logprobs of each position."""
    problems: dict[int, str] = field(default_factory=dict)
    sampled: SamplerOutput | None = None
    """The sampler's output for `rows_R`, until it is received."""
    rows_R: np.ndarray = field(init=False)
    next_input_ids_B: np.ndarray = field(init=False)
    """int32: the last token of each row, a valid one where it has none."""

    def __post_init__(self) -> None:
        batch = self.batch
        self.tokens = [[] for _ in range(batch.batch_size)]
        self.rows_R = np.arange(batch.batch_size)
        self.next_input_ids_B = np.zeros(batch.batch_size, dtype=np.int32)
        self._firsts_B = np.cumsum(batch.query_lens_B) - batch.query_lens_B

    @property
    def place(self) -> int:
        return len(self.logprobs)

    @property
    def places_R(self) -> np.ndarray:
        """The index of the token behind which each row samples."""
        return self._firsts_B[self.rows_R] + self.place

    def record(self, sample: HostSample) -> None:
        """Record the samples of `rows_R`. Rows whose next draft equals its sample go on."""
        rows_R, sampled_R = self.rows_R, sample.token_ids_B
        for row, token in zip(rows_R.tolist(), sampled_R.tolist(), strict=True):
            self.tokens[row].append(token)
        self.next_input_ids_B[rows_R] = np.maximum(sampled_R, 0)
        self.problems.update((int(rows_R[place]), problem) for place, problem in sample.problems.items())
        has_more_R = self.batch.query_lens_B[rows_R] > self.place + 1
        # Behind a row's last token the next row's first one stands, and the last row's at the end has none.
        next_R = np.minimum(self.places_R + 1, len(self.batch.token_ids_T) - 1)
        self.rows_R = rows_R[has_more_R & (self.batch.token_ids_T[next_R] == sampled_R)]
        self.logprobs.append(StepLogprobs.from_sample(self.batch.batch_size, rows_R, sample))
        self.sampled = None

    def record_all(self, sample: HostSample) -> None:
        """Record the samples behind each token of the step, as if all drafts before it were accepted."""
        batch = self.batch
        sampled_T, ends = sample.token_ids_B.tolist(), (self._firsts_B + batch.query_lens_B).tolist()
        for row, (first, end) in enumerate(zip(self._firsts_B.tolist(), ends, strict=True)):
            drafts = [*batch.token_ids_T[first + 1 : end].tolist(), None]
            accepted = next(place for place, draft in enumerate(drafts) if sampled_T[first + place] != draft)
            self.tokens[row] = sampled_T[first : first + accepted + 1]
            self.next_input_ids_B[row] = max(0, self.tokens[row][-1])
            if first in sample.problems:
                self.problems[row] = sample.problems[first]
        self.logprobs = [None] * max(map(len, self.tokens))
        self.rows_R, self.sampled = self.rows_R[:0], None

    def is_done(self) -> bool:
        return True

    def to_host(self) -> VerifiedStep:
        return self


class SpeculativeStepRunner(StepRunner):
    """A StepRunner whose decode steps may have drafts; those that have none are as ever. Beside one with drafts no
    other is under way.

    Graphs are those of plain steps: one of P rows runs P tokens, of as many sequences or fewer. With states these are
    graphs that take drafts, if `graphs_accept_drafts`; else plain steps alone have graphs.
    """

    def __init__(self, *arguments: Any, speculative: SpeculativeConfig, graphs_accept_drafts: bool, **settings: Any):
        super().__init__(*arguments, **settings)
        self.speculative, self.graphs_accept_drafts = speculative, graphs_accept_drafts
        self._verified: VerifiedStep | None = None

    @property
    def _has_rings(self) -> bool:
        return self.states is not None and self.states.rings is not None

    @property
    def graph_step(self) -> DecodeStep:
        if self.gated_delta is None or self._has_rings or not self.graphs_accept_drafts:
            return self.decode_step
        return self._drafted_step

    @property
    def drafted_graph_step(self) -> nn.Module | None:
        if self._has_rings or not self.graphs_accept_drafts:
            return self._drafted_step if self.graphs_accept_drafts else None
        return TogetherStep(self.graph_step) if self.attention.groups_drafts else None

    @property
    def _drafted_step(self) -> DecodeStep:
        return DraftedDecodeStep(self.model, self.states, self.gated_delta)

    def admit(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        self._verified = VerifiedStep(batch) if batch.has_drafts else None
        return super().admit(batch)

    def prepare(self, batch: ScheduledBatch, number: int, of_rows: dict[str, np.ndarray]) -> PreparedStep:
        """A step with drafts is a decode step whose rows are the batch's tokens."""
        if not batch.has_drafts:
            return super().prepare(batch, number, of_rows)
        batch = self._with_state_slots(batch)
        self.tables.learn(batch.new_blocks_N3)
        rows_T = np.repeat(np.arange(batch.batch_size), batch.query_lens_B)
        query_lens, context_lens = batch.query_lens_B.tolist(), batch.context_lens_B.tolist()
        token_slots_T = np.arange(len(rows_T), dtype=np.int32)
        arrays = step_arrays(batch, of_rows, number, self.block_size, self.tables.on_host_SW) | {
            "context_lens": ends_of_tokens(query_lens, context_lens), "token_slots": token_slots_T}
        bucket = self.buckets.find(len(rows_T)) if self.buckets and self.graphs_accept_drafts else None
        if bucket is not None and self._has_rings and bucket.drafted is None:
            bucket = None  # only where graphs of other sizes did not fit
        if bucket is not None:
            arrays["token_slots"] = self.max_num_seqs + token_slots_T  # behind those of sequences
            if self.gated_delta is None:
                arrays["state_slots"] = arrays["token_slots"]  # a slot for each token, which none has
            return self._prepare_graph(batch, number, bucket, arrays, batch.slots_B[rows_T])
        arrays |= {"tokens": batch.token_ids_T, "rows": rows_T.astype(np.int32)}
        if self.attention.groups_drafts:
            arrays["sequences"] = sequences_of_tokens(query_lens, context_lens)
        news = self.tables.news(batch.new_blocks_N3, batch.slots_B)
        tensors = to_device(self.platform.memory, {**arrays, "table_news": news.flat}, self.device)
        tables_BW = self.tables.write(tensors["table_news"], news.num_entries, batch.slots_B)
        tensors["block_tables"] = tables_BW.index_select(0, tensors["rows"])
        on_host_BW = self.tables.on_host_SW[batch.slots_B, : -(-max(context_lens) // self.block_size)]
        plan = self.attention.plan_decode(context_lens, on_host_BW, self.device, query_lens)
        state_plan = None
        if self.gated_delta is not None and not self._has_rings:
            state_plan = self.gated_delta.plan_drafts(tensors["runs"], query_lens)
        return PreparedStep(batch, number, tensors, StepInputs.from_tensors(tensors), None, plan, state_plan)

    def launch(self, step: PreparedStep) -> Launched:
        if step.bucket is None and step.batch.has_drafts and self._has_rings:
            return Launched(self._drafted_step(step.inputs, step.plan))
        return super().launch(step)

    def _with_state_slots(self, batch: ScheduledBatch) -> ScheduledBatch:
        """The tokens of a row have its slot where drafts leave no states. Hidden states of drafts lie beside slots."""
        if self.states is None or batch.state_slots is not None:
            return batch
        is_draft_T = np.arange(batch.num_tokens) != np.repeat(
            np.cumsum(batch.query_lens_B) - batch.query_lens_B, batch.query_lens_B)
        slots_T = np.repeat(batch.slots_B, batch.query_lens_B)
        if self.states.hidden_SD is not None:
            slots_T[is_draft_T] = self.states.plan.num_slots + np.arange(int(is_draft_T.sum()))
        return replace(batch, state_slots=slots_T.astype(np.int32))

    def _prepare_graph(self, batch: ScheduledBatch, number: int, bucket: Bucket, arrays: dict[str, np.ndarray],
                       slots_T: np.ndarray) -> PreparedStep:
        """The same, run by a graph of plain steps with as many rows. What the sampler takes is sent place by place."""
        own = to_device(self.platform.memory, {"tokens": batch.token_ids_T, "slots": arrays["slots"]}, self.device)
        self.fill(bucket, batch.new_blocks_N3, {name: arrays[name] for name in _OF_TOKENS}, slots_T)
        self.last_tokens_S[self.max_num_seqs :][: len(slots_T)].copy_(own["tokens"])
        return PreparedStep(batch, number, {**bucket.tensors, "slots": own["slots"]}, bucket.inputs, bucket, None)

    def make_result(self, step: PreparedStep, logits_BV: Tensor, of_rows: dict[str, np.ndarray]) -> Any:
        """Return the result; None on ranks that do not sample. All tokens of a step with drafts are on the host by
        then."""
        verified = self._verified
        if verified is None:
            return super().make_result(step, logits_BV, of_rows)
        if self.sampler is not None:
            if not verified.place and self.sampler.samples_at_once(step.batch.slots_B):
                verified.sampled = verified.sampled or self._sample_all(self.sampler, step, logits_BV)
                sample = verified.sampled.to_host()
                self.check_receipts(step, sample.receipts_B)
                verified.record_all(sample)
                self.sampler.receive_drafts(step.batch.slots_B, verified.tokens)
            while len(verified.rows_R):
                # The sampler has counted its samples: a repeated step reuses them.
                verified.sampled = verified.sampled or self._sample(self.sampler, step, verified, logits_BV)
                sample = verified.sampled.to_host()
                self.check_receipts(step, sample.receipts_B)
                verified.record(sample)
        last_B = to_device(self.platform.memory, {"": verified.next_input_ids_B}, self.device)[""]
        self.last_tokens_S.index_copy_(0, step.tensors["slots"], self.tp.broadcast(last_B))
        return None if self.sampler is None else verified

    def _sample_all(self, sampler: Sampler, step: PreparedStep, logits_TV: Tensor) -> SamplerOutput:
        batch = step.batch
        lens, ends = batch.query_lens_B.tolist(), np.cumsum(batch.query_lens_B).tolist()
        slots_T = np.repeat(batch.slots_B, lens)
        places_T = ends_of_tokens(lens, lens) - 1
        arrays = to_device(self.platform.memory, {
            "slots": slots_T.astype(np.int64), "uniforms": sampler.host_inputs(slots_T, places_T),
            "receipts": np.full(len(slots_T), step.number, dtype=np.int32)}, self.device)
        drafts = [batch.token_ids_T[end - num + 1 : end].tolist() for num, end in zip(lens, ends, strict=True)]
        return sampler.sample_drafts(logits_TV, *(arrays[name] for name in SAMPLER_ARRAYS), batch.slots_B, drafts)

    def _sample(self, sampler: Sampler, step: PreparedStep, verified: VerifiedStep, logits_TV: Tensor) -> SamplerOutput:
        """Sample the next token of each remaining row, by the same call as in a step of one token."""
        slots_R = step.batch.slots_B[verified.rows_R]
        arrays = to_device(self.platform.memory, {
            "slots": slots_R.astype(np.int64), "uniforms": sampler.host_inputs(slots_R),
            "receipts": np.full(len(slots_R), step.number, dtype=np.int32),
            "places": verified.places_R.astype(np.int64),
        }, self.device)
        logits_RV = logits_TV.index_select(0, arrays["places"])
        return sampler(logits_RV, *(arrays[name] for name in SAMPLER_ARRAYS), slots_R)

    def _output(self, under_way: StepUnderWay) -> ModelRunnerOutput | None:
        verified = under_way.sampled
        if isinstance(verified, VerifiedStep):
            output: ModelRunnerOutput | None = ModelRunnerOutput(
                verified.tokens, verified.logprobs[0], verified.logprobs[1:], verified.problems)
        else:
            output = super()._output(under_way)
        batch = under_way.step.batch
        # The next step is about as large; what would not be drafted then is not looked for. One that runs by now has
        # no drafts.
        most = self.speculative.num_speculative_tokens if self._newest is under_way else 0
        if not batch.is_prefill:
            most = min(most, self.speculative.most_drafts(batch.batch_size))
        if output is not None and self.sampler is not None and most:
            output.spec_token_ids = self.sampler.forced_tokens(batch.slots_B, most)
            output.num_forced = [len(tokens) for tokens in output.spec_token_ids]
        return output
