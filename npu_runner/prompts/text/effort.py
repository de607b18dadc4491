"""`reasoning_effort`, OpenAI's word for what some chat templates read beside a conversation. Knows no template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from npu_runner.errors import RequestError
from npu_runner.request.limits import shown

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_NAME = "reasoning_effort"


def kwargs_with_effort(
    kwargs: Mapping[str, Any] | None, effort: str | None, template_reads: Callable[[str], bool]
) -> Mapping[str, Any] | None:
    """chat_template_kwargs that say it; `kwargs` themselves where nothing is asked.

    Raises RequestError for no effort of OpenAI's, for one that the template does not read, and for two.
    """
    if effort is None:
        return kwargs
    if effort not in get_args(Effort):
        message = f"{_NAME}: {shown(effort)} is not one of {', '.join(get_args(Effort))}"
        raise RequestError(message, "invalid_value", _NAME)
    if not template_reads(_NAME):
        message = (f"{_NAME}: {effort!r} would do nothing, the model's chat template reads none; what it does read "
                   "goes into chat_template_kwargs")
        raise RequestError(message, "unsupported_parameter", _NAME)
    if (kwargs or {}).get(_NAME, effort) != effort:
        message = f"{_NAME}: {effort!r}, and another one stands in chat_template_kwargs; give one of them"
        raise RequestError(message, "invalid_value", _NAME)
    return {**(kwargs or {}), _NAME: effort}
