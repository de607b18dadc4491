"""Reads bodies of /v1/embeddings and /v1/classify and writes their answers: vectors, and the probabilities of classes.

Their prompts are raw or a conversation, of which numbers are made. `input` is OpenAI's, `messages` vLLM's form for text
and images. Knows nothing of files, of tokens or of how the numbers are made.
"""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Discriminator, Tag

from npu_runner.batch.rows.chat import ONE_TEMPLATE, Messages, check_messages
from npu_runner.batch.rows.endpoint import AnswerForm, AnswerRow, Prompts, RowBody, number_of
from npu_runner.batch.rows.logprobs_json import opened
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.limits import LIMITS, check_count
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.request.pooling_params import CLASSIFY, Classes, PoolingParams

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


# -- vectors -----------------------------------------------------------------------------------------------------------


class EmbeddingBody(PooledBody):
    """The embedding request, as far as it is served. None means: not asked for."""

    task: ClassVar[str] = "embed"
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (), "chat_template": (), "normalize": (True,), "priority": (0,), "softmax": (),
        "use_activation": (True,)}
    instead: ClassVar[Mapping[str, str]] = {
        "chat_template": f"; {ONE_TEMPLATE}",
        "add_special_tokens": "; they are added as the checkpoint's own tokenizer and processor do",
        "normalize": "; the checkpoint's modules.json says whether vectors are normalised",
        "use_activation": "; the checkpoint's modules.json says whether vectors are normalised",
    }

    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None

    @property
    def expected(self) -> str | None:
        """A vector is no text to compare."""
        return None

    def to_params(self, defaults: Mapping[str, Any], fallback_seed: int) -> PoolingParams:
        return PoolingParams(dimensions=self.dimensions, truncate_prompt_tokens=self.truncate_prompt_tokens)

    def form(self, processor: ChatProcessor) -> AnswerForm:
        return EmbeddingForm(model=self.model, is_base64=self.encoding_format == "base64", places=self.places)


@dataclass(frozen=True, kw_only=True)
class EmbeddingForm(AnswerForm):
    """A list of vectors. `is_base64`: of their float32 bytes, little end first; else JSON numbers."""

    object: ClassVar[str] = "list"
    list_name: ClassVar[str] = "data"
    item_name: ClassVar[str] = "embedding"
    has_vectors: ClassVar[bool] = True
    is_compared: ClassVar[bool] = False
    has_created: ClassVar[bool] = False
    has_text: ClassVar[bool] = False

    is_base64: bool = False

    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        assert completion.pooled is not None, "a request for vectors that ended well has them"
        row.write(opened({"object": "embedding", "index": completion.index}, "embedding"))
        row.write(_base64(completion.pooled) if self.is_base64 else numbers(completion.pooled))
        row.write("}")

    @classmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        return f"a vector of {len(vector_of(item['embedding']))} numbers"

    @classmethod
    def cells_of(cls, item: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
        return {"vector": vector_of(item["embedding"])}


def vector_of(embedding: Sequence[float] | str) -> np.ndarray:
    """(D,) float32, of either form that a row may ask for: numbers, or base64 of their bytes (little end first). Raises
    ValueError for any other value."""
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), dtype="<f4")
    vector_D = np.array(embedding)
    if vector_D.ndim != 1 or vector_D.dtype.kind not in "fiu":
        raise ValueError("an embedding is a list of numbers, or base64")
    with np.errstate(over="ignore"):
        return vector_D.astype(np.float32)


def _base64(vector_D: np.ndarray) -> str:
    return f'"{base64.b64encode(vector_D.astype("<f4").tobytes()).decode()}"'


# -- classes -----------------------------------------------------------------------------------------------------------


class ClassifyBody(PooledBody):
    """vLLM's classification request, as far as it is served. None means: not asked for."""

    task: ClassVar[str] = CLASSIFY
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "activation": (True,), "add_special_tokens": (), "priority": (0,), "softmax": (True,)}
    instead: ClassVar[Mapping[str, str]] = {
        "activation": "; use_activation is its present name",
        "add_special_tokens": "; they are added as the checkpoint's own tokenizer and processor do",
        "softmax": "; the checkpoint says what makes probabilities of its logits, which use_activation=false leaves "
                   "as they are",
    }

    use_activation: bool | None = None

    def form(self, processor: ChatProcessor) -> AnswerForm:
        return ClassifyForm(model=self.model, classes=processor.classes, has_logits=self.use_activation is False,
                            places=self.places)


@dataclass(frozen=True, kw_only=True)
class ClassifyForm(AnswerForm):
    """The most probable label and all probabilities of each prompt, or its logits with `has_logits`."""

    id_prefix: ClassVar[str] = "classify-"
    object: ClassVar[str] = "list"
    list_name: ClassVar[str] = "data"
    item_name: ClassVar[str] = "label"
    has_text: ClassVar[bool] = False

    classes: Classes
    has_logits: bool

    def answer_of(self, output: RequestOutput) -> str:
        return self.classes.label(_logits_of(output.completions[0]))

    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        logits_W = _logits_of(completion)
        row.write(opened({"index": completion.index, "label": self.classes.label(logits_W)}, "probs"))
        row.write(numbers(logits_W if self.has_logits else self.classes.probabilities(logits_W)))
        row.write(f',"num_classes":{len(logits_W)}}}')

    @classmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        return str(item["label"])

    @classmethod
    def cells_of(cls, item: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
        return {"label": str(item["label"]), "probs": [number_of(value) for value in item["probs"]]}


def _logits_of(completion: CompletionOutput) -> Any:
    assert completion.pooled is not None, "a request for classes that ended well has logits"
    return completion.pooled
