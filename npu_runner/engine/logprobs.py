"""Collects one completion's log probabilities while it grows, as bytes. Knows nothing of requests or text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from npu_runner.outputs import CompactLogprobs
from npu_runner.runner.base import StepLogprobs


class LogprobsRecord:
    """`num_top` most probable tokens beside each sampled one: 4 + 8 * num_top bytes a token."""

    def __init__(self, num_top: int):
        self._num_top = num_top
        self._packed = bytearray()

    def append(self, step: StepLogprobs, row: int) -> None:
        self._packed += step.packed(row, self._num_top)

    def finish(self, token_ids: Sequence[int], describe: Callable[[int], tuple[str, bytes]]) -> CompactLogprobs:
        """All of it, with the sampled tokens. describe: (text, bytes) of a token id."""
        records = np.frombuffer(self._packed, dtype=np.int32).reshape(-1, 1 + 2 * self._num_top)
        ids = np.empty((len(records), 1 + self._num_top), dtype=np.int32)
        ids[:, 0] = token_ids[: len(records)]
        ids[:, 1:] = records[:, 1: 1 + self._num_top]
        floats = np.empty((len(records), 1 + self._num_top), dtype=np.float32)
        floats[:, 0] = records[:, 0].view(np.float32)
        floats[:, 1:] = records[:, 1 + self._num_top:].view(np.float32)
        self._packed = bytearray()
        return CompactLogprobs(ids, floats, describe)
