"""Completions of every form, for hypothesis."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from npu_runner.request.logprobs import Logprob, PositionLogprobs
from npu_runner.request.outputs import CompletionOutput

TOKENS = st.builds(
    Logprob,
    token_id=st.integers(0, 99),
    token=st.text(max_size=3),
    logprob=st.one_of(st.floats(max_value=0), st.just(math.nan)),
    token_bytes=st.binary(max_size=4),
)
POSITIONS = st.builds(PositionLogprobs, sampled=TOKENS, top=st.lists(TOKENS, max_size=2).map(tuple))
COMPLETIONS = st.builds(
    CompletionOutput,
    index=st.integers(0, 3),
    text=st.text(),
    token_ids=st.lists(st.integers(0, 99)),
    finish_reason=st.sampled_from(["stop", "length"]),
    logprobs=st.one_of(st.none(), st.lists(POSITIONS, max_size=3)),
)
