"""Steps of a model with an MTP head (multi-token prediction), which drafts after each step's sampling.

The head reads pairs: the final hidden state of a token, and the next token (models/decoder.py). A pair's keys and
values lie at the position of its first token, so a sequence has them up to the last token but one. Every step adds the
pairs of its tokens, also in prompts and where nothing is drafted:

- A prefill has the pairs that end in its rows' tokens. The first of them begins in the step before, or in a cached
  prefix, whose last hidden state lies beside the row's states (states.py). A row whose prompt ends has one more, with
  the token that was just sampled. So a pair is computed where its second token is embedded, images included.
- Where the settings allow no drafts for any size of step, there are no pairs.
- A decode step has the pairs that begin in its rows' tokens. Pairs behind a rejected draft are of no use; the next step
  overwrites them.

The last pair of each row that samples gives the first draft. From it and the head's output for the pair, the head
computes the next draft. These pairs are for drafting only, and the next step overwrites them. They lie in blocks that
the sequence has in this step: where these end, a row has fewer drafts.

The head's output for a pair overwrites the hidden state that it read, in the slot beside the states. Drafts lie behind
the last tokens of sequences, where rows look theirs up. So a pass of the head has the inputs of a decode step, and
reads only memory at fixed addresses: passes over tokens run in graphs where decode steps do. Prompts run without.

Knows one step at a time. T pairs of the step, B rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npu_runner.core.batch import NO_NEW_BLOCKS, ScheduledBatch
from npu_runner.models.contract import DraftingModel
from npu_runner.platforms.attention import ends_of_tokens
from npu_runner.platforms.step_inputs import AttentionMetadata, StepInputs
from npu_runner.platforms.transfers import Download
from npu_runner.request.speculative import SpeculativeConfig
from npu_runner.runner.base import ModelRunnerOutput
from npu_runner.runner.buckets import Bucket
from npu_runner.runner.decode_forward import DecodeStep
from npu_runner.runner.pooling_step import PoolingStepRunner
from npu_runner.runner.speculative_step import SpeculativeStepRunner
from npu_runner.runner.step import PreparedStep, StepRunner, StepUnderWay
from npu_runner.runner.step_arrays import slot_mapping, to_device
from npu_runner.sampling.sampling_ops import most_probable


@dataclass(frozen=True)
class _Prompts:
    """The head's inputs in a prefill: the step's tokens as embedded, their hidden states, then those of the tokens
    before its rows."""

    x_TD: Tensor
    hidden_TD: Tensor


@dataclass(frozen=True)
class _Ends:
    """The last pair of each row whose drafts are wanted. `lens_B`: its place, and one; `positions_B`: what turns its
    queries and keys; `bounds_B`: the first place that its sequence has no block for; `state_slots_B`: where lies what
    the head made of it."""

    rows_B: np.ndarray
    slots_B: np.ndarray
    state_slots_B: np.ndarray
    lens_B: np.ndarray
    positions_B: np.ndarray
    bounds_B: np.ndarray

    def select(self, places: np.ndarray) -> _Ends:
        """Select these rows, by their indices here."""
        return _Ends(*(getattr(self, each.name)[places] for each in fields(self)))


@dataclass(frozen=True)
class _Proposed:
    """`counts_B` drafts of each of `rows_B`; `flat` has the first of all rows, then the second, and so on, also those
    that do not count."""

    rows_B: np.ndarray
    counts_B: np.ndarray
    flat: Download

    def by_row(self, num_rows: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(num_rows)]
        tokens_BK = self.flat.wait().reshape(-1, len(self.rows_B)).T.tolist()
        for row, count, tokens in zip(self.rows_B.tolist(), self.counts_B.tolist(), tokens_BK, strict=True):
            found[row] = tokens[:count]
        return found


class HeadStep(DecodeStep):
    """A pass of the head: slots of hidden states, and of the tokens behind, to what the head makes of them."""

    model: DraftingModel

    @property
    def hidden_SD(self) -> Tensor:
        """The hidden states by state slot."""
        assert self.states is not None, "a head drafts for models with states"
        assert self.states.hidden_SD is not None, "the pool has hidden states where a head is loaded"
        return self.states.hidden_SD

    def forward(self, inputs: StepInputs, plan: Any = None, state_plan: Any = None) -> Tensor:
        """The head's output for each pair (B, D). It also overwrites the hidden state that it reads."""
        metadata = AttentionMetadata.from_inputs(inputs, plan, is_prefill=False)
        next_BD = self.model.embed(inputs.tokens.index_select(0, inputs.token_slots))
        hidden_BD = self.hidden_SD.index_select(0, inputs.state_slots)
        made_BD = self.model.draft(next_BD, hidden_BD, inputs.positions, metadata)
        self.write(inputs.state_slots.long(), made_BD)
        return made_BD

    def write(self, slots: Tensor, hidden_BD: Tensor) -> None:
        """`slots`: int64."""
        assert self.gated_delta is not None, "a head drafts for models with states"
        self.gated_delta.write(self.hidden_SD, slots, hidden_BD)


