"""What callers of `LLM` may write: one prompt or many, params of each, and what a wrong one is called; and the requests
that are made of it. Knows no service.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import islice, repeat
from typing import Any, TypeVar

from npu_runner.errors import RequestError
from npu_runner.llm.call_options import Parse
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.prompt_forms import plain_number
from npu_runner.prompts.tasks import MadeTask, PromptTask
from npu_runner.request.limits import shown
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
_NO_MORE = object()
_Params = TypeVar("_Params", SamplingParams, PoolingParams, SamplingParams | PoolingParams)
AnyParams = SamplingParams | PoolingParams | Iterable[SamplingParams | PoolingParams]
"""Of all prompts of a call, or one of each."""


def is_one_prompt(prompts: Any) -> bool:
    """A list is a list of prompts, unless it is one prompt's token ids."""
    num_dims = getattr(prompts, "ndim", None)  # an array's
    if isinstance(prompts, (str, bytes, Mapping, PromptInputs)) or num_dims == 0:
        return True
    if not isinstance(prompts, Sequence) and num_dims is None:
        return False
    return isinstance(plain_number(next(iter(prompts), None)), int)


def is_one_conversation(conversations: Any) -> bool:
    """A list of messages is one, a list of lists several."""
    if isinstance(conversations, (str, bytes, Mapping)):
        return True  # which is said to be none
    return isinstance(conversations, Sequence) and len(conversations) > 0 and isinstance(conversations[0], Mapping)


def no_params(given: Any) -> RequestError:
    """The error of what stands where SamplingParams or PoolingParams should."""
    return RequestError(
        f"sampling_params: {type(given).__name__} {shown(given)} is not SamplingParams (for embed: PoolingParams), nor "
        "a list of them; write SamplingParams(max_tokens=3), or SamplingParams(**fields)", "invalid_type",
        "sampling_params")


def with_task(given: PoolingParams | Iterable[PoolingParams] | None, task: str | None) -> PoolingParams | Iterable[Any]:
    """`given`, for `task`. What is no PoolingParams stays what it is, and is refused where it is read."""
    if given is None:
        return PoolingParams(task=task)

    def of(one: Any) -> Any:
        return one.replace(task=task) if isinstance(one, PoolingParams) else one

    if isinstance(given, PoolingParams) or not isinstance(given, Iterable):
        return of(given)
    return list(map(of, given)) if isinstance(given, Sequence) else map(of, given)


def params_of(given: Any, default: SamplingParams, count: int | None) -> AnyParams:
    """The params of a call with `count` prompts, where that is known: one for all, or one for each. Raises
    RequestError for what is none, and for another number of them."""
    if given is None:
        return default
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, (SamplingParams, PoolingParams, Iterable)):
        raise no_params(given)
    if count is not None and isinstance(given, Sized) and len(given) != count:
        raise RequestError(f"{len(given)} sampling_params for {count} prompts; pass one, or one for each")
    if count is None or isinstance(given, (SamplingParams, PoolingParams, Sequence)):
        return given
    return list(islice(given, count))  # an iterator can be read only once


def with_index(index: int, error: RequestError) -> RequestError:
    """`error`, with the number of the prompt in its call."""
    return RequestError(f"prompt {index}: {error.message}", error.code, error.param)


# -- requests of a call ------------------------------------------------------------------------------------------------


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
        """With a limit, where there is one."""
        if not isinstance(params, SamplingParams) or params.max_tokens is not None or self._most is None:
            return params
        limited = params.with_limit(self._most)
        self._given.add(limited.max_tokens or 0)
        return limited

    def look_at(self, output: RequestOutput) -> None:
        """Log the first answer of this process that such a limit has cut off."""
        for completion in output.completions:
            if completion.is_cut_off and len(completion.token_ids) in self._given:
                _say_once()


def tasks_of(items: Iterable[Any], params: AnyParams, parse: Parse, limit: UnsaidLimit,
             processor: ChatProcessor) -> Iterator[PromptTask]:
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
            processor.most_prompt_tokens(resolved)  # raises for more than the model takes
            yield replace(parse(item), params=resolved)
        except RequestError as error:
            yield MadeTask(made=error, params=resolved or SamplingParams())
