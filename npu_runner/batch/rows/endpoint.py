"""What request bodies of all endpoints have in common: sampling, limits, rules for the answer, fields not served.

An endpoint is one RequestBody, which reads its rows, and one AnswerForm, which writes them. Knows none by name.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, WrapValidator, field_validator

from npu_runner.batch.rows.logprobs_json import LogprobsJson, encoded, to_json
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.limits import LIMITS, check_count, shown
from npu_runner.request.logprobs import PromptLogprobs
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.request.structured_outputs import JSON_KINDS, StructuredOutputsParams

RequestParams = SamplingParams | PoolingParams
Prompts = PromptInputs | tuple[PromptInputs, ...]
"""One prompt, or of a row that is pooled one or several."""

# What a field can have too much of, when it is of the type that it should be.
_COUNTED: tuple[tuple[str, type[Sized], str, int], ...] = (
    ("model", str, "characters", LIMITS.max_name_chars),
    ("user", str, "characters", LIMITS.max_name_chars),
    ("stop_token_ids", list, "entries", LIMITS.max_stop_token_ids),
    ("stop", list, "entries", LIMITS.max_stop_strings),
    ("bad_words", list, "entries", LIMITS.max_bad_words),
    ("allowed_token_ids", list, "entries", LIMITS.max_allowed_token_ids),
    ("logit_bias", dict, "entries", LIMITS.max_logit_bias),
    ("no_repeat_ngram_exempt_ids", list, "entries", LIMITS.max_ngram_exempt_ids),
)
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_SCHEMA = "response_format.json_schema.schema"


class Strict(BaseModel):
    """No conversions, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _keep_json(value: Any, validate: Callable[[Any], Any]) -> Any:
    validate(value)
    return value


AS_JSON = WrapValidator(_keep_json)
"""The field is validated and stays the JSON that it is: the processor parses it."""


class JsonSchema(Strict):
    """A schema as OpenAI wraps it. With `strict` and without, it is enforced alike."""

    name: str = Field(min_length=1, max_length=1024)
    description: str | None = None
    # A model has a method of this name.
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Strict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class PlainFormat(Strict):
    """Any JSON object, or any text."""

    type: Literal["json_object", "text"]


