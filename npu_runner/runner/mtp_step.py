"""Steps of a model whose own head proposes what comes next (multi-token prediction), behind each step's draw.

The head reads pairs: the final hidden state of a token, and the token behind it (models/mtp.py). A pair's keys and
values lie at the place of its first token, so a sequence has them up to the last token but one. Every step adds those
of its tokens, also in prompts and where nothing is drafted:

- A prefill has the pairs that end in its rows' tokens. The first of them begins in the step before, or in a cached
  prefix, whose last hidden state lies beside the row's states (states.py). A row whose prompt ends has one more, with
  the token that was just drawn. So a pair is computed where its second token is embedded, pictures included.
- A decode step has the pairs that begin in its rows' tokens. Behind a draft that was not kept a pair is of no use; the
  next step writes over it.

Of each row that draws, the last pair gives the first draft. With it, and what the head made of the pair, the head goes
on to the next one. These pairs are for drafting alone, and the next step writes over them. They lie in blocks that the
sequence has in this step: where these end, a row has fewer drafts.

Knows one step at a time, and runs without graphs. T pairs of the step, B rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from npu_runner.core.batch import ScheduledBatch
from npu_runner.models.contract import DraftingModel
from npu_runner.platforms.attention import ends_of_tokens
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.platforms.transfers import Download
from npu_runner.runner.base import ModelRunnerOutput
from npu_runner.runner.speculative_step import SpeculativeStepRunner
from npu_runner.runner.step import PreparedStep, StepUnderWay
from npu_runner.runner.step_arrays import slot_mapping, to_device
from npu_runner.sampling.sampling_ops import most_probable


@dataclass(frozen=True)
class _Prompts:
    """What the head reads of a prefill: the step's tokens as embedded, their hidden states, then those of the tokens
    before its rows."""

    x_TD: Tensor
    hidden_TD: Tensor


@dataclass(frozen=True)
class _Ends:
    """The last pair of each row that draws. `lens_B`: its place, and one; `positions_B`: what turns its queries and
    keys; `bounds_B`: the first place that its sequence has no block for."""

    rows_B: np.ndarray
    slots_B: np.ndarray
    lens_B: np.ndarray
    positions_B: np.ndarray
    bounds_B: np.ndarray


@dataclass(frozen=True)
class _Proposed:
    """`counts_B` drafts of each of `rows_B`; `flat` has as many of each row, those that count first."""

    rows_B: np.ndarray
    counts_B: np.ndarray
    flat: Download

    def of_rows(self, num_rows: int) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(num_rows)]
        tokens_BK = self.flat.wait().reshape(len(self.rows_B), -1).tolist()
        for row, count, tokens in zip(self.rows_B.tolist(), self.counts_B.tolist(), tokens_BK, strict=True):
            found[row] = tokens[:count]
        return found


class MTPStepRunner(SpeculativeStepRunner):
    """A SpeculativeStepRunner of a DraftingModel with states."""

    model: DraftingModel

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self._prompts: _Prompts | None = None
        self._proposed: _Proposed | None = None

    def size_tables(self, max_model_len: int) -> None:
        super().size_tables(max_model_len)
        self._most_places = max_model_len

    def admit(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        self._prompts = self._proposed = None
        return super().admit(batch)

    def keep_prompts(self, step: PreparedStep, x_TD: Tensor, hidden_TD: Tensor) -> None:
        """Also leaves the last hidden state of each row beside its states, and of each snapshot."""
        batch, hidden_SD = step.batch, self._hidden_SD
        assert self.gated_delta is not None, "a head drafts for models with states"
        ends_B = np.cumsum(batch.query_lens_B)
        firsts_B = ends_B - batch.query_lens_B
        slots_B = batch.slots_B if batch.state_slots is None else batch.state_slots
        kept = [*zip((ends_B - 1).tolist(), slots_B.tolist(), strict=True),
                *((int(firsts_B[row]) + offset - 1, slot) for row, offset, slot in batch.state_saves)]
        tokens, targets = (np.array(each, dtype=np.int64) for each in zip(*kept, strict=True))
        sent = to_device(self.platform.memory, {"tokens": tokens, "targets": targets}, self.device)
        before_BD = hidden_SD.index_select(0, sent["targets"][: batch.batch_size])
        self._prompts = _Prompts(x_TD, torch.cat([hidden_TD, before_BD]))
        self.gated_delta.write(hidden_SD, sent["targets"], hidden_TD.index_select(0, sent["tokens"]))

    def make_result(self, step: PreparedStep, logits_BV: Tensor, of_rows: dict[str, np.ndarray]) -> Any:
        result = super().make_result(step, logits_BV, of_rows)
        prompts, self._prompts = self._prompts, None
        self._proposed = self._behind_tokens(step) if prompts is None else self._behind_prompts(step, prompts)
        return result

    # -- pairs of a step -------------------------------------------------------------------------------------------

    def _behind_prompts(self, step: PreparedStep, prompts: _Prompts) -> _Proposed | None:
        batch = step.batch
        pairs = _pairs_of_prompts(batch)
        if not len(pairs.batch.slots_B):
            return None
        arrays = {"hidden": pairs.hidden_T, "next": pairs.next_T, "lasts": pairs.lasts_B}
        metadata, sent = self._attend(pairs.batch, pairs.batch.slots_B, arrays, is_prefill=True)
        drawn_B = self.last_tokens_S.index_select(0, step.tensors["slots"][: int(batch.samples_B.sum())])
        x_TD = torch.cat([prompts.x_TD, self.model.embed(drawn_B)]) if len(drawn_B) else prompts.x_TD
        hidden_TD = prompts.hidden_TD.index_select(0, sent["hidden"])
        made_TD = self.model.draft(x_TD.index_select(0, sent["next"]), hidden_TD, sent["positions"], metadata)
        rows_B = np.flatnonzero(batch.samples_B)
        # Behind a picture that ends a prompt goes on what is behind its last row and column.
        positions_B = np.atleast_2d(pairs.batch.positions)[:, pairs.lasts_B].max(axis=0)
        ends = _Ends(rows_B, batch.slots_B[rows_B], batch.context_lens_B[rows_B], positions_B,
                     self._bounds(batch)[rows_B])
        return self._go_on(made_TD.index_select(0, sent["lasts"]), ends, self.speculative.num_speculative_tokens)

    def _behind_tokens(self, step: PreparedStep) -> _Proposed | None:
        batch, kept_B = step.batch, self._kept(step.batch)
        lasts_B = np.cumsum(batch.query_lens_B) - batch.query_lens_B + kept_B
        tokens_T = np.roll(batch.token_ids_T, -1) if batch.has_drafts else np.zeros(batch.batch_size, dtype=np.int32)
        metadata, sent = self._attend(batch, np.repeat(batch.slots_B, batch.query_lens_B),
                                      {"tokens": tokens_T, "lasts": lasts_B.astype(np.int64)}, is_prefill=False)
        drawn_B = self.last_tokens_S.index_select(0, step.tensors["slots"][: batch.batch_size])
        next_T = sent["tokens"].index_copy(0, sent["lasts"], drawn_B)
        hidden_TD = self._hidden_SD.index_select(0, step.tensors["state_slots"][: len(tokens_T)])
        made_TD = self.model.draft(self.model.embed(next_T), hidden_TD, sent["positions"], metadata)
        ends = _Ends(np.arange(batch.batch_size), batch.slots_B, batch.context_lens_B - batch.query_lens_B + kept_B + 1,
                     batch.positions[lasts_B], self._bounds(batch))
        return self._go_on(made_TD.index_select(0, sent["lasts"]), ends,
                           self.speculative.most_drafts(batch.batch_size))

    @property
    def _hidden_SD(self) -> Tensor:
        """By state slot."""
        assert self.states is not None, "a head drafts for models with states"
        assert self.states.hidden_SD is not None, "the pool has hidden states where a head is loaded"
        return self.states.hidden_SD

    def _kept(self, batch: ScheduledBatch) -> np.ndarray:
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

    def _attend(self, batch: ScheduledBatch, slots: np.ndarray, arrays: dict[str, np.ndarray], *,
                is_prefill: bool) -> tuple[AttentionMetadata, dict[str, Tensor]]:
        """For attention over the pairs of `batch`, which read the tables of `slots`; and `arrays` on the device, with
        `positions`."""
        lens, ends = batch.query_lens_B.tolist(), batch.context_lens_B.tolist()
        sent = to_device(self.platform.memory, {
            **arrays, "positions": np.ascontiguousarray(batch.positions), "table_slots": slots,
            "slot_mapping": slot_mapping(batch, self.block_size, self.tables.on_host_SW),
            "context_lens": batch.context_lens_B if is_prefill else ends_of_tokens(lens, ends)}, self.device)
        tables_BW = self.tables.on_host_SW[batch.slots_B, : -(-max(ends) // self.block_size)]
        plan_of = self.attention.plan_prefill if is_prefill else self.attention.plan_drafts
        return AttentionMetadata(is_prefill, sent["slot_mapping"], sent["context_lens"],
                                 self.tables.rows_of(sent["table_slots"]),
                                 plan_of(lens, ends, tables_BW, self.device)), sent

    def _go_on(self, made_BD: Tensor, ends: _Ends, most: int) -> _Proposed | None:
        """Up to `most` drafts of each row, from what the head made of its last pair."""
        if not most or not len(ends.rows_B):
            return None
        drafts = [self._most_probable(made_BD)]
        counts_B = np.minimum(most, ends.bounds_B - ends.lens_B + 1)
        for number in range(1, most):
            metadata, positions_B = self._attend_ahead(ends, number)
            made_BD = self.model.draft(self.model.embed(drafts[-1]), made_BD, positions_B, metadata)
            drafts.append(self._most_probable(made_BD))
        return _Proposed(ends.rows_B, counts_B, self.platform.memory.download(torch.stack(drafts, dim=1).view(-1)))

    def _attend_ahead(self, ends: _Ends, number: int) -> tuple[AttentionMetadata, Tensor]:
        """For one pair of each row, so many places behind its last one. Where its blocks end the null block serves."""
        places_B = ends.lens_B - 1 + number
        has_block_B = places_B < ends.bounds_B
        places_B = np.where(has_block_B, places_B, 0)
        rows_B = np.arange(len(places_B))
        tables_BW = self.tables.on_host_SW[ends.slots_B]
        blocks_B = np.where(has_block_B, tables_BW[rows_B, places_B // self.block_size], 0)
        offsets_B = np.where(has_block_B, places_B, rows_B) % self.block_size
        arrays = {"positions": np.where(has_block_B, ends.positions_B + number, 0), "table_slots": ends.slots_B,
                  "slot_mapping": blocks_B * self.block_size + offsets_B, "context_lens": places_B + 1}
        sent = to_device(self.platform.memory, {name: array.astype(np.int32) for name, array in arrays.items()},
                         self.device)
        plan = self.attention.plan_decode((places_B + 1).tolist(), tables_BW, self.device)
        return AttentionMetadata(False, sent["slot_mapping"], sent["context_lens"],
                                 self.tables.rows_of(sent["table_slots"]), plan), sent["positions"]

    def _most_probable(self, made_BD: Tensor) -> Tensor:
        """(B,) int32, the same on every rank."""
        return most_probable(self.model.compute_logits(made_BD))[1].squeeze(-1).to(torch.int32)

    def _output(self, under_way: StepUnderWay) -> ModelRunnerOutput | None:
        output, proposed = super()._output(under_way), self._proposed
        if output is None or proposed is None or under_way is not self._newest:
            return output
        found = proposed.of_rows(under_way.step.batch.batch_size)
        output.spec_token_ids = [_joined(forced, tokens)
                                 for forced, tokens in zip(output.spec_token_ids, found, strict=True)]
        return output


def _joined(forced: list[int], tokens: Sequence[int]) -> list[int]:
    """Behind forced tokens those of the head, if it has proposed the forced ones, too."""
    return [*forced, *tokens[len(forced) :]] if list(tokens[: len(forced)]) == forced else forced


@dataclass(frozen=True)
class _PromptPairs:
    """`batch`: rows of pairs, at their places. `hidden_T`, `next_T`: which of _Prompts' hidden states, and of the
    step's tokens and those drawn behind them, each has. `lasts_B`: the last pair of each row that draws."""

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
