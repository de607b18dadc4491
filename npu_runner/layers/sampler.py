"""Chooses the next token of every row of a step, in one batched pass on the device.

A sequence registers once with its slot; from then on neither its parameters nor its tokens cross again. Knows nothing
of when a sequence ends or what its text is.

Shapes: B rows of the step, V vocabulary, K most top logprobs any row wants; a 1 is a kept dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from npu_runner.layers import sampling_ops as ops
from npu_runner.layers.sampling_state import Feature, Field, SamplingState
from npu_runner.sampling_params import SamplingParams


@dataclass(frozen=True)
class LogprobsTensors:
    """Log probabilities of the model's own distribution, before penalties and temperature, on the device.

    sampled_B float32; top_ids (B, K) int64 and top_logprobs (B, K) float32, most probable first.
    """

    sampled_B: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@dataclass(frozen=True)
class SamplerOutput:
    """token_ids_B: int64 on the device; -1 where a row has no token: its logits hold NaN or +inf, or all are banned."""

    token_ids_B: Tensor
    logprobs: LogprobsTensors | None
    """None when no row asked."""
    table: Tensor
    """int32 (B, columns): all of it and the step's receipts, side by side."""

    def to_host(self) -> HostSample:
        """Everything in host memory, by one copy; waits for the step."""
        table = self.table.cpu().numpy()
        if self.logprobs is None:
            return HostSample(table[:, 0], table[:, 1], None, None, None)
        first, second = 3, 3 + (table.shape[1] - 3) // 2
        floats = table.view(np.float32)
        return HostSample(table[:, 0], table[:, 1], floats[:, 2], table[:, first:second], floats[:, second:])


@dataclass(frozen=True)
class HostSample:
    """A SamplerOutput in host memory; int32 and float32 arrays, the logprobs None when no row asked."""

    token_ids_B: np.ndarray
    receipts_B: np.ndarray
    sampled_logprobs_B: np.ndarray | None
    top_ids_BK: np.ndarray | None
    top_logprobs_BK: np.ndarray | None


