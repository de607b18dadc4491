"""What callers of `LLM` may write: one prompt or many, params of each, and what a wrong one is called. Knows no
service.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from npu_runner.errors import RequestError
from npu_runner.prompts.prompt_forms import plain_number
from npu_runner.request.limits import shown
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs


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


def with_index(index: int, error: RequestError) -> RequestError:
    """`error`, with the number of the prompt in its call."""
    return RequestError(f"prompt {index}: {error.message}", error.code, error.param)
