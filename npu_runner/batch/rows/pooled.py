"""What bodies have in common whose prompts are pooled: raw prompts or a conversation, of which a few numbers are made.

`input` is OpenAI's, `messages` vLLM's form for text and images. Knows no endpoint by name, nothing of tokens or of how
the numbers are made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Discriminator, Tag

from npu_runner.batch.rows.chat import Messages, check_messages
from npu_runner.batch.rows.endpoint import AnswerForm, Prompts, RowBody
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.limits import LIMITS, check_count
from npu_runner.request.pooling_params import PoolingParams

_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs",
                "mm_processor_kwargs")


def _tag_of_input(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list) or not value:
        return None
    kinds = {type(item) for item in value}
    return {str: "<texts>", int: "<ids>", list: "<lists>"}.get(kinds.pop()) if len(kinds) == 1 else None


class PooledBody(RowBody):
    """Prompts to be pooled. None means: not asked for."""

    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[str], Tag("<texts>")] | Annotated[list[int], Tag("<ids>")]
        | Annotated[list[list[int]], Tag("<lists>")],
        Discriminator(
            _tag_of_input, custom_error_type="input_type",
            custom_error_message="input is text, a list of token ids, or a list of either"),
    ] | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        super().check_counts(body)
        given = body.get("input")
        if isinstance(given, list) and not all(type(item) is int for item in given):
            check_count("input", "prompts", given, LIMITS.max_embedding_inputs)

    @classmethod
    def refuse_unserved(cls, body: dict[str, Any]) -> None:
        super().refuse_unserved(body)
        has_input, has_messages = (body.get(name) is not None for name in ("input", "messages"))
        if not has_input and not has_messages:
            raise RequestError("input: missing; give it, or messages", "missing_required_parameter", "input")
        if has_input and has_messages:
            raise RequestError("input: there are messages as well; give one of the two", "invalid_value", "input")
        check_messages(body)
        for name in _OF_MESSAGES if has_input else ():
            if body.get(name) is not None:
                raise RequestError(f"{name}: belongs to messages; input is taken as it is", "invalid_value", name)

    def to_params(self, defaults: Mapping[str, Any], fallback_seed: int) -> PoolingParams:
        return PoolingParams(truncate_prompt_tokens=self.truncate_prompt_tokens)

    @property
    def places(self) -> tuple[str, ...]:
        """Of several prompts, the field that each stands in; () of one."""
        count = len(self.input) if isinstance(self.input, list) and not isinstance(self.input[0], int) else 0
        return tuple(f"input[{number}]" for number in range(count if count > 1 else 0))

    @abstractmethod
    def form(self, processor: ChatProcessor) -> AnswerForm:
        """How the row's answer is to be written."""

    def prepare(self, processor: ChatProcessor, media: MediaRules, params: PoolingParams) -> tuple[Prompts, AnswerForm]:
        form = self.form(processor)
        most = processor.most_prompt_tokens(params)
        if self.messages is not None:
            messages: Any = self.messages  # as JSON
            prompt = processor(
                messages, self.chat_template_kwargs, media=media, truncate_prompt_tokens=most,
                # vLLM's default here: a conversation is looked at, not answered.
                add_generation_prompt=bool(self.add_generation_prompt),
                continue_final_message=bool(self.continue_final_message),
                mm_processor_kwargs=self.mm_processor_kwargs,
            )
            return (prompt,), form
        return tuple(self._of_inputs(processor, most)), form

    def _of_inputs(self, processor: ChatProcessor, most: int | None) -> list[Any]:
        given: Any = self.input
        inputs = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        prompts = []
        for number, each in enumerate(inputs):
            try:
                prompts.append(processor.from_text(each, truncate_prompt_tokens=most))
            except RequestError as error:
                where = f"input[{number}]" if len(inputs) > 1 else "input"
                message = error.message.removeprefix("prompt: ")
                raise RequestError(f"{where}: {message}", error.code, where) from error
        return prompts


def numbers(values_W: np.ndarray) -> str:
    """A JSON list of float32 values, in the shortest decimals that are read back as the same: half of what those of
    float64 would take."""
    return "[" + ",".join(values_W.astype(np.float32).astype(str).tolist()) + "]"
