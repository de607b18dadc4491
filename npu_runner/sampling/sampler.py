"""Chooses the next token of every row of a step, in batched passes on the device.

A sequence registers once with its slot. After that neither its parameters nor its tokens are copied again, but for
biases and bans, which are sent when the rows of a step change. Only rows with bad words of several tokens get their
last token before the next one is chosen. Work that only some rows need is done for those rows alone. Knows nothing of
when a sequence ends or what its text is.

Where all rows of a decode graph sample from the whole of the model's own distribution or take its most probable token,
which is most steps of most jobs, one recorded launch does it (`RecordedSampling`).

Shapes: B rows of the step, A of them whose logits are adjusted, L of them that want log probabilities, G rows of one
group, V vocabulary, K most top logprobs any row wants, C rows with a mask, W 32-bit words of a mask, P rows of a
graph, padded ones included, S slots; a 1 is a kept dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.ops import AddAt, MaskedSampler, Ops, TokenLookUp
from npu_runner.platforms.transfers import Download
from npu_runner.request.limits import LIMITS
from npu_runner.request.prompt_inputs import Thinking
from npu_runner.request.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from npu_runner.sampling import sampling_ops as ops
from npu_runner.sampling.logit_rules import Watch
from npu_runner.sampling.recorded_sampling import RecordedSampling, Recorder
from npu_runner.sampling.sampling_plan import SamplingGroup, StepPlan
from npu_runner.sampling.sampling_state import Field, SamplingState
from npu_runner.sampling.token_constraints import ConstrainedRows, TokenConstraint

NO_TOKEN, ALL_BANNED = -1, -2
"""In the place of a token: the logits are no numbers; no token is left that may come."""


@dataclass(frozen=True)
class LogprobsTensors:
    """Log probabilities or logits, as `logprobs_mode` says, on the device.

    sampled_L float32; ranks_L int32, 1 for the most probable token; top_ids (L, K) int64 and top_logprobs (L, K)
    float32, most probable first.
    """

    sampled_L: Tensor
    ranks_L: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def records(self) -> Tensor:
        """int32 (L, 2 + 2 * K): side by side, the floats as their bits."""
        return torch.cat([self.sampled_L[:, None].view(torch.int32), self.ranks_L[:, None],
                          self.top_ids.to(torch.int32), self.top_logprobs.view(torch.int32)], dim=1)


@dataclass(frozen=True)
class SamplerOutput:
    """token_ids_B: int32 on the device; less than 0 where a row has no token: NO_TOKEN, its logits hold NaN or +inf,
    or ALL_BANNED. What is on the device may be written anew by the next step, in the device's order."""

    token_ids_B: Tensor
    next_input_ids_B: Tensor
    """int32 on the device, the same with a valid token for rows that have none: the next step may run before the host
    notices."""
    logprobs: LogprobsTensors | None
    """None when no row asked, or one for the whole vocabulary."""
    logprob_rows: np.ndarray
    """The rows that did, on the host."""
    flat: Download
    """int32, one dimension: the tokens, the step's receipts and the records of log probabilities."""
    problems: dict[int, str] = field(default_factory=dict)
    """Why rows have no token, where the host knew it before."""
    num_flat_rows: int | None = None
    """Rows of `flat`, those of a graph's padding included; None: the step's."""
    slices: Sequence[Download] = ()
    """The records, some rows each, where a row asked for the whole vocabulary. `flat` comes after them."""

    def is_done(self) -> bool:
        """Whether everything is in host memory."""
        return self.flat.is_done()

    def to_host(self) -> HostSample:
        """Everything in host memory, by one copy; waits for the step, and for none after it."""
        return self._on_host

    @functools.cached_property
    def _on_host(self) -> HostSample:
        num_rows, num_records = len(self.token_ids_B), len(self.logprob_rows)
        second = self.num_flat_rows or num_rows
        flat = self.flat.wait()
        records_LC = flat[2 * second:].reshape(num_records, -1) if num_records and not self.slices else None
        if self.slices:
            records_LC = np.concatenate([part.wait() for part in self.slices])
        return HostSample(flat[:num_rows], flat[second: second + num_rows], self.logprob_rows, records_LC,
                          self.problems)


