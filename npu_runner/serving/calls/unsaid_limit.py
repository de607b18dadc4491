"""How many tokens a request gets where its caller says nothing of that. Knows neither prompts nor engines."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from npu_runner.request.outputs import RequestOutput
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
_Params = TypeVar("_Params", SamplingParams, PoolingParams, SamplingParams | PoolingParams)


@functools.cache
def _say_once() -> None:
    """Cached, so that a process says it once."""
    logger.warning("an answer was cut off: its SamplingParams name no max_tokens, and the default was reached "
                   "(LLM.get_default_sampling_params()); finish_reason is \"length\" then. This is said once.")


class UnsaidLimit:
    """max_tokens of those of a call's requests that have none. `otherwise`: where the checkpoint's `defaults`, fields
    of SamplingParams, have none either; None: what the model's length leaves."""

    def __init__(self, defaults: Mapping[str, Any], otherwise: int | None = None):
        self._most: int | None = defaults.get("max_tokens", otherwise)
        self._given: set[int] = set()

    def bounded(self, params: _Params) -> _Params:
        """With a limit, where there is one; min_tokens raises it, as in rows."""
        if not isinstance(params, SamplingParams) or params.max_tokens is not None or self._most is None:
            return params
        most = max(self._most, params.min_tokens)
        self._given.add(most)
        return params.replace(max_tokens=most)

    def look_at(self, output: RequestOutput) -> None:
        """Log the first answer of this process that such a limit has cut off."""
        for completion in output.completions:
            if completion.is_cut_off and len(completion.token_ids) in self._given:
                _say_once()
