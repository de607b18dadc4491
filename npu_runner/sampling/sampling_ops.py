"""The mathematics of choosing tokens from logits, batched. Knows nothing of sequences, slots or requests.

Only operators that exist on every platform, no shape that depends on values, nothing that waits for the device.

Shapes: B rows, V vocabulary, K candidates, N blocks of C weights in a row, R blocks of all rows; a 1 is a kept dim.
Weights are exp((logit - largest logit) / temperature): the most probable token weighs exactly 1. Where logits are equal
the lower token id counts as the more probable, so that every kept set is a prefix of one total order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 128  # divides the usual vocabularies, so that nothing is padded
_LONGEST_SINGLE_BLOCK = 1024


def most_probable(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """(largest logit, its token id int64), (B, 1) each; the first of equals."""
    largest_B1, token_B1 = logits_BV.max(dim=-1, keepdim=True)
    return largest_B1, token_B1


def is_unusable(logits_BV: Tensor, largest_B1: Tensor) -> Tensor:
    """(B, 1) bool: there is a NaN or +inf, or no token that can be sampled."""
    return _has_no_excess(_totals(logits_BV), largest_B1)


def is_unusable_and_why(logits_BV: Tensor, largest_B1: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 1) bool each: `is_unusable`; and whether that is for a NaN or +inf, and not because all are -inf."""
    total_B1 = _totals(logits_BV)
    is_unusable_B1 = _has_no_excess(total_B1, largest_B1)
    return is_unusable_B1, is_unusable_B1 & (total_B1 != -torch.inf)


def _totals(logits_BV: Tensor) -> Tensor:
    # A sum carries NaN on every device; whether max does is each vendor's choice.
    return logits_BV.sum(-1, keepdim=True, dtype=torch.float32)


def _has_no_excess(total_B1: Tensor, largest_B1: Tensor) -> Tensor:
    # Less the largest a sum is NaN for infinities, too: an infinite largest one is that of the sum.
    excess_B1 = total_B1 - largest_B1
    return excess_B1 != excess_B1


def token_weights(logits_BV: Tensor, largest_B1: Tensor, temperature_B1: Tensor) -> Tensor:
    """Unnormalised probabilities after temperature."""
    return (logits_BV - largest_B1).div_(temperature_B1).exp_()


def sample(weights_BV: Tensor, most_probable_B1: Tensor, uniform_B1: Tensor, *, min_p_B1: Tensor | None) -> Tensor:
    """Token ids (B, 1) sampled by inverse CDF from the tokens that min_p keeps."""
    if min_p_B1 is not None:
        weights_BV = weights_BV.clone().ge_(min_p_B1).mul_(weights_BV)
    sums = _RunningSums(weights_BV)
    sampled_B1, _ = sums.first_beyond(uniform_B1 * sums.total_B1)
    # Where rounding led past the last weight, or to a token without any.
    return torch.where(weights_BV.gather(-1, sampled_B1) > 0.0, sampled_B1, most_probable_B1)


def sample_from_top(logits_BV: Tensor, largest_B1: Tensor, temperature_B1: Tensor, uniform_B1: Tensor, *,
                    num_candidates: int, top_k_B1: Tensor | None, top_p_B1: Tensor, min_p_B1: Tensor | None,
                    sort_ascending: Callable[[Tensor], Tensor]) -> Tensor:
    """Token ids (B, 1) sampled by inverse CDF from what top_k, then top_p, then min_p keep.

    num_candidates: the largest top_k of any row; top_k_B1 (float32) may be None if it is that of all rows.
    top_p_B1: the share of the mass to reach, 1 to keep all. sort_ascending: the platform's, see Ops.
    """
    negated_BK = _negated_top(logits_BV, num_candidates, sort_ascending)
    weights_BK = token_weights(negated_BK, -largest_B1, -temperature_B1)  # signs cancel exactly
    if top_k_B1 is not None:
        ranks_K = torch.arange(num_candidates, device=weights_BK.device, dtype=torch.float32)
        weights_BK = weights_BK.masked_fill_(ranks_K >= top_k_B1, 0.0)
    sums = _RunningSums(weights_BK)
    last_B1, before_B1 = sums.first_beyond(top_p_B1 * sums.total_B1)
    mass_B1 = before_B1 + weights_BK.gather(-1, last_B1)
    if min_p_B1 is not None:
        is_kept_BK = weights_BK.clone().ge_(min_p_B1)
        num_kept_B1 = is_kept_BK.sum(-1, keepdim=True).long().clamp_(min=1)  # a NaN keeps nothing
        last_B1 = torch.minimum(last_B1, num_kept_B1 - 1)
        mass_B1 = torch.minimum(mass_B1, _RunningSums(is_kept_BK.mul_(weights_BK)).total_B1)
    sampled_B1, _ = sums.first_beyond(uniform_B1 * mass_B1)
    sampled_B1 = torch.minimum(sampled_B1, last_B1)
    # A rank after the last weight, by rounding, becomes the first rank.
    sampled_B1 = sampled_B1 * (weights_BK.gather(-1, sampled_B1) > 0.0)
    return _token_of_rank(logits_BV, negated_BK, sampled_B1)


