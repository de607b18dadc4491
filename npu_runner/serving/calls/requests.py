"""Makes the requests of one call of `LLM`: each prompt with its params, resolved, and max_tokens where its caller names
none. Knows no service."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Any, TypeVar

from npu_runner.errors import RequestError
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.calls.arguments import AnyParams, no_params
from npu_runner.serving.calls.call_options import Parse
from npu_runner.serving.calls.prompt_server import Request
from npu_runner.serving.workers.prompt_tasks import PromptTask

logger = logging.getLogger(__name__)
_NO_MORE = object()
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


def requests_of(items: Iterable[Any], params: AnyParams, parse: Parse, limit: UnsaidLimit,
                processor: ChatProcessor) -> Iterator[Request]:
    """Each item with its settings, the errors among them as such. Raises RequestError where there are fewer params."""
    wanted = repeat(params) if isinstance(params, (SamplingParams, PoolingParams)) else iter(params)
    last = resolved = None
    for index, item in enumerate(items):
        one: Any = next(wanted, _NO_MORE)
        if one is _NO_MORE:
            raise RequestError(f"{index} sampling_params for more prompts; pass one, or one for each")
        try:
            if not isinstance(one, (SamplingParams, PoolingParams)):
                raise no_params(one)
            if one is not last or resolved is None:
                last, resolved = one, processor.resolve_params(limit.bounded(one))
            prompt: PromptTask | PromptInputs | RequestError = parse(item)
            most = processor.most_prompt_tokens(resolved)
            if most is not None and isinstance(prompt, PromptTask):
                prompt = replace(prompt, truncate_prompt_tokens=most)
        except RequestError as error:
            prompt = error
        yield Request(resolved or SamplingParams(), prompt)
