"""Collects log probabilities, of a completion while it grows and of a prompt chunk by chunk, as numbers.

Knows nothing of requests or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from npu_runner.request.outputs import CompactLogprobs, PromptLogprobs
from npu_runner.runner.base import StepLogprobs


class LogprobsRecord:
    """`num_top` most probable tokens beside each sampled one: 4 + 8 * num_top bytes a token."""

    def __init__(self, num_top: int):
        self._num_top = num_top
        self._packed = bytearray()

    @property
    def num_tokens(self) -> int:
        return len(self._packed) // self._token_bytes

    @property
    def _token_bytes(self) -> int:
        return 4 * (1 + 2 * self._num_top)

    def cut(self, num_tokens: int) -> None:
        """Forget those behind the first `num_tokens`."""
        del self._packed[num_tokens * self._token_bytes :]

    def append(self, step: StepLogprobs, row: int) -> None:
        self._packed += step.packed(row, self._num_top)

    def finish(self, token_ids: Sequence[int], describe: Callable[[int], tuple[str, bytes]]) -> CompactLogprobs:
        """All of it, with the sampled tokens. describe: (text, bytes) of a token id."""
        records = np.frombuffer(self._packed, dtype=np.int32).reshape(-1, 1 + 2 * self._num_top)
        self._packed = bytearray()
        return _compact(token_ids[: len(records)], records[:, 0], records[:, 1:], describe)


class PromptLogprobsRecord:
    """Those of the tokens of a prompt but its first, with `num_top` most probable ones beside each."""

    def __init__(self, token_ids: Sequence[int], num_top: int):
        self._token_ids = token_ids
        self._num_top = num_top
        self._records = np.zeros((max(0, len(token_ids) - 1), 2 + 2 * num_top), dtype=np.int32)
        self._num_known = 0

    @property
    def is_whole(self) -> bool:
        return self._num_known == len(self._records)

    def put(self, place: int, records: np.ndarray) -> None:
        """Those of the tokens from `place` on. A prompt that begins anew brings them again, from its start."""
        self._records[place - 1 : place - 1 + len(records)] = records
        self._num_known = place - 1 + len(records)

    def finish(self, describe: Callable[[int], tuple[str, bytes]]) -> PromptLogprobs:
        """All of it. describe: (text, bytes) of a token id."""
        records = self._records
        positions = _compact(self._token_ids[1:], records[:, 0], records[:, 2:], describe)
        return PromptLogprobs(self._token_ids, records[:, 1].copy(), positions)


def _compact(token_ids: Sequence[int], values: np.ndarray, top: np.ndarray,
             describe: Callable[[int], tuple[str, bytes]]) -> CompactLogprobs:
    """`values`: bits of the tokens' own log probabilities; `top`: the most probable ids, then the bits of theirs."""
    num_top = top.shape[1] // 2
    ids = np.column_stack([np.asarray(token_ids, dtype=np.int32), top[:, :num_top]])
    return CompactLogprobs(ids, np.column_stack([values, top[:, num_top:]]).view(np.float32), describe)