class Sampler:
    """Per-slot sampling state on one device. A slot is a row 0..max_num_seqs-1 that a running sequence holds.

    Order: penalties (repetition, then frequency and presence), logit_bias and bans (min_tokens, bad_words), then the
    argmax for temperature 0, else temperature, top_k, top_p, min_p and one draw by inverse CDF. Where probabilities are
    equal the lower token id comes first, in the argmax as in the kept sets. The token depends on the row's logits,
    parameters, seed and history alone: not on its slot or its neighbours.
    """

    def __init__(self, *, vocab_size: int, max_num_seqs: int, eos_token_ids: Sequence[int], device: torch.device,
                 encode: Callable[[str], list[int]] | None,
                 sort_ascending: Callable[[Tensor], Tensor] = lambda x: x.sort(dim=-1).values):
        """encode: text to token ids without special tokens, for bad_words. sort_ascending: the platform's, see Ops."""
        self._state = SamplingState(vocab_size=vocab_size, max_num_seqs=max_num_seqs, eos_token_ids=eos_token_ids,
                                    device=device, encode=encode)
        self._sort_ascending = sort_ascending

    def add(self, slot: int, params: SamplingParams, prompt_token_ids: Sequence[int],
            output_token_ids: Sequence[int] = (), *, seed: int) -> None:
        """Register a sequence, new or back from preemption with its output so far.

        Raises RequestError when the parameters cannot be served; the slot is then free.
        """
        self._state.add(slot, params, prompt_token_ids, output_token_ids, seed)

    def remove(self, slot: int) -> None:
        """Free the slot, whether or not anything is registered there."""
        self._state.remove(slot)

    def host_inputs(self, slots: np.ndarray) -> np.ndarray:
        """float32 (B,): the uniform in [0, 1) that each row's next draw uses. Asking changes nothing."""
        return self._state.uniforms(slots)

    @torch.inference_mode()
    def __call__(self, logits_BV: Tensor, slots_B: Tensor, uniforms_B: Tensor, receipts_B: Tensor,
                 host_slots: np.ndarray) -> SamplerOutput:
        """One token per row. logits_BV (any float type) is left as it is; host_slots says slots_B on the host.

        receipts_B: int32 on the device, brought back with the tokens. What was sent with the step's own inputs shows
        that the device ran this step, and that the tokens are not what an earlier one left in its memory.
        """
        state = self._state
        state.upload()
        features = state.features(host_slots)
        if features & ~Feature.LOGPROBS:
            slots_B = slots_B.long()
        adjusted_BV = self._adjusted(logits_BV, slots_B, features)
        largest_B1, tokens_B1 = ops.most_probable(adjusted_BV)
        is_unusable_B1 = ops.is_unusable(adjusted_BV, largest_B1)
        if features & (Feature.DRAW | Feature.DRAW_FROM_TOP):
            tokens_B1 = self._draw(adjusted_BV.float(), largest_B1.float(), tokens_B1, slots_B, uniforms_B[:, None],
                                   features, host_slots)
        logprobs = None
        if features & Feature.LOGPROBS:
            logprobs = _logprobs(logits_BV.float(), tokens_B1, state.num_logprobs(host_slots))
        token_ids_B = tokens_B1.masked_fill(is_unusable_B1, -1).squeeze(-1)
        output = SamplerOutput(token_ids_B, logprobs, _table(token_ids_B, receipts_B, logprobs))
        # Last: a call that fails for want of memory changes nothing, and can be made again.
        state.advance(features, slots_B, tokens_B1.squeeze(-1), host_slots)
        return output

    def _adjusted(self, logits_BV: Tensor, slots_B: Tensor, features: Feature) -> Tensor:
        """Logits after penalties, bias and bans; the given ones where there is nothing to do."""
        if not features & (Feature.REPETITION | Feature.FREQUENCY | Feature.RULES):
            return logits_BV
        adjusted_BV = logits_BV.to(torch.float32, copy=True)
        if features & (Feature.REPETITION | Feature.FREQUENCY):
            fields_FB1 = self._state.fields(slots_B)
            counts_BV = self._state.counts.rows(slots_B)
            if features & Feature.REPETITION:
                adjusted_BV = ops.repetition_penalty(adjusted_BV, counts_BV > 0.0, fields_FB1[Field.REPETITION])
            if features & Feature.FREQUENCY:
                adjusted_BV = ops.count_penalties(adjusted_BV, counts_BV.floor_(), fields_FB1[Field.FREQUENCY],
                                                  fields_FB1[Field.PRESENCE])
        if features & Feature.RULES:
            self._state.rules.apply(adjusted_BV, slots_B, match_prefixes=Feature.PREFIX_RULES in features)
        return adjusted_BV

    def _draw(self, logits_BV: Tensor, largest_B1: Tensor, tokens_B1: Tensor, slots_B: Tensor, uniforms_B1: Tensor,
              features: Feature, host_slots: np.ndarray) -> Tensor:
        """`tokens_B1` with a draw in place of the argmax in the rows that are not greedy."""
        fields_FB1 = self._state.fields(slots_B)
        temperature_B1 = fields_FB1[Field.TEMPERATURE]
        min_p_B1 = fields_FB1[Field.MIN_P] if features & Feature.MIN_P else None
        greedy_B1 = tokens_B1
        if features & Feature.DRAW:
            weights_BV = ops.token_weights(logits_BV, largest_B1, temperature_B1)
            drawn_B1 = ops.draw(weights_BV, greedy_B1, uniforms_B1, min_p_B1=min_p_B1)
            tokens_B1 = torch.where(fields_FB1[Field.DRAWS] > 0.0, drawn_B1, tokens_B1)
        if features & Feature.DRAW_FROM_TOP:
            least_k, most_k = self._state.top_k_range(host_slots)
            drawn_B1 = ops.draw_from_top(
                logits_BV, largest_B1, temperature_B1, uniforms_B1, num_candidates=most_k,
                top_k_B1=fields_FB1[Field.TOP_K] if least_k < most_k else None,
                top_p_B1=fields_FB1[Field.TOP_P], min_p_B1=min_p_B1, sort_ascending=self._sort_ascending)
            tokens_B1 = torch.where(fields_FB1[Field.DRAWS_FROM_TOP] > 0.0, drawn_B1, tokens_B1)
        return tokens_B1


def _table(token_ids_B: Tensor, receipts_B: Tensor, logprobs: LogprobsTensors | None) -> Tensor:
    columns = [token_ids_B[:, None].to(torch.int32), receipts_B[:, None]]
    if logprobs is not None:
        columns += [logprobs.sampled_B[:, None].view(torch.int32), logprobs.top_ids.to(torch.int32),
                    logprobs.top_logprobs.view(torch.int32)]
    return torch.cat(columns, dim=1)


def _logprobs(logits_BV: Tensor, tokens_B1: Tensor, num_top: int) -> LogprobsTensors:
    log_total_B1 = logits_BV.logsumexp(-1, keepdim=True)
    top_BK, top_ids = logits_BV.topk(min(num_top, logits_BV.shape[-1]), dim=-1)
    return LogprobsTensors(
        sampled_B=(logits_BV.gather(-1, tokens_B1) - log_total_B1).squeeze(-1),
        top_ids=top_ids,
        top_logprobs=top_BK - log_total_B1,
    )