@dataclass(frozen=True)
class HostSample:
    """A SamplerOutput in host memory, int32. Records: the sampled token's log probability as bits, its rank, the K most
    probable ids, their log probabilities as bits; None when no row asked."""

    token_ids_B: np.ndarray
    receipts_B: np.ndarray
    logprob_rows: np.ndarray
    records_LC: np.ndarray | None
    problems: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Per-slot sampling state on one device. A slot is a row 0..max_num_seqs-1 that a running sequence holds.

    Order: penalties (repetition, then frequency and presence), logit_bias and bans (min_tokens, bad_words, repeated
    n-grams), masks of grammars and of spent thinking. Then the argmax for temperature 0; otherwise temperature, top_k,
    top_p, min_p and one sample by inverse CDF. Of equal probabilities the lower token id comes first in the kept sets.
    The argmax keeps that order if the device's own does (CPU and CUDA; Ascend documents none). The token depends only
    on the row's logits, parameters, seed and history, not on its slot or other rows. So rows that sample from the whole
    vocabulary use the platform's kernel, if it has one, in every step.
    """

    def __init__(self, *, vocab_size: int, max_num_seqs: int, eos_token_ids: Sequence[int], device: torch.device,
                 max_model_len: int = LIMITS.max_ngram_window,
                 sort_ascending: Callable[[Tensor], Tensor] = lambda x: x.sort(dim=-1).values,
                 softmax_sampler: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
                 samples_greedily: bool = False,
                 add_at: AddAt = Ops.add_at,
                 allow_tokens: Callable[[Tensor, Tensor | None, Tensor], Tensor] | None = None,
                 masked_sampler: MaskedSampler | None = None,
                 download: Callable[[Tensor], Download] = lambda x: Download(x.cpu()),
                 host_buffer: Callable[[int], Tensor] = lambda size: torch.empty(size, dtype=torch.int32),
                 constrained: ConstrainedRows | None = None, logprobs_mode: str = "raw_logprobs"):
        """sort_ascending, softmax_sampler, samples_greedily, add_at, allow_tokens, masked_sampler: the platform's, see
        Ops; download, host_buffer: likewise, see Platform. constrained: what follows grammars and ends thinking.
        logprobs_mode: RunnerConfig's."""
        self._processes_logprobs = logprobs_mode.startswith("processed")
        self.returns_logits = logprobs_mode.endswith("logits")
        self._max_num_seqs = max_num_seqs
        self._state = SamplingState(vocab_size=vocab_size, max_num_seqs=max_num_seqs, max_model_len=max_model_len,
                                    eos_token_ids=eos_token_ids, device=device, add_at=add_at)
        self._sort_ascending = sort_ascending
        self._softmax_sampler = softmax_sampler
        self._samples_greedily = samples_greedily
        self._allow_tokens = allow_tokens or TokenLookUp()
        self._masked_sampler = masked_sampler
        self._is_compiled = False
        self._recorded: dict[int, RecordedSampling] = {}
        # The same rows as in the step before have the same temperatures and masks: their plan is the same object.
        self._temperatures: tuple[StepPlan, Tensor] | None = None
        self._mask_places: tuple[StepPlan, Tensor] | None = None
        self._download = download
        self._constrained = constrained or ConstrainedRows(None, None, eos_token_ids)
        self._num_mask_words = -(-vocab_size // 32)
        self._host_buffer = host_buffer
        self._unnotified: list[tuple[SamplerOutput, list[tuple[int, Watch | TokenConstraint]]]] = []

    def add(self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int],
            output_token_ids: Sequence[int] = (), *, seed: int, thinking: Thinking | None = None) -> None:
        """Register a sequence, new or back from preemption with its output so far. Its grammar should be built by now.

        Raises RequestError when the parameters cannot be served; the slot is then free.
        """
        self._constrained.remove(slot)
        self._state.add(slot, params, prompt_token_ids, output_token_ids, seed)
        self._constrained.add(slot, params, thinking, output_token_ids)

    def remove(self, slot: int) -> None:
        """Free the slot, whether or not anything is registered there."""
        self._state.remove(slot)
        self._constrained.remove(slot)

    def host_inputs(self, slots: np.ndarray, places: np.ndarray | int = 0) -> np.ndarray:
        """float32 (B,): the uniform in [0, 1) for each row's next token, or for the token `places` later. The call
        changes no state."""
        return self._state.uniforms(slots, places)

    def forced_tokens(self, host_slots: np.ndarray, most: int) -> list[list[int]]:
        """The tokens that each row's grammar forces next, at most `most`. Call it when no step is in flight."""
        self._notify_listeners()
        return self._constrained.forced_tokens(host_slots, most)

    @torch.inference_mode()
    def record(self, logits_PV: Tensor, arrays: Mapping[str, Tensor], recorder: Recorder) -> None:
        """Record the plain sampling of a decode graph (RecordedSampling), if the platform's kernel samples all plain
        rows."""
        if self._softmax_sampler is not None and self._samples_greedily:
            self._recorded[len(logits_PV)] = RecordedSampling(
                self._softmax_sampler, logits_PV, arrays, self._state.temperatures_S, recorder)

    @torch.inference_mode()
    def __call__(self, logits_BV: Tensor, slots_B: Tensor, uniforms_B: Tensor, receipts_B: Tensor,
                 host_slots: np.ndarray, graph_size: int | None = None) -> SamplerOutput:
        """One token per row. logits_BV (any float type) is left as it is; host_slots says slots_B on the host.

        receipts_B: int32 on the device, sent with the step's inputs and returned with the tokens. They show that the
        device ran this step, and that the tokens are not those of an earlier one. graph_size: rows of the decode graph
        that computed the logits and holds the other tensors, None for an eager step.
        """
        self._notify_listeners()
        constrained = self._constrained.rows(host_slots)
        masked = [(row, constraint) for row, constraint in constrained if constraint.restricts]
        plan = self._state.plan(host_slots, [row for row, _ in masked])
        recorded = None if graph_size is None else self._recorded.get(graph_size)
        if recorded is not None and plan.is_plain:
            output, tokens_B = _launch(recorded, logits_BV, plan, self._download)
        else:
            words_CW = self._masks_of([each for _, each in masked], logits_BV.device) if masked else None
            output, tokens_B = self._sample(logits_BV, slots_B, uniforms_B, receipts_B, plan, words_CW,
                                            _problems(masked))
        # Last: a call that fails for want of memory changes nothing, and can be made again.
        self._state.prepare_advance(plan, slots_B, tokens_B, host_slots)()
        listeners: list[tuple[int, Watch | TokenConstraint]] = [*self._state.watches(host_slots), *constrained]
        if listeners:
            self._unnotified.append((output, listeners))
        return output

    def samples_at_once(self, host_slots: np.ndarray) -> bool:
        """Whether `sample_drafts` supports these rows: no sampled token affects later ones, except through the mask."""
        may_think = any(constraint.may_think for _, constraint in self._constrained.rows(host_slots))
        return not may_think and self._state.samples_independently(host_slots)

    @torch.inference_mode()
    def sample_drafts(self, logits_TV: Tensor, slots_T: Tensor, uniforms_T: Tensor, receipts_T: Tensor,
                      host_slots: np.ndarray, drafts: Sequence[list[int]]) -> SamplerOutput:
        """Sample the next token of each row and the token after each of its `drafts`: T tokens, row after row.

        The tokens equal those of one call per position. No state changes before `receive_drafts`. The token after a
        draft that its grammar forbids is ALL_BANNED.
        """
        self._notify_listeners()
        rows_T = np.repeat(np.arange(len(drafts)), [1 + len(tokens) for tokens in drafts])
        masked = [(row, constraint) for row, constraint in self._constrained.rows(host_slots) if constraint.restricts]
        masked_T = np.flatnonzero(np.isin(rows_T, [row for row, _ in masked]))
        plan = self._state.plan(host_slots[rows_T], masked_T.tolist())
        words_CW = self._masks_of([each for _, each in masked], logits_TV.device,
                                  [drafts[row] for row, _ in masked]) if masked else None
        problems = {int(np.argmax(rows_T == row)): why for row, why in _problems(masked).items()}
        return self._sample(logits_TV, slots_T, uniforms_T, receipts_T, plan, words_CW, problems)[0]

    def receive_drafts(self, host_slots: np.ndarray, tokens: Sequence[list[int]]) -> None:
        """Record the tokens that each row of `sample_drafts` receives."""
        self._state.advance(host_slots, np.array([len(each) for each in tokens]))
        for row, constraint in self._constrained.rows(host_slots):
            for token in tokens[row]:
                constraint.observe(token)

    def _sample(self, logits_BV: Tensor, slots_B: Tensor, uniforms_B: Tensor, receipts_B: Tensor, plan: StepPlan,
                words_CW: Tensor | None, problems: dict[int, str]) -> tuple[SamplerOutput, Tensor]:
        """Operator by operator, for any parameters. Also returns the tokens, with any value for rows that have none."""
        if plan.counted is not None or plan.repeating is not None:
            slots_B = slots_B.long()
        self._compile_sampling(logits_BV, uniforms_B)
        tokens_B1, token_ids_B1, next_B1 = self._choose(logits_BV, slots_B, uniforms_B, plan, words_CW)
        logprobs, slices = None, list[Download]()
        if plan.logprobs is not None:
            tokens_L1 = plan.logprobs.select(tokens_B1)
            values_LV = (self._processed(logits_BV, slots_B, plan, words_CW, tokens_L1) if self._processes_logprobs
                         else plan.logprobs.select(logits_BV).float())
            if plan.num_logprobs <= MAX_TOP_LOGPROBS:
                logprobs = _logprobs(values_LV, tokens_L1, plan.num_logprobs, as_logits=self.returns_logits)
            else:
                slices = self._send_whole(values_LV, tokens_L1)
        token_ids_B = token_ids_B1.squeeze(-1)
        records = [logprobs.records().view(-1)] if logprobs is not None else []
        output = SamplerOutput(token_ids_B, next_B1.squeeze(-1), logprobs, plan.logprob_rows,
                               self._download(torch.cat([token_ids_B, receipts_B, *records])), problems, slices=slices)
        return output, tokens_B1.squeeze(-1)

    def _send_whole(self, values_LV: Tensor, tokens_L1: Tensor) -> list[Download]:
        """The records of the whole vocabulary, on their way to the host. Only some rows are on the device at a time, in
        less memory than the profiled step takes to sort all of its rows."""
        num_rows = whole_rows(self._max_num_seqs)
        parts = zip(values_LV.split(num_rows), tokens_L1.split(num_rows), strict=True)
        return [self._download(_logprobs(values_RV, tokens_R1, values_RV.shape[1], as_logits=self.returns_logits)
                               .records()) for values_RV, tokens_R1 in parts]

    def _notify_listeners(self) -> None:
        """Pass the chosen tokens, as far as they have arrived, to rows with bad words and to constrained rows.

        Waits for the step before only if a row needs its token, not for a thinking budget that cannot be spent yet. The
        forward of this step runs meanwhile.
        """
        must_wait = any(listener.must_know(len(self._unnotified)) for _, listeners in self._unnotified
                        for _, listener in listeners)
        while self._unnotified and (must_wait or self._unnotified[0][0].is_done()):
            output, listeners = self._unnotified[0]
            tokens = output.to_host().token_ids_B.tolist()
            del self._unnotified[0]  # what could not be fetched is told by a second call
            for row, listener in listeners:
                listener.observe(tokens[row])

    def _compile_sampling(self, logits_BV: Tensor, uniforms_B: Tensor) -> None:
        """In the first step, a made-up one, call every variant of the kernel: model logits and adjusted ones, with and
        without masks. A kernel is compiled when it is called."""
        if self._softmax_sampler is None or self._is_compiled:
            return
        ones_11, uniforms_11 = torch.ones_like(uniforms_B)[:1, None], uniforms_B[:1, None]
        words_1W = torch.full((1, self._num_mask_words), -1, dtype=torch.int32, device=logits_BV.device)
        for logits_1V in (logits_BV[:1], logits_BV[:1].float()):
            self._softmax_sampler(logits_1V, ones_11, uniforms_11)
            self._allow_tokens(logits_1V, None, words_1W)
        if self._masked_sampler is not None:
            self._masked_sampler(logits_BV[:1], ones_11, uniforms_11, words_1W, torch.zeros_like(words_1W[0, :1]))
        self._is_compiled = True

    def _masks_of(self, constraints: Sequence[TokenConstraint], device: torch.device,
                  drafts: Sequence[list[int]] | None = None) -> Tensor:
        """int32 (C, W) on the device, in one copy: a bit per token, the lowest first. With `drafts` also what may come
        behind each of them."""
        num_masks = len(constraints) + sum(map(len, drafts or ()))
        words_CW = self._host_buffer(num_masks * self._num_mask_words).view(-1, self._num_mask_words)
        self._constrained.write_masks(constraints, words_CW.numpy(), drafts)
        return words_CW.to(device, non_blocking=True)

    def _choose(self, logits_BV: Tensor, slots_B: Tensor, uniforms_B: Tensor, plan: StepPlan,
                words_CW: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, 1) each: a token per row; the same in int32; the same in int32. A row without a token has in the first
        any value, in the second NO_TOKEN or ALL_BANNED, in the third a valid token."""
        sampled_B1 = self._sample_at_once(logits_BV, slots_B, uniforms_B, plan, words_CW)
        if sampled_B1 is not None and self._samples_all_at_once(plan):
            int32_ids_B1 = sampled_B1.to(torch.int32)
            return sampled_B1, int32_ids_B1, int32_ids_B1.clamp(min=0)
        adjusted_AV = logits_BV if plan.adjusted is None else self._adjust(logits_BV, slots_B, plan, words_CW)
        if plan.masks_all:  # they leave NaN and +inf to be seen: there is nothing to be looked for in the model's own
            largest_B1, tokens_B1 = ops.most_probable(adjusted_AV)
            is_unusable_A1, is_unusable_B1 = ops.is_unusable_and_why(adjusted_AV, largest_B1)
        else:
            largest_B1, tokens_B1, is_unusable_B1 = _most_probable(logits_BV)
            is_unusable_A1 = is_unusable_B1
            if plan.adjusted is not None:
                largest_A1, tokens_A1, is_unusable_A1 = _most_probable(adjusted_AV)
                largest_B1 = plan.adjusted.put(largest_B1.float(), largest_A1)
                tokens_B1 = plan.adjusted.put(tokens_B1, tokens_A1)
        for group in plan.groups:
            if group.is_plain and sampled_B1 is not None:
                sampled_G1 = group.rows.select(sampled_B1).clamp(min=0).to(tokens_B1.dtype)
            else:
                source = adjusted_AV if group.is_adjusted else logits_BV
                select = group.rows.select
                sampled_G1 = self._sample_group(group, group.places.select(source).float(), select(largest_B1).float(),
                                                select(tokens_B1), select(slots_B), select(uniforms_B)[:, None])
            tokens_B1 = group.rows.put(tokens_B1, sampled_G1)
        next_B1 = token_ids_B1 = tokens_B1.to(torch.int32)
        if plan.adjusted is not None:
            token_ids_A1 = plan.adjusted.select(next_B1).masked_fill(is_unusable_A1, ALL_BANNED)
            token_ids_B1 = plan.adjusted.put(token_ids_B1, token_ids_A1)
        return tokens_B1, token_ids_B1.masked_fill(is_unusable_B1, NO_TOKEN), next_B1

    def _samples_all_at_once(self, plan: StepPlan) -> bool:
        """True if the platform's kernel can sample the whole step."""
        if plan.is_plain_but_masked:
            return self._masked_sampler is not None
        return plan.is_plain_sampling or (plan.is_plain and self._samples_greedily)

    def _sample_at_once(self, logits_BV: Tensor, slots_B: Tensor, uniforms_B: Tensor, plan: StepPlan,
                        words_CW: Tensor | None) -> Tensor | None:
        """The platform's kernel for every row; valid for plain rows, whatever other rows need. None if the platform has
        none, or no row is plain."""
        wants = any(group.is_plain for group in plan.groups) or self._samples_all_at_once(plan)
        if self._softmax_sampler is None or not wants:
            return None
        if self._temperatures is None or self._temperatures[0] is not plan:
            self._temperatures = plan, self._state.fields(slots_B)[Field.TEMPERATURE]
        inputs = logits_BV, self._temperatures[1], uniforms_B[:, None]
        if self._masked_sampler is None or not plan.is_plain_but_masked or words_CW is None:
            return self._softmax_sampler(*inputs)
        return self._masked_sampler(*inputs, words_CW, self._places_of_masks(plan, words_CW, len(logits_BV)))

    def _places_of_masks(self, plan: StepPlan, words_CW: Tensor, num_rows: int) -> Tensor:
        """int32 (B,): which mask is a row's own, -1 where it has none. Of a plan that adjusts by masks alone."""
        assert plan.adjusted is not None, "no row has a mask"
        if self._mask_places is None or self._mask_places[0] is not plan:
            none_B = torch.full((num_rows,), -1, dtype=torch.int32, device=words_CW.device)
            places_C = torch.arange(len(words_CW), dtype=torch.int32, device=words_CW.device)
            self._mask_places = plan, plan.adjusted.put(none_B, places_C)
        return self._mask_places[1]

    def _adjust(self, logits_BV: Tensor, slots_B: Tensor, plan: StepPlan, words_CW: Tensor | None) -> Tensor:
        """A copy of the logits of adjusted rows, after penalties, bias, bans and masks."""
        assert plan.adjusted is not None, "no row asks for it"
        if plan.masks_alone and words_CW is not None:
            return self._allow_tokens(logits_BV, plan.adjusted.index, words_CW)
        adjusted_AV = plan.adjusted.select(logits_BV)
        adjusted_AV = adjusted_AV.to(torch.float32, copy=adjusted_AV is logits_BV)
        if plan.penalised is not None and plan.counted is not None:
            slots_P = plan.counted.select(slots_B)
            fields_FP1 = self._state.fields(slots_P)
            counts_PV = self._state.counts.rows(slots_P)
            logits_PV = plan.penalised.select(adjusted_AV)
            if plan.uses_repetition:
                logits_PV = ops.repetition_penalty(logits_PV, counts_PV > 0.0, fields_FP1[Field.REPETITION])
            if plan.uses_frequency:
                logits_PV = ops.count_penalties(logits_PV, counts_PV.floor_(), fields_FP1[Field.FREQUENCY],
                                                fields_FP1[Field.PRESENCE])
            adjusted_AV = plan.penalised.put(adjusted_AV, logits_PV)
        if plan.additions is not None:
            plan.additions.add_to(adjusted_AV)
        if plan.repeating is not None:
            rows, places = plan.repeating.rows, plan.repeating.places
            banned_GV = self._state.ngrams.ban(places.select(adjusted_AV), rows.select(slots_B), plan.repeating.bans)
            adjusted_AV = places.put(adjusted_AV, banned_GV)
        if plan.masked is None or words_CW is None:
            return adjusted_AV
        return plan.masked.put(adjusted_AV, self._allow_tokens(adjusted_AV, plan.masked.index, words_CW))

    def _processed(self, logits_BV: Tensor, slots_B: Tensor, plan: StepPlan, words_CW: Tensor | None,
                   tokens_L1: Tensor) -> Tensor:
        """(L, V): the logits that the rows with log probabilities are sampled from, -inf for tokens that are left
        out."""
        assert plan.logprobs is not None, "no row asks for it"
        processed_BV = logits_BV.float()
        if plan.adjusted is not None:
            processed_BV = plan.adjusted.put(processed_BV, self._adjust(logits_BV, slots_B, plan, words_CW))
        logits_LV, fields_FL1 = plan.logprobs.select(processed_BV), self._state.fields(plan.logprobs.select(slots_B))
        is_greedy_L1 = fields_FL1[Field.TEMPERATURE] == 0.0
        scaled_LV = logits_LV / fields_FL1[Field.TEMPERATURE].masked_fill(is_greedy_L1, 1.0)
        if not any(group.sorts or group.uses_min_p for group in plan.groups):
            return scaled_LV
        is_kept_LV = ops.is_kept(
            logits_LV, fields_FL1[Field.TEMPERATURE], top_k_B1=fields_FL1[Field.TOP_K],
            top_p_B1=fields_FL1[Field.TOP_P], min_p_B1=fields_FL1[Field.MIN_P], sort_ascending=self._sort_ascending)
        # The sampler's sums are of fewer candidates: at an edge they may round otherwise. What was sampled is kept.
        is_sampled_LV = torch.arange(scaled_LV.shape[-1], device=scaled_LV.device) == tokens_L1
        return torch.where(is_kept_LV | is_greedy_L1 | is_sampled_LV, scaled_LV, torch.full_like(scaled_LV, -torch.inf))

    def _sample_group(self, group: SamplingGroup, logits_GV: Tensor, largest_G1: Tensor, greedy_G1: Tensor,
                      slots_G: Tensor, uniforms_G1: Tensor) -> Tensor:
        fields_FG1 = self._state.fields(slots_G)
        temperature_G1 = fields_FG1[Field.TEMPERATURE]
        min_p_G1 = fields_FG1[Field.MIN_P] if group.uses_min_p else None
        if self._softmax_sampler is not None and not group.sorts and not group.uses_min_p:
            return self._softmax_sampler(logits_GV, temperature_G1, uniforms_G1).clamp(min=0).to(greedy_G1.dtype)
        if not group.sorts:
            weights_GV = ops.token_weights(logits_GV, largest_G1, temperature_G1)
            return ops.sample(weights_GV, greedy_G1, uniforms_G1, min_p_B1=min_p_G1)
        return ops.sample_from_top(
            logits_GV, largest_G1, temperature_G1, uniforms_G1, num_candidates=group.most_k,
            top_k_B1=fields_FG1[Field.TOP_K] if group.least_k < group.most_k else None,
            top_p_B1=fields_FG1[Field.TOP_P], min_p_B1=min_p_G1, sort_ascending=self._sort_ascending)