def is_kept(logits_BV: Tensor, temperature_B1: Tensor, *, top_k_B1: Tensor, top_p_B1: Tensor, min_p_B1: Tensor,
            sort_ascending: Callable[[Tensor], Tensor]) -> Tensor:
    """(B, V) bool: the tokens that top_k, then top_p, then min_p keep, as `sample_from_top` samples them. Rows of
    temperature 0 have any value."""
    negated_BV = sort_ascending(logits_BV.neg())
    weights_BV = token_weights(negated_BV, negated_BV[:, :1], -temperature_B1)
    ranks_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device, dtype=torch.float32)
    weights_BV = weights_BV.masked_fill_(ranks_V >= top_k_B1, 0.0)
    sums = _RunningSums(weights_BV)
    last_B1 = sums.first_beyond(top_p_B1 * sums.total_B1)[0].float().masked_fill(top_p_B1 >= 1.0, len(ranks_V) - 1)
    num_likely_B1 = weights_BV.ge(min_p_B1).sum(-1, keepdim=True).float().clamp(min=1.0)
    last_B1 = torch.minimum(last_B1, torch.minimum(top_k_B1, num_likely_B1) - 1)
    edge_B1 = negated_BV.gather(-1, last_B1.long())
    # Of equal logits the lower token ids are kept, as many as the rank of the last one leaves.
    num_equal_B1 = last_B1 + 1 - (negated_BV < edge_B1).sum(-1, keepdim=True)
    is_equal_BV = logits_BV == -edge_B1
    places_BV = is_equal_BV.to(torch.int32).cumsum(-1, dtype=torch.int32)
    return (logits_BV > -edge_B1) | (is_equal_BV & (places_BV <= num_equal_B1))


def repetition_penalty(logits_BV: Tensor, seen_BV: Tensor, penalty_B1: Tensor) -> Tensor:
    """Logits of seen tokens divided by the penalty where positive, multiplied where negative (arXiv 1909.05858)."""
    penalised_BV = torch.where(logits_BV > 0.0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return torch.where(seen_BV, penalised_BV, logits_BV)


def count_penalties(logits_BV: Tensor, counts_BV: Tensor, frequency_B1: Tensor, presence_B1: Tensor) -> Tensor:
    """Logits less frequency * count, less presence where the count is not 0. counts_BV: float32."""
    less_often_BV = logits_BV - counts_BV * frequency_B1
    return less_often_BV.sub_(counts_BV.clamp(max=1.0).mul_(presence_B1))


def _negated_top(logits_BV: Tensor, num_candidates: int, sort_ascending: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest logits negated, in ascending order."""
    if num_candidates < logits_BV.shape[-1]:
        return logits_BV.topk(num_candidates, dim=-1).values.neg_()
    return sort_ascending(logits_BV.neg())


def _token_of_rank(logits_BV: Tensor, negated_BK: Tensor, rank_B1: Tensor) -> Tensor:
    """The token at each row's rank, equals by id: sorting leaves the order of equals open. Spoils negated_BK."""
    negated_B1 = negated_BK.gather(-1, rank_B1)
    nth_B1 = rank_B1 - negated_BK.lt_(negated_B1).sum(-1, keepdim=True)
    token_B1, _ = _RunningSums(logits_BV.clone().eq_(-negated_B1)).first_beyond(nth_B1)
    return token_B1


class _RunningSums:
    """Running sums of each row's weights. Long rows in two levels: a pass over a vocabulary only adds up blocks."""

    def __init__(self, weights_BV: Tensor):
        self._last = weights_BV.shape[-1] - 1
        self._weights_RC: Tensor | None = None
        if self._last < _LONGEST_SINGLE_BLOCK:
            self._cumulative_BN = weights_BV.cumsum(-1)
        else:
            excess = -weights_BV.shape[-1] % _BLOCK
            padded = F.pad(weights_BV, (0, excess)) if excess else weights_BV
            self._weights_RC = padded.view(-1, _BLOCK)
            self._cumulative_BN = self._weights_RC.sum(-1).view(len(padded), -1).cumsum(-1)
            num_blocks = padded.shape[1] // _BLOCK
            self._first_blocks_B1 = torch.arange(0, len(self._weights_RC), num_blocks, device=padded.device)[:, None]
        self.total_B1 = self._cumulative_BN[:, -1:]

    def first_beyond(self, target_B1: Tensor) -> tuple[Tensor, Tensor]:
        """(index of the first weight whose running sum passes the target, else the last index; the sum before it)."""
        index_B1, before_B1 = _first_beyond(self._cumulative_BN, target_B1)
        if self._weights_RC is None:
            return index_B1, before_B1
        # Whole rows of a table: a gather along a middle axis transposes all weights on some devices.
        weights_BC = self._weights_RC.index_select(0, (self._first_blocks_B1 + index_B1).squeeze(-1))
        offset_B1, within_B1 = _first_beyond(weights_BC.cumsum(-1), target_B1 - before_B1)
        return torch.add(offset_B1, index_B1, alpha=_BLOCK).clamp_(max=self._last), before_B1 + within_B1


def _first_beyond(cumulative_BN: Tensor, target_B1: Tensor) -> tuple[Tensor, Tensor]:
    is_before_BN = cumulative_BN <= target_B1
    is_before_BN[:, -1] = False
    return is_before_BN.sum(-1, keepdim=True), (cumulative_BN * is_before_BN).amax(-1, keepdim=True)
