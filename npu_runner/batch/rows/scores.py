"""Reads bodies of /v1/score and /v1/rerank and writes their answers, as vLLM has them. A row is many prompts, one for
each document, that start with the same query.

Knows nothing of files, tokens, templates or of how a score is made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Field, Tag

from npu_runner.batch.rows.chat import Part
from npu_runner.batch.rows.endpoint import (
    AS_JSON,
    OWN_TOKENS,
    AnswerForm,
    AnswerRow,
    PooledForm,
    Prompts,
    RowBody,
    Strict,
    Unserved,
    by_tag,
    number_of,
    pooled_values,
    type_tag,
)
from npu_runner.batch.rows.logprobs_json import to_json
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import Addresses, MediaRules
from npu_runner.prompts.pair_prompts import parse_side
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.vision_prompts import Known
from npu_runner.request.limits import LIMITS, check_count
from npu_runner.request.outputs import CompletionOutput, sigmoid_score
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs

_PAIRS = (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items"))
"""The names of the two sides of /v1/score. A row has one pair of them."""
_TOKEN_BYTES = 8
_DATA_SHOWN = "data:..."
"""It stands for a data: URL in an answer that repeats a document."""


class Parts(Strict):
    """Text, images and videos of a query or a document."""

    content: list[Part] = Field(min_length=1)


Input = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[Parts, Tag("<dict>")],
    by_tag(type_tag, "input_type", 'text or an object {"content": parts} is needed'),
    AS_JSON,
]
Inputs = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[Parts, Tag("<dict>")] | Annotated[list[Input], Tag("<list>")],
    by_tag(lambda value: None if value == [] else type_tag(value), "inputs_type",
           'text, an object {"content": parts} or a list of these is needed'),
    AS_JSON,
]


class PairBody(RowBody):
    """The fields of both endpoints. None: the row does not set the field."""

    task: ClassVar[str] = "score"
    sides: ClassVar[tuple[str, ...]]
    """The fields that hold queries and documents."""
    unserved: ClassVar[Mapping[str, Unserved]] = {
        "add_special_tokens": OWN_TOKENS, "cache_salt": Unserved(), "max_tokens_per_query": Unserved(0),
        "max_tokens_per_doc": Unserved(0, instead="truncate_prompt_tokens leaves out the end of a document"),
        "padding": Unserved("do_not_pad"), "priority": Unserved(0), "softmax": Unserved(),
        "truncation_side": Unserved("right")}

    instruction: str | None = None
    raw: bool | None = None
    use_activation: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        super().check_counts(body)
        for name in cls.sides:
            inputs = _as_list(body.get(name))
            check_count(name, "entries", inputs, LIMITS.max_documents)
            contents = [each.get("content") for each in inputs if isinstance(each, dict)]
            num_parts = sum(len(content) for content in contents if isinstance(content, list))
            check_count(name, "parts", num_parts, LIMITS.max_parts)

    @property
    def expected(self) -> str | None:
        """A score is no text to compare."""
        return None

    @property
    def is_raw(self) -> bool:
        """Whether the differences of logits are asked for. Raises RequestError for two opinions."""
        if self.raw is not None and self.raw is self.use_activation:
            raise RequestError(f"use_activation: {to_json(self.use_activation)} says the opposite of raw; give one of "
                               "them", "invalid_value", "use_activation")
        return bool(self.raw) or self.use_activation is False

    def to_params(self, defaults: Mapping[str, Any], fallback_seed: int) -> PoolingParams:
        return PoolingParams(truncate_prompt_tokens=self.truncate_prompt_tokens, use_activation=not self.is_raw)

    def prompts(self, processor: ChatProcessor, media: MediaRules, params: PoolingParams, queries: list[Located],
                documents: list[Located]) -> tuple[PromptInputs, ...]:
        """One prompt for each document; one query is for all of them. Raises RequestError naming the field."""
        assert processor.pairs is not None, "the task was checked before"
        addresses = Addresses(media)
        parsed = [parse_side(side.value, side.where, processor.media_limits, addresses)
                  for side in (*queries, *documents)]
        addresses.check_sizes(documents[-1].where.partition("[")[0])
        most = processor.most_prompt_tokens(params)
        known: Known = {}
        prompts: list[PromptInputs] = []
        num_bytes = 0
        for number, (_, where) in enumerate(documents):
            num_known = len(known)
            query, document = parsed[number if len(queries) > 1 else 0], parsed[len(queries) + number]
            try:
                prompt = processor.pairs(
                    query, document, instruction=self.instruction, chat_template_kwargs=self.chat_template_kwargs,
                    truncate_prompt_tokens=most, mm_processor_kwargs=self.mm_processor_kwargs, known=known)
            except RequestError as error:
                if error.param not in (None, "messages", "truncate_prompt_tokens"):
                    raise  # it names a field of the row already
                raise RequestError(f"{where}: {error.message}", error.code, where) from error
            prompts.append(prompt)
            new = list(known.values())[num_known:]
            num_bytes += _TOKEN_BYTES * len(prompt.token_ids)
            num_bytes += sum(item.image.num_bytes for items in new for item in items)
            check_count(where, "bytes with those before it, once they are prepared,", num_bytes,
                        LIMITS.max_pairs_bytes)
        return tuple(prompts)


class Located(NamedTuple):
    """A query or a document, as JSON, and the field that it stands in."""

    value: Any
    where: str


def _located(value: Any, name: str) -> list[Located]:
    if not isinstance(value, list):
        return [Located(value, name)]
    return [Located(each, f"{name}[{number}]") for number, each in enumerate(value)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def sides_of(body: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """The queries and documents of any body, as messages whose role is the field; `most` at most, for people to read.
    """
    names = dict.fromkeys((*RerankBody.sides, *ScoreBody.sides))
    sides = [(name, each) for name in names if body.get(name) is not None for each in _as_list(body[name])]
    return [{"role": name, "content": each.get("content") if isinstance(each, dict) else each}
            for name, each in sides[:most]]


class ScoreBody(PairBody):
    """The score request, as far as it is served. None: the row does not set the field."""

    sides: ClassVar[tuple[str, ...]] = tuple(dict.fromkeys(name for pair in _PAIRS for name in pair))

    text_1: Inputs | None = None
    text_2: Inputs | None = None
    queries: Inputs | None = None
    documents: Inputs | None = None
    data_1: Inputs | None = None
    data_2: Inputs | None = None
    items: Inputs | None = None

    @classmethod
    def refuse_unserved(cls, body: dict[str, Any]) -> None:
        super().refuse_unserved(body)
        names = {name for name in cls.sides if body.get(name) is not None}
        if not any(names == set(pair) for pair in _PAIRS):
            near = next((pair for pair in _PAIRS if names <= set(pair)), None)
            missing = next((name for name in near or () if name not in names), None)
            if missing is not None:
                raise RequestError(f"{missing}: missing; a row has a query and the documents to compare it with",
                                   "missing_required_parameter", missing)
            wrong = sorted(names)[-1]
            raise RequestError(f"{wrong}: does not go with {', '.join(sorted(names - {wrong}))}; give one of "
                               + "; ".join(" and ".join(pair) for pair in _PAIRS), "invalid_value", wrong)

    def prepare(self, processor: ChatProcessor, media: MediaRules, params: PoolingParams) -> tuple[Prompts, AnswerForm]:
        first, second = next(pair for pair in _PAIRS if all(getattr(self, name) is not None for name in pair))
        queries, documents = _located(getattr(self, first), first), _located(getattr(self, second), second)
        if len(queries) not in (1, len(documents)):
            raise RequestError(f"{first}: {len(queries)} for {len(documents)} {second}; give one, or one for each",
                               "invalid_value", first)
        prompts = self.prompts(processor, media, params, queries, documents)
        return prompts, ScoreForm(model=self.model, is_raw=self.is_raw, places=_places(documents))


class RerankBody(PairBody):
    """The rerank request, as far as it is served. None means: not asked for."""

    sides: ClassVar[tuple[str, ...]] = ("query", "documents")

    query: Input
    documents: Inputs
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None

    def prepare(self, processor: ChatProcessor, media: MediaRules, params: PoolingParams) -> tuple[Prompts, AnswerForm]:
        documents = _located(self.documents, "documents")
        prompts = self.prompts(processor, media, params, [Located(self.query, "query")], documents)
        repeated = None if self.return_documents is False else tuple(_repeated(side.value) for side in documents)
        return prompts, RerankForm(model=self.model, is_raw=self.is_raw, places=_places(documents),
                                   top_n=self.top_n or None, documents=repeated)


def _places(documents: Sequence[Located]) -> tuple[str, ...]:
    return tuple(side.where for side in documents) if len(documents) > 1 else ()


def _repeated(document: Any) -> dict[str, Any]:
    """A document as the answer has it, without the bytes of its images."""
    if isinstance(document, str):
        return {"text": document, "multi_modal": None}
    parts: list[dict[str, Any]] = Parts.model_validate(document).model_dump(exclude_none=True)["content"]
    for part in parts:
        value = part.get(part["type"])
        if isinstance(value, dict) and value["url"].lstrip()[:5].lower() == "data:":
            value["url"] = _DATA_SHOWN
    return {"text": None, "multi_modal": parts}


@dataclass(frozen=True, kw_only=True)
class PairForm(PooledForm):
    """A list of scores. `is_raw`: they are differences of logits."""

    is_compared: ClassVar[bool] = False

    is_raw: bool = False

    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        score = sigmoid_score(_difference(completion), is_raw=self.is_raw)
        # The shortest decimals that are read back as the same float32.
        row.write(to_json(self.entry(completion.index, float(str(np.float32(score))))))

    @abstractmethod
    def entry(self, index: int, score: float) -> dict[str, Any]:
        """The item of one document."""

    @classmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        return f"{number_of(item[cls.item_name]):.4f}"

    @classmethod
    def cells_of(cls, item: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
        return {"score": number_of(item[cls.item_name])}


def _difference(completion: CompletionOutput) -> float:
    return float(pooled_values(completion)[0])


@dataclass(frozen=True, kw_only=True)
class ScoreForm(PairForm):
    """The scores stand in the order of the documents."""

    id_prefix: ClassVar[str] = "score-"
    item_name: ClassVar[str] = "score"

    def entry(self, index: int, score: float) -> dict[str, Any]:
        return {"index": index, "object": "score", "score": score}


@dataclass(frozen=True, kw_only=True)
class RerankForm(PairForm):
    """The best documents come first. `top_n`: most documents; None: all. `documents` stand beside their scores."""

    id_prefix: ClassVar[str] = "rerank-"
    object: ClassVar[str | None] = None
    list_name: ClassVar[str] = "results"
    item_name: ClassVar[str] = "relevance_score"
    has_created: ClassVar[bool] = False

    top_n: int | None = None
    documents: tuple[dict[str, Any], ...] | None = None

    def in_order(self, completions: Sequence[CompletionOutput]) -> Sequence[CompletionOutput]:
        # By the difference: sigmoids of 17 and 18 are the same float32.
        best = sorted(completions, key=lambda completion: (-_difference(completion), completion.index))
        return best[: self.top_n]

    def entry(self, index: int, score: float) -> dict[str, Any]:
        shown = {} if self.documents is None else {"document": self.documents[index]}
        return {"index": index, **shown, "relevance_score": score}

    @classmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        return f"document {item['index']}: {super().text_of(item)}"