class MTPStepRunner(SpeculativeStepRunner):
    """A SpeculativeStepRunner of a DraftingModel with states."""

    model: DraftingModel
    reads_all_of_prompts = True

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.head_step: HeadStep = HeadStep(self.model, self.states, self.gated_delta)
        self._never_drafts = not self.speculative.most_drafts_of_step(self.max_num_seqs)
        self._prompts: _Prompts | None = None
        self._proposed: _Proposed | None = None
        self._may_replay: set[int] = set()
        self._first_draft = len(self.last_tokens_S)
        most_drafts = self.speculative.num_speculative_tokens * self.max_num_seqs
        self.last_tokens_S = torch.zeros(self._first_draft + most_drafts, dtype=torch.int32, device=self.device)

    def size_tables(self, max_model_len: int) -> None:
        super().size_tables(max_model_len)
        self._most_places = max_model_len

    def admit(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        self._prompts = self._proposed = None
        return super().admit(batch)

    def record_prompts(self, step: PreparedStep, x_TD: Tensor, hidden_TD: Tensor) -> None:
        """Also leaves the last hidden state of each row beside its states, and of each snapshot."""
        if self._never_drafts:
            return
        batch, head = step.batch, self.head_step
        ends_B = np.cumsum(batch.query_lens_B)
        firsts_B = ends_B - batch.query_lens_B
        kept = [*zip((ends_B - 1).tolist(), _state_slots(batch).tolist(), strict=True),
                *((int(firsts_B[row]) + offset - 1, slot) for row, offset, slot in batch.state_saves)]
        tokens, targets = (np.array(each, dtype=np.int64) for each in zip(*kept, strict=True))
        sent = to_device(self.platform.memory, {"tokens": tokens, "targets": targets}, self.device)
        before_BD = head.hidden_SD.index_select(0, sent["targets"][: batch.batch_size])
        self._prompts = _Prompts(x_TD, torch.cat([hidden_TD, before_BD]))
        head.write(sent["targets"], hidden_TD.index_select(0, sent["tokens"]))

    def make_result(self, step: PreparedStep, logits_BV: Tensor, of_rows: dict[str, np.ndarray]) -> Any:
        result = super().make_result(step, logits_BV, of_rows)
        if self._never_drafts:
            return result
        prompts, self._prompts = self._prompts, None
        self._proposed = self._behind_tokens(step) if prompts is None else self._behind_prompts(step, prompts)
        return result

    def fill(self, bucket: Bucket, new_blocks_N3: np.ndarray, arrays: dict[str, np.ndarray],
             slots: np.ndarray) -> dict[str, np.ndarray]:
        """A pass of the head in this bucket may still read what it took from the host; then it is waited for."""
        if bucket.batch_size in self._may_replay and self._waits_for_replay:
            self.platform.memory.synchronize()
            self._may_replay.clear()
        return super().fill(bucket, new_blocks_N3, arrays, slots)

    # -- pairs of a step -------------------------------------------------------------------------------------------

    def _behind_prompts(self, step: PreparedStep, prompts: _Prompts) -> _Proposed | None:
        batch = step.batch
        pairs = _pairs_of_prompts(batch)
        if not len(pairs.batch.slots_B):
            return None
        rows_B = np.flatnonzero(batch.samples_B)
        state_slots_B = _state_slots(batch)[rows_B]
        metadata, sent = self._attend_to_prompts(pairs, state_slots_B)
        drawn_B = self.last_tokens_S.index_select(0, step.tensors["slots"][: len(rows_B)])
        x_TD = torch.cat([prompts.x_TD, self.model.embed(drawn_B)]) if len(rows_B) else prompts.x_TD
        hidden_TD = prompts.hidden_TD.index_select(0, sent["hidden"])
        made_TD = self.model.draft(x_TD.index_select(0, sent["next"]), hidden_TD, sent["positions"], metadata)
        if not len(rows_B):
            return None
        self.head_step.write(sent["state_slots"], made_TD.index_select(0, sent["lasts"]))
        # The positions behind an image at a prompt's end continue behind its last row and column.
        positions_B = np.atleast_2d(pairs.batch.positions)[:, pairs.lasts_B].max(axis=0)
        ends = _Ends(rows_B, batch.slots_B[rows_B], state_slots_B, batch.context_lens_B[rows_B], positions_B,
                     self._bounds(batch)[rows_B])
        return self._propose(ends, sent["state_slots"], self.speculative.num_speculative_tokens)

    def _attend_to_prompts(self, pairs: _PromptPairs,
                           state_slots_B: np.ndarray) -> tuple[AttentionMetadata, dict[str, Tensor]]:
        """For attention over the pairs; and what else the head reads of them, on the device."""
        batch = pairs.batch
        lens, ends = batch.query_lens_B.tolist(), batch.context_lens_B.tolist()
        sent = to_device(self.platform.memory, {
            "hidden": pairs.hidden_T, "next": pairs.next_T, "lasts": pairs.lasts_B,
            "state_slots": state_slots_B.astype(np.int64), "positions": np.ascontiguousarray(batch.positions),
            "table_slots": batch.slots_B, "context_lens": batch.context_lens_B,
            "slot_mapping": slot_mapping(batch, self.block_size, self.tables.on_host_SW)}, self.device)
        tables_BW = self.tables.on_host_SW[batch.slots_B, : -(-max(ends) // self.block_size)]
        plan = self.attention.plan_prefill(lens, ends, tables_BW, self.device)
        return AttentionMetadata(True, sent["slot_mapping"], sent["context_lens"],
                                 self.tables.rows_of(sent["table_slots"]), plan), sent

    def _behind_tokens(self, step: PreparedStep) -> _Proposed | None:
        batch, kept_B = step.batch, self._num_accepted(step.batch)
        lasts_B = np.cumsum(batch.query_lens_B) - batch.query_lens_B + kept_B
        wanted = np.arange(batch.batch_size) if batch.wants_drafts_B is None else np.flatnonzero(batch.wants_drafts_B)
        ends = _Ends(np.arange(batch.batch_size), batch.slots_B, _state_slots(batch)[lasts_B],
                     batch.context_lens_B - batch.query_lens_B + kept_B + 1, batch.positions[lasts_B],
                     self._bounds(batch)).select(wanted)
        inputs, state_slots = step.inputs, step.tensors["state_slots"][: batch.batch_size]
        if batch.has_drafts:
            sent = to_device(self.platform.memory, {
                "next": self._next_tokens(step, lasts_B), "state_slots": ends.state_slots_B}, self.device)
            inputs, state_slots = self._with_next_tokens(step, sent["next"]), sent["state_slots"]
        elif len(wanted) < batch.batch_size:
            state_slots = to_device(self.platform.memory, {"": ends.state_slots_B}, self.device)[""]
        self._pass(step.bucket, inputs, step.plan)
        return self._propose(ends, state_slots, self.speculative.most_drafts(batch.batch_size))

    def _next_tokens(self, step: PreparedStep, lasts_B: np.ndarray) -> np.ndarray:
        """(T,) int32: where the second token of each pair is looked up. A draft's lies where the step has read it, the
        one behind the last kept draft is its row's."""
        num_tokens = step.batch.num_tokens
        first = len(self.last_tokens_S) if step.bucket is None else self.max_num_seqs
        next_T = first + np.minimum(np.arange(1, num_tokens + 1), num_tokens - 1)
        next_T[lasts_B] = step.batch.slots_B
        return next_T.astype(np.int32)

    def _with_next_tokens(self, step: PreparedStep, next_T: Tensor) -> StepInputs:
        inputs = step.inputs
        if step.bucket is None:
            return inputs._replace(tokens=torch.cat([self.last_tokens_S, inputs.tokens]), token_slots=next_T)
        inputs.token_slots[: len(next_T)].copy_(next_T)
        return inputs

    def _num_accepted(self, batch: ScheduledBatch) -> np.ndarray:
        """(B,) int32: drafts of each row that were kept, on every rank."""
        verified = self._verified
        if verified is None:
            return np.zeros(batch.batch_size, dtype=np.int32)
        kept_B = np.array([max(0, len(tokens) - 1) for tokens in verified.tokens], dtype=np.int32)
        if self.tp.size == 1:
            return kept_B
        return self.tp.broadcast(torch.from_numpy(kept_B).to(self.device)).cpu().numpy()

    def _bounds(self, batch: ScheduledBatch) -> np.ndarray:
        return np.minimum(-(-batch.context_lens_B // self.block_size) * self.block_size, self._most_places)

    # -- passes of the head ----------------------------------------------------------------------------------------

    def _pass(self, bucket: Bucket | None, inputs: StepInputs, plan: Any) -> None:
        """One over `inputs`, those of `bucket` if there is one."""
        if bucket is None:
            self.head_step(inputs, plan)
            return
        assert bucket.behind is not None, "a bucket has a graph of the head, too"
        bucket.behind(inputs)
        self._may_replay.add(bucket.batch_size)

    def _propose(self, ends: _Ends, state_slots_B: Tensor, most: int) -> _Proposed | None:
        """Up to `most` drafts of each row, from what the head made of its last pair. `state_slots_B`: those of `ends`,
        on the device."""
        num_rows, first = len(ends.rows_B), self._first_draft
        if not most or not num_rows:
            return None
        for number in range(most):
            if number:
                self._pass_ahead(ends, number)
            made_BD = self.head_step.hidden_SD.index_select(0, state_slots_B)
            self.last_tokens_S[first + number * num_rows :][:num_rows].copy_(self._most_probable(made_BD))
        drafts = self.last_tokens_S[first : first + most * num_rows]
        counts_B = np.minimum(most, ends.bounds_B - ends.lens_B + 1)
        return _Proposed(ends.rows_B, counts_B, self.platform.memory.download(drafts))

    def _pass_ahead(self, ends: _Ends, number: int) -> None:
        """Run the head over one pair of each row, `number` positions behind its last one. The pair's second token is
        the last draft. Beyond the row's blocks the null block is used."""
        rows_B = np.arange(len(ends.rows_B))
        places_B = ends.lens_B - 1 + number
        has_block_B = places_B < ends.bounds_B
        places_B = np.where(has_block_B, places_B, 0)
        tables_BW = self.tables.on_host_SW[ends.slots_B]
        blocks_B = np.where(has_block_B, tables_BW[rows_B, places_B // self.block_size], 0)
        offsets_B = np.where(has_block_B, places_B, rows_B) % self.block_size
        arrays = {name: array.astype(np.int32) for name, array in {
            "positions": np.where(has_block_B, ends.positions_B + number, 0), "context_lens": places_B + 1,
            "slot_mapping": blocks_B * self.block_size + offsets_B, "state_slots": ends.state_slots_B,
            "token_slots": self._first_draft + (number - 1) * len(rows_B) + rows_B}.items()}
        bucket = self.buckets.find(len(rows_B)) if self.buckets else None
        if bucket is not None:
            self.fill(bucket, NO_NEW_BLOCKS, arrays, ends.slots_B)
            self._pass(bucket, bucket.inputs, None)
            return
        tensors = to_device(self.platform.memory, {
            **arrays, "runs": np.ones_like(rows_B, dtype=np.int32), "table_slots": ends.slots_B}, self.device)
        tensors |= {"tokens": self.last_tokens_S, "block_tables": self.tables.rows_of(tensors["table_slots"])}
        plan = self.attention.plan_decode((places_B + 1).tolist(), tables_BW, self.device)
        self._pass(None, StepInputs.from_tensors(tensors), plan)

    def _most_probable(self, made_BD: Tensor) -> Tensor:
        """(B,) int64, the same on every rank."""
        return most_probable(self.model.compute_logits(made_BD))[1].squeeze(-1)

    def _output(self, under_way: StepUnderWay) -> ModelRunnerOutput | None:
        output, proposed = super()._output(under_way), self._proposed
        if output is None or proposed is None or under_way is not self._newest:
            return output
        found = proposed.by_row(under_way.step.batch.batch_size)
        self._may_replay.clear()  # the drafts come behind all passes
        output.spec_token_ids = [_joined(forced, tokens)
                                 for forced, tokens in zip(output.spec_token_ids, found, strict=True)]
        return output


def _state_slots(batch: ScheduledBatch) -> np.ndarray:
    """(B,), or (T,) of a step with drafts: where hidden states lie."""
    return batch.slots_B if batch.state_slots is None else batch.state_slots


def _joined(forced: list[int], tokens: Sequence[int]) -> list[int]:
    """Behind forced tokens those of the head, if it has proposed the forced ones, too."""
    return [*forced, *tokens[len(forced) :]] if list(tokens[: len(forced)]) == forced else forced


@dataclass(frozen=True)
class _PromptPairs:
    """`batch`: rows of pairs, at their places. `hidden_T`, `next_T`: which of _Prompts' hidden states, and of the
    step's and the sampled tokens, each has. `lasts_B`: the last pair of each row that samples."""

    batch: ScheduledBatch
    hidden_T: np.ndarray
    next_T: np.ndarray
    lasts_B: np.ndarray


def _pairs_of_prompts(batch: ScheduledBatch) -> _PromptPairs:
    query_lens_B, ends_B, num_tokens = batch.query_lens_B, batch.context_lens_B, batch.num_tokens
    starts_B = ends_B - query_lens_B
    firsts_B = np.cumsum(query_lens_B) - query_lens_B
    ends_of_pairs_B = ends_B - 1 + batch.samples_B
    lens_B = ends_of_pairs_B - np.maximum(starts_B - 1, 0)
    rows_T = np.repeat(np.arange(batch.batch_size), lens_B)
    places_T = ends_of_tokens(lens_B.tolist(), ends_of_pairs_B.tolist()) - 1
    behind_T = places_T - starts_B[rows_T]
    hidden_T = np.where(behind_T < 0, num_tokens + rows_T, firsts_B[rows_T] + behind_T)
    drawn_B = num_tokens - 1 + np.cumsum(batch.samples_B)
    next_T = np.where(places_T + 1 < ends_B[rows_T], firsts_B[rows_T] + behind_T + 1, drawn_B[rows_T])
    previous = batch.previous_positions
    if previous is None:  # no row goes on from another step
        previous = np.zeros_like(batch.positions[..., : batch.batch_size])
    positions = np.concatenate([batch.positions, previous], axis=-1)[..., hidden_T]
    has_pairs_B = lens_B > 0
    pairs = replace(batch, slots_B=batch.slots_B[has_pairs_B], query_lens_B=lens_B[has_pairs_B],
                    context_lens_B=ends_of_pairs_B[has_pairs_B].astype(np.int32), positions=positions)
    return _PromptPairs(pairs, hidden_T.astype(np.int64), next_T.astype(np.int64),
                        (np.cumsum(lens_B) - 1)[batch.samples_B].astype(np.int64))


def step_runner_for(pooling: object | None, speculative: SpeculativeConfig | None) -> type[StepRunner]:
    """The class that runs the steps of a model which pools its prompts, or which decodes with or without drafts."""
    if pooling is not None:
        return PoolingStepRunner
    if speculative is None:
        return StepRunner
    return MTPStepRunner if speculative.has_head else SpeculativeStepRunner
