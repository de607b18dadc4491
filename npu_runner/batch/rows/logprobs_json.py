"""Writes log probabilities as OpenAI's JSON. Knows nothing of rows.

A row may hold a quarter of a million of them. They go from arrays to text without an object for each, and the text of
a token is made once for many places.
"""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from npu_runner.request.logprobs import CompactLogprobs, Describe, PositionLogprobs, PromptLogprobs

# OpenAI sends it for minus infinity, which JSON cannot spell.
LOWEST_LOGPROB = -9999.0
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_CACHED_TOKENS = 1 << 14  # of some 400 bytes each

_AroundValue = Callable[[int], tuple[str, str]]


def to_json(value: Any) -> str:
    """The JSON of all rows: only necessary escapes, no spaces."""
    return _ENCODER.encode(value)


def opened(members: dict[str, Any], name: str) -> str:
    """The JSON of an object up to the value of its next member, `name`."""
    return f"{to_json(members).removesuffix('}')},{to_json(name)}:"


def encoded(text: str) -> bytes:
    """UTF-8. A message may quote half a surrogate pair out of a row that was refused for it: it becomes "?"."""
    return text.encode("utf-8", errors="replace")


class LogprobsJson:
    """The log probabilities of one row's completions. The text of a token is made once for all of them."""

    def __init__(self) -> None:
        self._around_value: dict[Describe, _AroundValue] = {}

    def positions(self, logprobs: Sequence[PositionLogprobs]) -> Iterator[str]:
        """The JSON of one position after the other."""
        assert isinstance(logprobs, CompactLogprobs), "an engine keeps log probabilities as numbers"
        around_value = self._around_value.get(logprobs.describe)
        if around_value is None:
            around_value = self._around_value[logprobs.describe] = _around_value(logprobs.describe)
        values = logprobs.logprobs.astype(np.float64)
        values = np.where(np.isfinite(values), values, LOWEST_LOGPROB).clip(min=LOWEST_LOGPROB)
        return (
            _position(ids.tolist(), floats.tolist(), around_value)
            for ids, floats in zip(logprobs.ids, values, strict=True)
        )


def write_prompt_logprobs(logprobs: PromptLogprobs, row: io.BytesIO) -> None:
    """vLLM's member: null, then for each further token of the prompt an object by token ids, its own among them."""
    row.write(b'"prompt_logprobs":[')
    for number, position in enumerate(logprobs):
        value = None if position is None else _by_token_id(position)
        row.write(encoded(("," if number else "") + to_json(value)))
    row.write(b"]")


def _by_token_id(position: PositionLogprobs) -> dict[str, dict[str, Any]]:
    ranked = [(position.token, position.rank), *((token, 1 + place) for place, token in enumerate(position.top))]
    return {
        str(token.token_id): {"logprob": finite(token.logprob), "rank": rank, "decoded_token": token.token}
        for token, rank in reversed(ranked)  # the prompt's own rank counts where it is one of the most probable
    }


def finite(logprob: float) -> float:
    """The nearest number that JSON can spell."""
    return logprob if LOWEST_LOGPROB <= logprob < math.inf else LOWEST_LOGPROB


def _position(ids: list[int], values: list[float], around_value: _AroundValue) -> str:
    """The sampled token comes first."""
    sampled, *top = [
        f"{before}{value!r}{behind}" for (before, behind), value in zip(map(around_value, ids), values, strict=True)
    ]
    return sampled + ',"top_logprobs":[' + ",".join([token + "}" for token in top]) + "]}"


def _around_value(describe: Describe) -> _AroundValue:
    """For a token id: the JSON of a token before its log probability and behind it, up to the closing brace."""

    @functools.lru_cache(maxsize=_CACHED_TOKENS)
    def around_value(token_id: int) -> tuple[str, str]:
        token, token_bytes = describe(token_id)
        return f'{{"token":{to_json(token)},"logprob":', f',"bytes":[{",".join(map(str, token_bytes))}]'

    return around_value
