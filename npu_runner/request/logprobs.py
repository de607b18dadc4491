"""Log probabilities of tokens as callers read them: vLLM's dicts, made of arrays one position at a time.

Knows nothing of how they were computed or written.

T positions, K most probable tokens beside the given one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

Describe = Callable[[int], tuple[str, bytes]]
"""(text, bytes) of a token id."""


@dataclass(frozen=True, repr=False)
class Logprob:
    """Log probability (natural) of one token, or its logit, as `logprobs_mode` says; by default of the temperature 1
    softmax of the raw logits."""

    token_id: int
    token: str
    logprob: float
    token_bytes: bytes
    rank: int | None = None
    """1: the most probable token. None: not known."""

    @property
    def decoded_token(self) -> str:
        """vLLM's name of `token`."""
        return self.token

    def __repr__(self) -> str:
        return f"Logprob(logprob={self.logprob}, rank={self.rank}, decoded_token={self.token!r})"


class PositionLogprobs(dict[int, Logprob]):
    """One position: Logprob by token id. The token that stands there comes first, then the most probable ones, best
    first. `sampled` is the former, `top` are the latter."""

    def __init__(self, sampled: Logprob, top: Sequence[Logprob]):
        super().__init__({token.token_id: token for token in (sampled, *top)})
        self[sampled.token_id] = sampled
        self.sampled = sampled
        self.top = tuple(top)

    @property
    def token(self) -> Logprob:
        """The prompt's own token at this position."""
        return self.sampled

    @property
    def rank(self) -> int | None:
        return self.sampled.rank


class CompactLogprobs(Sequence[PositionLogprobs]):
    """The positions of one completion, kept as numbers: (3 + 2 * K) * 4 bytes each, with its token; read, each becomes
    the PositionLogprobs that it stands for, anew every time. It prints as a list of them.

    ids: int32 (T, 1 + K), logprobs: float32 (T, 1 + K), the sampled token first; ranks: int32 (T,) of the latter.
    """

    def __init__(self, ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, describe: Describe):
        self.ids = ids
        self.logprobs = logprobs
        self.ranks = ranks
        self.describe = describe

    def __len__(self) -> int:
        return len(self.ids)

    def by_token_id(self) -> np.ndarray:
        """float32 (T, V): the values of the whole vocabulary, where it was asked for (-1), in the order of token ids.
        No object is made of each. Raises ValueError where there are only some tokens."""
        ids, values = self.ids[:, 1:], self.logprobs[:, 1:]
        if ids.size == 0 or ids.max() >= ids.shape[1]:
            raise ValueError(f"by_token_id: there are {ids.shape[1]} most probable tokens of each position, not all; "
                             "set logprobs=-1 or prompt_logprobs=-1")
        found = np.empty_like(values)
        np.put_along_axis(found, ids, values, axis=1)
        return found

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> CompactLogprobs: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | CompactLogprobs:
        if isinstance(index, slice):
            return CompactLogprobs(self.ids[index], self.logprobs[index], self.ranks[index], self.describe)
        ids, values = self.ids[index].tolist(), self.logprobs[index].tolist()
        ranks = [int(self.ranks[index]), *range(1, len(ids))]
        sampled, *top = map(self._token, ids, values, ranks)
        return PositionLogprobs(sampled, top)

    def __iter__(self) -> Iterator[PositionLogprobs]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _token(self, token_id: int, value: float, rank: int) -> Logprob:
        text, raw = self.describe(token_id)
        return Logprob(token_id=token_id, token=text, logprob=value, token_bytes=raw, rank=rank)


class PromptLogprobs(Sequence[PositionLogprobs | None]):
    """One entry for each token of a prompt: what the model gave it before it was read, and the most probable ones in
    its place. None for the first, which nothing stands before. Kept as numbers, read and printed as CompactLogprobs
    are.

    token_ids: of the whole prompt (T); positions: of all but its first (T - 1).
    """

    def __init__(self, token_ids: Sequence[int], positions: CompactLogprobs):
        self.token_ids = token_ids
        self.positions = positions

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[PositionLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | list[PositionLogprobs | None] | None:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self.positions[place - 1] if place else None

    def __repr__(self) -> str:
        return repr(list(self))

    def first_token(self) -> Logprob:
        """The one without a log probability, which is NaN here."""
        text, raw = self.positions.describe(self.token_ids[0])
        return Logprob(token_id=self.token_ids[0], token=text, logprob=float("nan"), token_bytes=raw)
