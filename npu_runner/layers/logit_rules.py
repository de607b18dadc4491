"""Additions to single logits: logit_bias, the bans before min_tokens, and bad_words, all as one kind of rule.

The rules of all running sequences lie in one flat table on the device, rebuilt when a sequence with rules joins.
Knows nothing of how tokens are drawn.

Shapes: S slots, B rows of the step, V vocabulary, E rules, P longest rule prefix, R newcomers with prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from npu_runner.sampling_params import SamplingParams

FOREVER = int(np.iinfo(np.int32).max)
_ANY, _NO_TOKEN = -1, -2  # a prefix place that matches whatever stands there; a place before the first generated token


@dataclass(frozen=True)
class LogitRules:
    """One sequence's rules: `values` are added to the logits of `tokens` while fewer than `until` tokens are generated
    and the last generated ones equal the prefix."""

    tokens: np.ndarray
    values: np.ndarray
    until: np.ndarray
    prefixes: list[tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def longest_prefix(self) -> int:
        return max(map(len, self.prefixes), default=0)


def logit_rules(params: SamplingParams, eos_token_ids: Sequence[int],
                bad_words: Sequence[tuple[int, ...]]) -> LogitRules:
    """The rules that `params` asks for. bad_words: as token ids, none of them empty."""
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    bans = sorted(ends) if params.min_tokens > 0 else []
    bias = params.logit_bias
    num_always = len(bias) + len(bad_words)
    return LogitRules(
        tokens=np.array([*bias, *(word[-1] for word in bad_words), *bans], dtype=np.int32),
        values=np.array([*bias.values(), *[-np.inf] * (len(bad_words) + len(bans))], dtype=np.float32),
        until=np.array([FOREVER] * num_always + [min(params.min_tokens, FOREVER)] * len(bans), dtype=np.int32),
        prefixes=[()] * len(bias) + [word[:-1] for word in bad_words] + [()] * len(bans),
    )


class RuleTable:
    """The rules of every slot, and what they depend on: how many tokens a slot has generated, and the last ones."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._vocab_size = vocab_size
        self._rules: dict[int, LogitRules] = {}
        self._has_changed = False
        self._recent_SP = torch.full((max_num_seqs, 0), _NO_TOKEN, dtype=torch.int32, device=device)
        self._num_generated_S = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._slots_E: Tensor
        self._tokens_E: Tensor
        self._values_E: Tensor
        self._until_E: Tensor
        self._prefixes_EP: Tensor

    def add(self, slot: int, rules: LogitRules) -> None:
        if len(rules):
            self._rules[slot] = rules
            self._has_changed = True

    def remove(self, slot: int) -> None:
        # A free slot's rules touch no row: they leave the device with the next newcomer, not with a copy of their own.
        self._has_changed |= self._rules.pop(slot, None) is not None

    def stage(self, num_generated_S: np.ndarray, outputs: Mapping[int, Sequence[int]]) -> list[np.ndarray]:
        """Arrays of 4-byte values for `install`; none where the device is up to date.

        outputs: the newcomers' tokens so far.
        """
        if not self._has_changed:
            return []
        width = max([self._recent_SP.shape[1], *(rules.longest_prefix for rules in self._rules.values())])
        slots_E = np.repeat(list(self._rules), [len(rules) for rules in self._rules.values()])
        columns = [np.concatenate([np.zeros(0, dtype), *(getattr(rules, name) for rules in self._rules.values())])
                   for name, dtype in (("tokens", np.int32), ("values", np.float32), ("until", np.int32))]
        prefixes = [prefix for rules in self._rules.values() for prefix in rules.prefixes]
        prefixed = [slot for slot in outputs if slot in self._rules and self._rules[slot].longest_prefix]
        return [
            slots_E.astype(np.int32), columns[0], columns[1], columns[2],
            _right_aligned(prefixes, width, _ANY), num_generated_S.astype(np.int32),
            np.array(prefixed, dtype=np.int32),
            _right_aligned([outputs[slot][-width:] for slot in prefixed], width, _NO_TOKEN),
        ]

    def install(self, staged: Sequence[Tensor]) -> None:
        """Take over what `stage` prepared, now on the device."""
        if not staged:
            return
        slots_E, tokens_E, self._values_E, self._until_E, self._prefixes_EP = staged[:5]
        self._num_generated_S, slots_R, last_RP = staged[5:]
        self._slots_E, self._tokens_E = slots_E.long(), tokens_E.long()
        num_slots, num_kept = self._recent_SP.shape
        missing = last_RP.shape[1] - num_kept
        if missing:
            self._recent_SP = torch.cat([self._recent_SP.new_full((num_slots, missing), _NO_TOKEN), self._recent_SP], 1)
        if len(slots_R):
            self._recent_SP.index_copy_(0, slots_R.long(), last_RP)
        self._has_changed = False

    def apply(self, logits_BV: Tensor, slots_B: Tensor, *, match_prefixes: bool) -> None:
        """Add what the rules say, in place. Without `match_prefixes` no row has a rule with a prefix."""
        rows_B = torch.arange(len(slots_B), device=slots_B.device)
        row_of_slot_S = torch.full_like(self._num_generated_S, -1, dtype=torch.int64).scatter_(0, slots_B, rows_B)
        row_E = row_of_slot_S.index_select(0, self._slots_E)
        applies_E = (row_E >= 0) & (self._num_generated_S.index_select(0, self._slots_E) < self._until_E)
        if match_prefixes:
            recent_EP = self._recent_SP.index_select(0, self._slots_E)
            applies_E &= ((self._prefixes_EP == _ANY) | (self._prefixes_EP == recent_EP)).all(-1)
        values_E = torch.where(applies_E, self._values_E, 0.0)
        logits_BV.view(-1).scatter_add_(0, row_E.clamp(min=0) * self._vocab_size + self._tokens_E, values_E)

    def prepare_advance(self, slots_B: Tensor, tokens_B: Tensor, *, match_prefixes: bool) -> Callable[[], object]:
        """What records one more generated token per row, its memory taken already."""
        ones_B = torch.ones_like(slots_B, dtype=torch.int32)
        shifted_BP = None
        if match_prefixes:
            recent_BP = self._recent_SP.index_select(0, slots_B)
            shifted_BP = torch.cat([recent_BP[:, 1:], tokens_B[:, None].to(torch.int32)], dim=1)

        def record() -> None:
            self._num_generated_S.scatter_add_(0, slots_B, ones_B)
            if shifted_BP is not None:
                self._recent_SP.index_copy_(0, slots_B, shifted_BP)

        return record


def _right_aligned(rows: Sequence[Sequence[int]], width: int, filler: int) -> np.ndarray:
    table = np.full((len(rows), width), filler, dtype=np.int32)
    for row, values in enumerate(rows):
        if values:
            table[row, width - len(values):] = values
    return table
