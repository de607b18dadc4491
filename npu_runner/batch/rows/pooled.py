"""Reads bodies of /v1/embeddings and /v1/classify and writes their answers: vectors, and the probabilities of classes.

Prompts are raw (`input`, OpenAI's field) or a conversation with images (`messages`, vLLM's). Knows nothing of files, of
tokens or of how the numbers are made.
"""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Tag

from npu_runner.batch.rows.chat import ConversationBody
from npu_runner.batch.rows.endpoint import (
    ONE_TEMPLATE,
    OWN_TOKENS,
    AnswerForm,
    AnswerRow,
    PooledForm,
    Prompts,
    Unserved,
    by_tag,
    items_tag,
    number_of,
    pooled_values,
)
from npu_runner.batch.rows.logprobs_json import opened
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.limits import LIMITS, check_count
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.request.pooling_params import CLASSIFY, LABELS, SOFTMAX, Classes, PoolingParams

_FIELDS_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "mm_processor_kwargs")


class PooledBody(ConversationBody):
    """Prompts to be pooled. None: the row does not set the field."""

    input: Annotated[
        Annotated[str, Tag("<str>")] | Annotated[list[str], Tag("<list of str>")]
        | Annotated[list[int], Tag("<list of int>")] | Annotated[list[list[int]], Tag("<list of list>")],
        by_tag(items_tag, "input_type", "input is text, a list of token ids, or a list of either"),
    ] | None = None

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        super().check_counts(body)
        prompts = body.get("input")
        if isinstance(prompts, list) and not all(type(item) is int for item in prompts):
            check_count("input", "prompts", prompts, LIMITS.max_embedding_inputs)

    @classmethod
    def refuse_unserved(cls, body: dict[str, Any]) -> None:
        has_input, has_messages = (body.get(name) is not None for name in ("input", "messages"))
        if not has_input and not has_messages:
            raise RequestError("input: missing; give it, or messages", "missing_required_parameter", "input")
        if has_input and has_messages:
            raise RequestError("input: there are messages as well; give one of the two", "invalid_value", "input")
        super().refuse_unserved(body)
        for name in _FIELDS_OF_MESSAGES if has_input else ():
            if body.get(name) is not None:
                raise RequestError(f"{name}: belongs to messages; input is used as it is", "invalid_value", name)

    def to_params(self, defaults: Mapping[str, Any], fallback_seed: int) -> PoolingParams:
        return PoolingParams(truncate_prompt_tokens=self.truncate_prompt_tokens)

    @property
    def inputs(self) -> list[Any]:
        """The prompts of `input`."""
        is_list = isinstance(self.input, list) and not isinstance(self.input[0], int)
        return self.input if is_list else [self.input]  # type: ignore[return-value]

    @property
    def places(self) -> tuple[str, ...]:
        """The field of each prompt, where there are several."""
        return tuple(f"input[{number}]" for number in range(len(self.inputs))) if len(self.inputs) > 1 else ()

    @property
    def adds_generation_prompt(self) -> bool | None:
        """vLLM's default here is False: a conversation is pooled, not answered. None: as the processor's default."""
        return bool(self.add_generation_prompt)

    @abstractmethod
    def form(self, processor: ChatProcessor) -> AnswerForm: ...

    def prepare(self, processor: ChatProcessor, media: MediaRules, params: PoolingParams) -> tuple[Prompts, AnswerForm]:
        form = self.form(processor)
        if self.messages is not None:
            prompt = self.conversation(processor, params, self.chat_template_kwargs, media=media,
                                       add_generation_prompt=self.adds_generation_prompt)
            return (prompt,), form
        most = processor.most_prompt_tokens(params)
        prompts = []
        for each, where in zip(self.inputs, self.places or ("input",), strict=True):
            try:
                prompts.append(processor.from_text(each, truncate_prompt_tokens=most))
            except RequestError as error:
                message = error.message.removeprefix("prompt: ")
                raise RequestError(f"{where}: {message}", error.code, where) from error
        return tuple(prompts), form


