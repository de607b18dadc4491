"""Reads bodies of /v1/embeddings and writes their answers: vectors of raw prompts or of a conversation. No files here.

`input` is OpenAI's, `messages` vLLM's form for text and images. Knows nothing of tokens or of how a vector is made.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Discriminator, Tag

from npu_runner.batch.rows.chat import ONE_TEMPLATE, Message, check_messages, refuse_messages
from npu_runner.batch.rows.endpoint import AnswerForm, AnswerRow, Prompts, RowBody
from npu_runner.batch.rows.logprobs_json import opened
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules, resolve_media
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.limits import LIMITS, check_count
from npu_runner.request.outputs import CompletionOutput
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


class EmbeddingBody(RowBody):
    """The embedding request, as far as it is served. None means: not asked for."""

    task: ClassVar[str] = "embed"
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (), "chat_template": (), "normalize": (True,), "priority": (0,), "softmax": (),
        "use_activation": (True,),
    }  # fmt: skip
    instead: ClassVar[Mapping[str, str]] = {
        "chat_template": f"; {ONE_TEMPLATE}",
        "add_special_tokens": "; they are added as the checkpoint's own tokenizer and processor do",
        "normalize": "; the checkpoint's modules.json says whether vectors are normalised",
        "use_activation": "; the checkpoint's modules.json says whether vectors are normalised",
    }

    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[str], Tag("<texts>")] | Annotated[list[int], Tag("<ids>")]
        | Annotated[list[list[int]], Tag("<lists>")],
        Discriminator(
            _tag_of_input,
            custom_error_type="input_type",
            custom_error_message="input is text, a list of token ids, or a list of either",
        ),
    ] | None = None  # fmt: skip
    messages: list[Message] | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        super().check_counts(body)
        check_messages(body)
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
        refuse_messages(body)
        for name in _OF_MESSAGES if has_input else ():
            if body.get(name) is not None:
                raise RequestError(f"{name}: belongs to messages; input is taken as it is", "invalid_value", name)

    @property
    def expected(self) -> str | None:
        """A vector is no text to compare."""
        return None

    def to_params(self, defaults: Mapping[str, Any], fallback_seed: int) -> PoolingParams:
        return PoolingParams(dimensions=self.dimensions, truncate_prompt_tokens=self.truncate_prompt_tokens)

    def prepare(
        self, processor: ChatProcessor, media: MediaRules, params: PoolingParams
    ) -> tuple[Prompts, AnswerForm]:
        count = len(self.input) if isinstance(self.input, list) and not isinstance(self.input[0], int) else 0
        form = EmbeddingForm(model=self.model, is_base64=self.encoding_format == "base64",
                             places=tuple(f"input[{number}]" for number in range(count if count > 1 else 0)))
        most = processor.most_prompt_tokens(params)
        if self.messages is not None:
            conversation = resolve_media([message.model_dump(exclude_none=True) for message in self.messages], media)
            prompt = processor(
                conversation, self.chat_template_kwargs, truncate_prompt_tokens=most,
                # vLLM's default here: a conversation is looked at, not answered.
                add_generation_prompt=bool(self.add_generation_prompt),
                continue_final_message=bool(self.continue_final_message),
                mm_processor_kwargs=self.mm_processor_kwargs,
            )  # fmt: skip
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


@dataclass(frozen=True, kw_only=True)
class EmbeddingForm(AnswerForm):
    """A list of vectors. `is_base64`: of their float32 bytes, little end first; else JSON numbers."""

    object: ClassVar[str] = "list"
    list_name: ClassVar[str] = "data"
    has_created: ClassVar[bool] = False
    has_text: ClassVar[bool] = False

    is_base64: bool = False

    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        assert completion.pooled is not None, "a request for vectors that ended well has them"
        row.write(opened({"object": "embedding", "index": completion.index}, "embedding"))
        row.write(_base64(completion.pooled) if self.is_base64 else _numbers(completion.pooled))
        row.write("}")


def _base64(vector_D: np.ndarray) -> str:
    return f'"{base64.b64encode(vector_D.astype("<f4").tobytes()).decode()}"'


def _numbers(vector_D: np.ndarray) -> str:
    """The shortest decimals that are read back as the same float32: half of what those of a float64 would take."""
    return "[" + ",".join(vector_D.astype(np.float32).astype(str).tolist()) + "]"
