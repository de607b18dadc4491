"""Makes the requests of one call of `LLM`: each prompt with its params, resolved. Knows no service."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

from npu_runner.errors import RequestError
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.calls.arguments import AnyParams, no_params
from npu_runner.serving.calls.call_options import Parse
from npu_runner.serving.calls.prompt_server import Request
from npu_runner.serving.calls.unsaid_limit import UnsaidLimit
from npu_runner.serving.workers.prompt_tasks import PromptTask

_NO_MORE = object()


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