def _problems(masked: Sequence[tuple[int, TokenConstraint]]) -> dict[int, str]:
    return {row: constraint.problem for row, constraint in masked if constraint.problem is not None}


def _launch(recorded: RecordedSampling, logits_BV: Tensor, plan: StepPlan,
            download: Callable[[Tensor], Download]) -> tuple[SamplerOutput, Tensor]:
    """The result of `Sampler._sample`, from one launch."""
    num_rows = len(logits_BV)
    recorded(logits_BV)
    tokens_B = recorded.flat[:num_rows]
    return SamplerOutput(tokens_B, recorded.next_P[:num_rows], None, plan.logprob_rows, download(recorded.flat),
                         num_flat_rows=recorded.num_rows), tokens_B


def _most_probable(logits_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(largest logit, its token id, whether the row has no token), (B, 1) each."""
    largest_B1, tokens_B1 = ops.most_probable(logits_BV)
    return largest_B1, tokens_B1, ops.is_unusable(logits_BV, largest_B1)


def whole_rows(max_num_seqs: int) -> int:
    """The most rows whose whole vocabulary is sorted at once."""
    return max(1, max_num_seqs // 4)


def most_probable_first(logits_LV: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """The `num_top` largest values of each row and their token ids. To select all takes more memory than to sort."""
    if num_top < logits_LV.shape[-1]:
        return logits_LV.topk(num_top, dim=-1)
    return logits_LV.sort(dim=-1, descending=True)


def _logprobs(logits_LV: Tensor, tokens_L1: Tensor, num_top: int, *, as_logits: bool) -> LogprobsTensors:
    log_total_L1 = torch.zeros_like(logits_LV[:, :1]) if as_logits else logits_LV.logsumexp(-1, keepdim=True)
    top_LK, top_ids = most_probable_first(logits_LV, num_top)
    sampled_L1 = logits_LV.gather(-1, tokens_L1)
    return LogprobsTensors(
        sampled_L=(sampled_L1 - log_total_L1).squeeze(-1),
        ranks_L=(logits_LV > sampled_L1).to(torch.int32).sum(-1, dtype=torch.int32) + 1,
        top_ids=top_ids,
        top_logprobs=top_LK - log_total_L1)