def numbers(values_W: np.ndarray) -> str:
    """A JSON list of float32 values, in the shortest decimals that are read back as the same: half the size of
    float64's."""
    return "[" + ",".join(values_W.astype(np.float32).astype(str).tolist()) + "]"


# -- vectors -----------------------------------------------------------------------------------------------------------


class EmbeddingBody(PooledBody):
    """The embedding request, as far as it is served. None: the row does not set the field."""

    task: ClassVar[str] = "embed"
    unserved: ClassVar[Mapping[str, Unserved]] = {
        "add_special_tokens": OWN_TOKENS, "chat_template": Unserved(instead=ONE_TEMPLATE),
        "priority": Unserved(0), "softmax": Unserved(), **dict.fromkeys(
            ("normalize", "use_activation"),
            Unserved(True, instead="the checkpoint's modules.json says whether vectors are normalised"))}

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
class EmbeddingForm(PooledForm):
    """A list of vectors. `is_base64`: they are base64 of float32 bytes, little end first, else JSON numbers."""

    item_name: ClassVar[str] = "embedding"
    has_vectors: ClassVar[bool] = True
    is_compared: ClassVar[bool] = False
    has_created: ClassVar[bool] = False

    is_base64: bool = False

    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        vector_D = pooled_values(completion)
        row.write(opened({"object": "embedding", "index": completion.index}, "embedding"))
        row.write(_base64(vector_D) if self.is_base64 else numbers(vector_D))
        row.write("}")

    @classmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        return f"a vector of {len(vector_of(item['embedding']))} numbers"

    @classmethod
    def cells_of(cls, item: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
        return {"vector": vector_of(item["embedding"])}


def vector_of(embedding: Sequence[float] | str) -> np.ndarray:
    """(D,) float32, from either form that a row may ask for: numbers, or base64 of their bytes (little end first).
    Raises ValueError for any other value."""
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
    """vLLM's classification request, as far as it is served. None: the row does not set the field."""

    task: ClassVar[str] = CLASSIFY
    unserved: ClassVar[Mapping[str, Unserved]] = {
        "activation": Unserved(True, instead="use_activation is its present name"),
        "add_special_tokens": OWN_TOKENS, "priority": Unserved(0),
        "softmax": Unserved(True, instead="the checkpoint says what makes probabilities of its logits, which "
                                          "use_activation=false leaves as they are")}

    use_activation: bool | None = None
    labels: list[str] | None = None

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        super().check_counts(body)
        if isinstance(labels := body.get("labels"), list):
            check_count("labels", "labels", labels, LIMITS.max_labels)

    @property
    def requested_task(self) -> str:
        return self.task if self.labels is None else LABELS

    def to_params(self, defaults: Mapping[str, Any], fallback_seed: int) -> PoolingParams:
        return super().to_params(defaults, fallback_seed).replace(labels=self.labels)

    @property
    def adds_generation_prompt(self) -> bool | None:
        """A label stands where an answer would."""
        return super().adds_generation_prompt if self.labels is None else self.add_generation_prompt

    def form(self, processor: ChatProcessor) -> AnswerForm:
        classes = processor.classes if self.labels is None else Classes(labels=tuple(self.labels), activation=SOFTMAX)
        return ClassifyForm(model=self.model, classes=classes, has_logits=self.use_activation is False,
                            places=self.places)


@dataclass(frozen=True, kw_only=True)
class ClassifyForm(PooledForm):
    """The most probable label and all probabilities of each prompt, or its logits with `has_logits`."""

    id_prefix: ClassVar[str] = "classify-"
    item_name: ClassVar[str] = "label"

    classes: Classes
    has_logits: bool

    def compared_text(self, output: RequestOutput) -> str:
        return self.classes.label(pooled_values(output.completions[0]))

    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        logits_W = pooled_values(completion)
        row.write(opened({"index": completion.index, "label": self.classes.label(logits_W)}, "probs"))
        row.write(numbers(logits_W if self.has_logits else self.classes.probabilities(logits_W)))
        row.write(f',"num_classes":{len(logits_W)}}}')

    @classmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        return str(item["label"])

    @classmethod
    def cells_of(cls, item: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
        return {"label": str(item["label"]), "probs": [number_of(value) for value in item["probs"]]}
