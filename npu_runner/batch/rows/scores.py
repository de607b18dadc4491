"""Reads bodies of /v1/score and /v1/rerank and writes their answers, as vLLM has them. A row is many prompts, one for
each document, that begin with the same query. No files here.

Knows nothing of tokens, templates or of how a score is made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import Discriminator, Field, Tag

from npu_runner.batch.rows.chat import Part
from npu_runner.batch.rows.endpoint import AS_JSON, AnswerForm, AnswerRow, Prompts, RowBody, Strict, number_of
from npu_runner.batch.rows.logprobs_json import to_json
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import Addresses, MediaRules
from npu_runner.prompts.pair_prompts import Side, parse_side
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.vision_prompts import Known
from npu_runner.request.limits import LIMITS, check_count, plain_template_kwargs
from npu_runner.request.outputs import CompletionOutput, sigmoid_score
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs

_PAIRS = (("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items"))
"""What the two sides of /v1/score are called; of each row one pair of names."""
_TOKEN_BYTES = 8
_DATA_SHOWN = "data:..."
"""Stands for a data: URL in an answer that repeats a document."""


class Parts(Strict):
    """Text, images and videos of a query or a document."""

    content: list[Part] = Field(min_length=1)


def _tag_of_input(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<parts>" if isinstance(value, dict) else None


Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Parts, Tag("<parts>")],
    Discriminator(
        _tag_of_input, custom_error_type="input_type",
        custom_error_message='text or an object {"content": parts} is needed'),
    AS_JSON,
]


def _tag_of_inputs(value: Any) -> str | None:
    return "<several>" if isinstance(value, list) and value else "<one>" if isinstance(value, (str, dict)) else None


Inputs = Annotated[
    Annotated[Input, Tag("<one>")] | Annotated[list[Input], Tag("<several>")],
    Discriminator(
        _tag_of_inputs, custom_error_type="inputs_type",
        custom_error_message='text, an object {"content": parts} or a list of these is needed'),
]


class PairBody(RowBody):
    """What both endpoints have. None means: not asked for."""

    task: ClassVar[str] = "score"
    sides: ClassVar[tuple[str, ...]]
    """The fields that hold queries and documents."""
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (), "cache_salt": (), "max_tokens_per_doc": (0,), "max_tokens_per_query": (0,),
        "padding": ("do_not_pad",), "priority": (0,), "softmax": (), "truncation_side": ("right",)}
    instead: ClassVar[Mapping[str, str]] = {
        "add_special_tokens": "; they are added as the checkpoint's own tokenizer and processor do",
        "max_tokens_per_doc": "; truncate_prompt_tokens leaves out the end of a document",
    }

    instruction: str | None = None
    raw: bool | None = None
    use_activation: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        super().check_counts(body)
        if isinstance(kwargs := body.get("chat_template_kwargs"), dict):
            plain_template_kwargs(kwargs)
        for name in cls.sides:
            given = body.get(name)
            inputs = given if isinstance(given, list) else [given]
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
        """One for each document; one query is for all of them. Raises RequestError naming what cannot be served."""
        addresses = Addresses(media)
        parsed = [parse_side(side.given, side.where, processor.media_limits, addresses)
                  for side in (*queries, *documents)]
        addresses.check_sizes(documents[-1].where.partition("[")[0])
        asked, shown = parsed[: len(queries)], parsed[len(queries) :]
        asked = asked * len(shown) if len(asked) == 1 else asked
        return tuple(self._prompts(processor, params, list(zip(asked, shown, strict=True)), documents))

    def _prompts(self, processor: ChatProcessor, params: PoolingParams, pairs: list[tuple[Side, Side]],
                 documents: list[Located]) -> list[PromptInputs]:
        assert processor.pairs is not None, "the task was checked before"
        most = processor.most_prompt_tokens(params)
        known: Known = {}
        prompts: list[PromptInputs] = []
        num_bytes = 0
        for (query, shown), where in zip(pairs, (side.where for side in documents), strict=True):
            num_known = len(known)
            try:
                prompt = processor.pairs(
                    query, shown, instruction=self.instruction, chat_template_kwargs=self.chat_template_kwargs,
                    truncate_prompt_tokens=most, mm_processor_kwargs=self.mm_processor_kwargs, known=known)
            except RequestError as error:
                raise _of_document(error, where) from error
            prompts.append(prompt)
            new = list(known.values())[num_known:]
            num_bytes += _TOKEN_BYTES * len(prompt.token_ids)
            num_bytes += sum(item.image.pixels_HWC.nbytes for items in new for item in items)
            check_count(where, "bytes with those before it, once they are prepared,", num_bytes,
                        LIMITS.max_pairs_bytes)
        return prompts


def _of_document(error: RequestError, where: str) -> RequestError:
    """An error that names a field of the row already stays as it is."""
    if error.param not in (None, "messages", "truncate_prompt_tokens"):
        return error
    return RequestError(f"{where}: {error.message}", error.code, where)


class Located(NamedTuple):
    """A query or a document, as JSON, and the field that it stands in."""

    given: Any
    where: str


def _located(given: Any, name: str) -> list[Located]:
    if not isinstance(given, list):
        return [Located(given, name)]
    return [Located(each, f"{name}[{number}]") for number, each in enumerate(given)]


def sides_of(body: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """The queries and documents of any body, as messages whose role is the field; `most` at most, for people to read.
    """
    names = dict.fromkeys((*RerankBody.sides, *ScoreBody.sides))
    given = [(name, each) for name in names if (value := body.get(name)) is not None
             for each in (value if isinstance(value, list) else [value])]
    return [{"role": name, "content": each.get("content") if isinstance(each, dict) else each}
            for name, each in given[:most]]


class ScoreBody(PairBody):
    """The score request, as far as it is served. None means: not asked for."""

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
        given = {name for name in cls.sides if body.get(name) is not None}
        if not any(given == set(pair) for pair in _PAIRS):
            near = next((pair for pair in _PAIRS if given <= set(pair)), None)
            missing = next((name for name in near or () if name not in given), None)
            if missing is not None:
                raise RequestError(f"{missing}: missing; a row has a query and what it is compared with",
                                   "missing_required_parameter", missing)
            wrong = sorted(given)[-1]
            raise RequestError(f"{wrong}: does not go with {', '.join(sorted(given - {wrong}))}; give one of "
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
        repeated = None if self.return_documents is False else tuple(_repeated(side.given) for side in documents)
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
class PairForm(AnswerForm):
    """A list of scores. `is_raw`: differences of logits."""

    has_text: ClassVar[bool] = False
    is_compared: ClassVar[bool] = False

    is_raw: bool = False

    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        score = sigmoid_score(_difference(completion), is_raw=self.is_raw)
        # The shortest decimals that are read back as the same float32.
        row.write(to_json(self.entry(completion.index, float(str(np.float32(score))))))

    @abstractmethod
    def entry(self, index: int, score: float) -> dict[str, Any]:
        """One document's."""

    @classmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        return f"{number_of(item[cls.item_name]):.4f}"

    @classmethod
    def cells_of(cls, item: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
        return {"score": number_of(item[cls.item_name])}


def _difference(completion: CompletionOutput) -> float:
    assert completion.pooled is not None, "a request for scores that ended well has them"
    return float(completion.pooled[0])


@dataclass(frozen=True, kw_only=True)
class ScoreForm(PairForm):
    """In the order of the documents."""

    id_prefix: ClassVar[str] = "score-"
    object: ClassVar[str] = "list"
    list_name: ClassVar[str] = "data"
    item_name: ClassVar[str] = "score"

    def entry(self, index: int, score: float) -> dict[str, Any]:
        return {"index": index, "object": "score", "score": score}


@dataclass(frozen=True, kw_only=True)
class RerankForm(PairForm):
    """The best documents first. `top_n`: so many at most; `documents`: repeated beside their scores."""

    id_prefix: ClassVar[str] = "rerank-"
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
