"""Books a decode step's tokens for the rows that nothing happens to but one more token: most of them, in most steps.

Knows by slot when that is so, as `note` was told when a row was booked one by one: after its prompt, and whenever more
may have happened. Knows nothing of text, log probabilities or requests.

S slots, B rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import cast

import numpy as np

from npu_runner.core.sequence import Sequence
from npu_runner.engine.generation import Generation
from npu_runner.sampling.sampler import ALL_BANNED, NO_TOKEN


class PlainRows:
    """For up to `max_num_seqs` slots; none of them is plain until `note` says so."""

    def __init__(self, max_num_seqs: int):
        self._is_watched_S = np.ones(max_num_seqs, dtype=np.bool_)
        self._num_left_S = np.zeros(max_num_seqs, dtype=np.int64)
        # Of whatever was ever noted: a token that ends one row sends others that bring it one by one as well.
        self._ends = {NO_TOKEN, ALL_BANNED}

    def note(self, slot: int, generation: Generation) -> None:
        """What will be booked for this slot next, until its next prompt, is `generation`'s."""
        self._is_watched_S[slot] = generation.is_watched
        self._num_left_S[slot] = generation.num_left
        self._ends |= generation.end_tokens

    def forget(self) -> None:
        """Slots are given out anew."""
        self._is_watched_S[:] = True

    def book(self, slots_B: np.ndarray, sequences: SequenceOf[Sequence | None],
             tokens: SequenceOf[int] | SequenceOf[list[int]]) -> SequenceOf[int]:
        """Give each plain row its token, which a step under way was to bring; returns the rows that are to be booked
        one by one, in order: all, where some row has more than one token, or none."""
        if not tokens or isinstance(tokens[0], list):
            return range(len(sequences))
        ids = cast("SequenceOf[int]", tokens)
        self._num_left_S[slots_B] -= 1
        is_other_B = self._is_watched_S[slots_B] | (self._num_left_S[slots_B] <= 0)
        if not self._ends.isdisjoint(ids):
            is_other_B |= np.fromiter((token in self._ends for token in ids), dtype=np.bool_, count=len(ids))
        others = np.flatnonzero(is_other_B).tolist()
        kept = list(sequences)
        for row in others:
            kept[row] = None
        for sequence, token in zip(kept, ids, strict=True):
            if sequence is not None:  # in a line of its own for each: a call would take as long as all of this
                sequence.output_token_ids.append(token)
                sequence.num_expected -= 1
        return others
