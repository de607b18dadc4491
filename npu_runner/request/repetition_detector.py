"""Follows one answer token by token until it repeats itself. Knows no model and no text.

It runs on the host. Its work for a token is one pass over `max_pattern_size` integers, whatever the answer is.
"""

from __future__ import annotations

import numpy as np

from npu_runner.request.repetition_detection import RepetitionDetectionParams

_NEVER = 1 << 40  # copies that no answer has; a larger number would not fit into 64 bits


class RepetitionDetector:
    """Scans one answer, token by token, with `params` that are on.

    Each pattern size has a run: the number of last tokens that equal the token `size` places before them. The answer is
    a repetition when a run covers all copies of its pattern but the first.
    """

    def __init__(self, params: RepetitionDetectionParams):
        least, most = max(1, params.min_pattern_size), params.max_pattern_size
        self._first = least - 1
        self._recent = np.full(most, -1, dtype=np.int64)  # the newest token first; -1 equals no token
        self._runs = np.zeros(most - self._first, dtype=np.int64)
        self._needed = np.arange(least, most + 1) * min(params.min_count - 1, _NEVER)

    def append(self, token: int) -> bool:
        """Add the next token. Returns whether the answer is a repetition now."""
        self._runs += 1
        self._runs *= self._recent[self._first :] == token
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token
        return bool((self._runs >= self._needed).any())
