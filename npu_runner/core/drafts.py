"""Proposes next tokens of sequences, ahead of the step that samples them. Knows no model and no grammar.

Three kinds. Forced tokens spell the only text that a grammar leaves; the step before reports them, and with `mtp` what
the model's head proposes behind them. Looked-up tokens followed, earlier in prompt and answer, the tokens that the
sequence ends with now; or, with `suffix`, in other answers.

What is proposed changes no answer: a step samples the token at each place as it would have without drafts, and keeps a
draft that is equal. How many are proposed depends on counts alone, never on a clock.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import NamedTuple

import numpy as np

from npu_runner.core.draft_history import DraftHistory, followers
from npu_runner.core.sequence import Sequence
from npu_runner.core.suffix_drafts import SuffixDrafts, SuffixSettings
from npu_runner.request.outputs import DraftCounters
from npu_runner.request.speculative import FORCED, MTP, SUFFIX, SpeculativeConfig


class _Drafted(NamedTuple):
    """A sequence in the step under way, with the tokens that it had."""

    seq: Sequence
    history: DraftHistory | None
    num_tokens: int
    num_drafts: int


class Drafter:
    """The drafter of one engine. A step with drafts is scheduled only when no other step is in flight. A step without
    drafts may follow one in flight if `can_draft` returns False."""

    def __init__(self, config: SpeculativeConfig):
        self._config = config
        self.counters = DraftCounters()
        self._under_way: list[_Drafted] = []
        self._suffixes: SuffixDrafts | None = None
        if config.method == SUFFIX:
            self._suffixes = SuffixDrafts(SuffixSettings(
                max_tree_depth=config.suffix_decoding_max_tree_depth,
                max_cached_requests=config.suffix_decoding_max_cached_requests,
                max_spec_factor=config.suffix_decoding_max_spec_factor,
                min_token_prob=config.suffix_decoding_min_token_prob))
            self.counters.suffix_cache_bytes = self._suffixes.num_bytes

    def reset(self) -> None:
        """Forget the steps in flight."""
        self._under_way = []

    def record_answer(self, seq: Sequence) -> None:
        """Add the answer of a sequence that has finished normally; later sequences may repeat it."""
        if self._suffixes is not None:
            self._suffixes.add(seq.output_token_ids)

    def record_next(self, sequences: SequenceOf[Sequence | None], spec_token_ids: SequenceOf[list[int]],
                    num_forced: SequenceOf[int]) -> None:
        """Record the tokens that may follow each sequence of a finished step: `num_forced` tokens that its grammar
        forces, then the tokens that a head proposes."""
        for seq, tokens, num in zip(sequences, spec_token_ids, num_forced, strict=False):
            if seq is not None and (tokens or seq.drafting is not None):
                history = _history(seq)
                history.forced, history.proposed = tokens[:num], tokens[num:]
                history.num_tokens = seq.num_known_tokens

    @property
    def is_under_way(self) -> bool:
        """Whether a step with drafts is in flight."""
        return bool(self._under_way)

    def can_draft(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the next step of `running` may have drafts, for any outcome of the steps in flight."""
        return self._config.most_drafts(len(running)) > 0 and any(map(self._can_draft_for, running))

    def _can_draft_for(self, seq: Sequence) -> bool:
        if seq.params.structured_outputs is not None:
            return True
        return self._config.method != FORCED and not (
            seq.drafting is not None and seq.drafting.pauses_at(seq.num_tokens))

    def propose(self, running: SequenceOf[Sequence], room: int) -> list[list[int]]:
        """The drafts of each sequence, at most `room` in all; an empty list if a step of this size has no drafts.

        The last token that a sequence may have is never a draft, because no token is sampled after it.
        """
        most = self._config.most_drafts(len(running))
        if not most:
            return []
        found: list[list[int]] = []
        for seq in running:
            num_left = most if seq.max_num_tokens is None else seq.max_num_tokens - seq.num_tokens - 1
            drafts = self._drafts(seq, min(most, room, num_left))
            room -= len(drafts)
            found.append(drafts)
        return found

    def _drafts(self, seq: Sequence, num: int) -> list[int]:
        if num <= 0:
            return []
        history = _history(seq)
        is_due = history.num_tokens == seq.num_tokens  # else steps without drafts came in between
        drafts, proposed = (history.forced[:num], history.proposed) if is_due else ([], [])
        history.forced, history.proposed, history.num_forced = [], [], len(drafts)
        if self._config.method == MTP:
            return drafts if history.pauses_at(seq.num_tokens) else (drafts + proposed)[:num]
        if self._config.method != FORCED and len(drafts) < num:
            drafts += history.lookup(seq.num_tokens, seq.tokens, behind=drafts,
                                     find=partial(self._find, num - len(drafts)))
        return drafts

    def _find(self, most: int, tokens_L: np.ndarray) -> list[int]:
        if self._suffixes is not None:
            return self._suffixes.propose(tokens_L, most)
        return followers(tokens_L, self._config.prompt_lookup_min, self._config.prompt_lookup_max, most)

    def wanted(self, running: SequenceOf[Sequence], drafts: SequenceOf[list[int]]) -> np.ndarray | None:
        """(B,) bool: whether the step behind one with these drafts, if any, may take what a head proposes; it does not
        where a row will still pause. None: of all rows."""
        if self._config.method != MTP:
            return None
        ends = (seq.num_tokens + 1 + (len(drafts[row]) if drafts else 0) for row, seq in enumerate(running))
        wants_B = np.array([seq.drafting is None or not seq.drafting.pauses_at(end)
                            for seq, end in zip(running, ends, strict=True)])
        return None if wants_B.all() else wants_B

    def launch(self, running: SequenceOf[Sequence], drafts: SequenceOf[list[int]]) -> None:
        """A step with these drafts, maybe fewer than were proposed, is under way; without any it is a plain one."""
        self._under_way = [_Drafted(seq, seq.drafting, seq.num_tokens, len(tokens))
                           for seq, tokens in zip(running, drafts, strict=bool(drafts))]

    def resolve(self) -> list[tuple[Sequence, int]]:
        """The tokens of the step under way are booked: its sequences, if it had drafts, and how many each has kept."""
        under_way, self._under_way = self._under_way, []
        return [(drafted.seq, self._count(drafted)) for drafted in under_way]

    def _count(self, drafted: _Drafted) -> int:
        seq, history, num_before, num_drafts = drafted
        counters, num_kept = self.counters, max(0, seq.num_known_tokens - num_before - 1)
        if history is None or not num_drafts:
            return num_kept
        num_forced = min(history.num_forced, num_drafts)
        forced_kept = min(num_forced, num_kept)
        counters.num_drafts += 1
        counters.count(FORCED, num_forced, forced_kept)
        if num_drafts > num_forced:
            counters.count(self._config.method, num_drafts - num_forced, num_kept - forced_kept)
        if num_kept >= num_forced < num_drafts:  # else what was looked up, or proposed by a head, was not reached
            history.judge(num_drafts - num_forced, num_kept - num_forced, seq.num_known_tokens)
        return num_kept


def _history(seq: Sequence) -> DraftHistory:
    if seq.drafting is None:
        seq.drafting = DraftHistory()
    return seq.drafting