def _tag_of_format(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{'schema' if kind == 'json_schema' else 'plain'}>" if kind in ("json_schema", "json_object", "text") \
        else None


ResponseFormat = Annotated[
    Annotated[SchemaFormat, Tag("<schema>")] | Annotated[PlainFormat, Tag("<plain>")],
    Discriminator(
        _tag_of_format, custom_error_type="format_kind",
        custom_error_message='an object is needed whose type is "json_schema", "json_object" or "text"'),
]


class AnswerRules(Strict):
    """The fields that say what the answer must be; one of them at most."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def said_rules(self) -> list[str]:
        """The fields that are used. To ask for text beside another rule is to ask for nothing."""
        said = [name for name in AnswerRules.model_fields if getattr(self, name) is not None]
        is_text = isinstance(self.response_format, PlainFormat) and self.response_format.type == "text"
        return said[1:] if is_text and len(said) > 1 else said

    def answer_rule(self) -> StructuredOutputsParams | None:
        """What the answer must be; None: as the model likes. Raises RequestError for two such rules."""
        said = self.said_rules()
        if len(said) > 1:
            raise RequestError(f"{said[1]}: {said[0]} says already what the answer must be; give one of them",
                               "invalid_value", said[1])
        name = next(iter(said), None)
        if name == "structured_outputs":
            return StructuredOutputsParams.from_value(self.structured_outputs)
        if name == "response_format" and self.response_format is not None:
            return _of_format(self.response_format)
        return StructuredOutputsParams(origin=name, **{_GUIDED[name]: getattr(self, name)}) if name else None


def _of_format(response_format: SchemaFormat | PlainFormat) -> StructuredOutputsParams | None:
    if isinstance(response_format, SchemaFormat):
        return StructuredOutputsParams(json=response_format.json_schema.schema_, origin=_SCHEMA)
    if response_format.type == "text":
        return None
    return StructuredOutputsParams(json_object=True, origin="response_format")


def asks_for_json(body: Mapping[str, Any], *, has_rule_of_job: bool) -> bool:
    """Whether the answer of a served row's body is to be JSON. `has_rule_of_job`: a schema is for rows that say
    nothing of their answer and have no tools."""
    said = {name: value for name in AnswerRules.model_fields if (value := body.get(name)) is not None}
    if not said:
        return has_rule_of_job and (not body.get("tools") or body.get("tool_choice") == "none")
    kind, rule = said.get("response_format", {}).get("type"), said.get("structured_outputs", {})
    return "guided_json" in said or kind in ("json_schema", "json_object") or any(map(rule.get, JSON_KINDS))


@dataclass(frozen=True, kw_only=True)
class AnswerRow:
    """The row that completions are written to, and what they share."""

    out: io.BytesIO
    digest: str
    """Stands for the row in ids that the answer holds."""
    logprobs_json: LogprobsJson
    splits_reasoning: bool
    prompt_logprobs: PromptLogprobs | None
    """The request's, where it asked for them."""

    def write(self, text: str) -> None:
        self.out.write(encoded(text))

    def write_end(self, completion: CompletionOutput, finish_reason: str) -> None:
        """The last members of a choice. `stop_reason` is there where `finish_reason` alone would mean another end."""
        self.write(f',"finish_reason":{to_json(finish_reason)}')
        if completion.is_repetition:
            self.write(f',"stop_reason":{to_json(completion.stop_reason)}')
        self.write("}")


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """How one row's answer is written, but for what all rows have. Made where the row is read; small and picklable."""

    id_prefix: ClassVar[str | None] = None
    """None: the answer has no id."""
    object: ClassVar[str | None] = None
    """None: the answer does not say what it is."""
    list_name: ClassVar[str] = "choices"
    """What the completions are called."""
    item_name: ClassVar[str]
    """A field that an item of the list has here and in no other form."""
    has_vectors: ClassVar[bool] = False
    is_compared: ClassVar[bool] = True
    """A row's `expected` is compared with the first item."""
    has_created: ClassVar[bool] = True
    counts_reasoning: ClassVar[bool] = False
    prompt_logprobs_in_body: ClassVar[bool] = False
    """True: log probabilities of the prompt stand beside the completions; False: `write_choice` writes them."""
    has_text: ClassVar[bool] = True
    """False: numbers are pooled; then no completion is counted, and there is no fingerprint in the answer."""

    model: str | None = None
    """What the row calls the model."""
    expected: str | None = None
    """The right answer, where the row knows it."""
    places: tuple[str, ...] = ()
    """Of a row with several prompts, the field that each stands in; () where errors need no such name."""

    def in_order(self, completions: Sequence[CompletionOutput]) -> Sequence[CompletionOutput]:
        """Those that the answer has, as it has them."""
        return completions

    def answer_of(self, output: RequestOutput) -> str:
        """What the row's `expected` is compared with."""
        return output.text

    @abstractmethod
    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        """Append the JSON of one completion."""

    @classmethod
    @abstractmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        """The words that show an item to a reader, once it is written."""

    @classmethod
    @abstractmethod
    def cells_of(cls, item: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
        """The item as a line of a table, by column; None where a column has no value. Raises one of FAULTS
        (endpoints.py) where the item is not as `write_choice` writes it."""


class TextForm(AnswerForm):
    """Completions that are texts."""

    @classmethod
    def cells_of(cls, item: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
        message = item.get("message") or {}
        calls = message.get("tool_calls")
        logprobs = cls.logprobs_of(item["logprobs"], num_prompt_tokens) if item.get("logprobs") else None
        return {
            "text": message["content"] if message else item["text"],
            "reasoning": message.get("reasoning_content"),
            "tool_calls": calls or None,
            "finish_reason": item["finish_reason"],
            "stop_reason": item.get("stop_reason"),
            "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        }

    @classmethod
    @abstractmethod
    def logprobs_of(cls, logprobs: Mapping[str, Any], num_prompt_tokens: int | None) -> Sequence[float]:
        """The log probability of each token of the completion, without an echoed prompt."""


class RowBody(Strict):
    """What bodies of all endpoints have. None means: not asked for."""

    task: ClassVar[str] = "generate"
    """What the model has to be loaded for: generate, or a PoolingConfig's."""
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that are known and not served, with the values that ask for nothing and are let through."""
    instead: ClassVar[Mapping[str, str]] = {}
    """What to do instead, for some of them."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    """Belongs to the caller alone: no row fails for its contents."""

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        """Validation makes an object of every entry, and an error of every wrong one: how many there are comes
        first."""
        for name, kind, what, limit in _COUNTED:
            if isinstance(value := body.get(name), kind):
                check_count(name, what, len(value), limit)

    @classmethod
    def refuse_unserved(cls, body: dict[str, Any]) -> None:
        """Drop known fields that ask for nothing; refuse those that ask for what this runner does not do."""
        for name, harmless in cls.unserved.items():
            value = body.get(name)
            if value is None or any(_is_same(value, item) for item in harmless):
                body.pop(name, None)
            else:
                hint = cls.instead.get(name, "")
                raise RequestError(f"{name}={shown(value)} is not supported{hint}", "unsupported_parameter", name)

    @property
    def expected(self) -> str | None:
        """The right answer, where the row's metadata knows it."""
        value = (self.metadata or {}).get("expected")
        return None if value is None else str(value)

    @abstractmethod
    def to_params(self, defaults: Mapping[str, Any], fallback_seed: int) -> RequestParams:
        """What the row asks for, over `defaults` (the checkpoint's SamplingParams) for fields it leaves out.

        `fallback_seed` stands in for a missing one: a resumed job draws by the seed that an undisturbed one would have.
        """

    def with_forced_calls(self, params: Any, processor: ChatProcessor) -> Any:
        """`params` with a grammar of calls, where the row forces them. Raises RequestError where that cannot be."""
        return params

    @abstractmethod
    def prepare(self, processor: ChatProcessor, media: MediaRules, params: Any) -> tuple[Prompts, AnswerForm]:
        """The row's prompts, and how its answer is to be written. `params`: what `to_params` made, resolved."""


class RequestBody(RowBody, AnswerRules):
    """The fields of sampling, under vLLM's names where OpenAI has none. None means: not asked for."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repetition_detection: dict[str, Any] | None = None
    no_repeat_ngram_size: int | None = None
    no_repeat_ngram_window: int | None = None
    no_repeat_ngram_exempt_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Annotated[str, Tag("<text>")] | Annotated[list[str], Tag("<parts>")] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 12):
                raise ValueError(f"the key {key[:40]!r} is not a token id")
        return value

    def to_params(self, defaults: Mapping[str, Any], fallback_seed: int) -> SamplingParams:
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        # A default that the endpoint has no field for is none of its.
        defaults = {name: value for name, value in defaults.items() if name in names}
        asked = {name: value for name in names - {"logprobs"} if (value := getattr(self, name)) is not None}
        if asked.get("no_repeat_ngram_size") == 0:  # of no ban nothing is left
            defaults = {name: value for name, value in defaults.items() if not name.startswith("no_repeat_ngram_")}
        if self.said_rules():
            asked["structured_outputs"] = self.answer_rule()
        asked["max_tokens"] = self.asked_tokens()
        asked["logprobs"] = self.num_logprobs()
        asked["prompt_logprobs"] = self.num_prompt_logprobs()
        asked.setdefault("seed", fallback_seed)
        return SamplingParams(**{**defaults, **asked}).with_limit(self.default_tokens(defaults))

    def asked_tokens(self) -> int | None:
        """The row's own max_tokens."""
        return self.max_tokens

    def default_tokens(self, defaults: Mapping[str, Any]) -> int | None:
        """max_tokens of rows that have none: the checkpoint's. None: what the model's length leaves."""
        most: int | None = defaults.get("max_tokens")
        return most

    def num_prompt_logprobs(self) -> int | None:
        """SamplingParams' prompt_logprobs."""
        return self.prompt_logprobs

    @abstractmethod
    def num_logprobs(self) -> int | None:
        """SamplingParams' logprobs."""


def number_of(value: Any) -> float:
    """A number of JSON. Raises TypeError for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{shown(value)} is not a number")
    return float(value)


def _is_same(value: Any, item: Any) -> bool:
    return value is item or (type(value) is type(item) and value == item)
