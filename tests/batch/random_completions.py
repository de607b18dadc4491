"""Completions of every form, for hypothesis."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from npu_runner.request.logprobs import CompactLogprobs
from npu_runner.request.outputs import CompletionOutput


def compact_logprobs(num_top: int, tokens: list[tuple[str, bytes]], values: list[float]) -> CompactLogprobs:
    width = 1 + num_top
    floats = np.array(values[: len(values) // width * width], dtype=np.float32).reshape(-1, width)
    ids = np.arange(floats.size, dtype=np.int32).reshape(floats.shape)
    ranks = np.ones(len(ids), dtype=np.int32)
    return CompactLogprobs(ids, floats, ranks, lambda token_id: tokens[token_id % len(tokens)])


LOGPROBS = st.builds(
    compact_logprobs,
    st.integers(0, 2),
    st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=4)), min_size=1, max_size=4),
    st.lists(st.one_of(st.floats(max_value=0, width=32), st.just(math.nan)), max_size=9),
)
COMPLETIONS = st.builds(
    CompletionOutput,
    index=st.integers(0, 3),
    text=st.text(),
    token_ids=st.lists(st.integers(0, 99)),
    finish_reason=st.sampled_from(["stop", "length"]),
    logprobs=st.one_of(st.none(), LOGPROBS),
)
