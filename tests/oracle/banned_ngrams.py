"""The definition of a ban on repeated n-grams."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Ban:
    """The definition. `input_ids`: (1, T), the output so far."""

    def __init__(self, size: int, window: int, exempt_ids: Sequence[int]):
        self.size, self.window, self.exempt_ids = size, window, exempt_ids

    def banned(self, output: list[int]) -> set[int]:
        recent = output[-self.window :]
        ngrams = [recent[start : start + self.size] for start in range(len(recent) - self.size + 1)]
        behind = {ngram[-1] for ngram in ngrams if ngram[:-1] == output[len(output) - self.size + 1 :]}
        return behind - set(self.exempt_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token in self.banned(input_ids[0].tolist()):
            scores[0, token] = -torch.inf
        return scores
