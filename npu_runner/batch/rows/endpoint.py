"""The base of all endpoints: one RowBody reads the rows of an endpoint, and one AnswerForm writes their answers.

Knows no endpoint by name.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, WrapValidator, field_validator

from npu_runner.batch.rows.logprobs_json import LogprobsJson, encoded, to_json
from npu_runner.errors import RequestError
from npu_runner.prompts.media.media import MediaRules
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.limits import LIMITS, check_count, field_error, plain_template_kwargs, shown
from npu_runner.request.logprobs import PromptLogprobs
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import MAX_TOP_LOGPROBS, WHOLE_VOCABULARY, SamplingParams
from npu_runner.request.structured_outputs import JSON_KINDS, StructuredOutputsParams

RequestParams = SamplingParams | PoolingParams
Prompts = PromptInputs | tuple[PromptInputs, ...]
"""One prompt, or the prompts of a row that is pooled."""

# The sizes that are checked, where a field is of the type that it should be.
_COUNTED: tuple[tuple[str, type[Sized], str, int], ...] = (
    ("model", str, "characters", LIMITS.max_name_chars),
    ("user", str, "characters", LIMITS.max_name_chars),
    ("stop_token_ids", list, "entries", LIMITS.max_stop_token_ids),
    ("stop", list, "entries", LIMITS.max_stop_strings),
    ("bad_words", list, "entries", LIMITS.max_bad_words),
    ("allowed_token_ids", list, "entries", LIMITS.max_allowed_token_ids),
    ("logit_bias", dict, "entries", LIMITS.max_logit_bias),
    ("no_repeat_ngram_exempt_ids", list, "entries", LIMITS.max_ngram_exempt_ids),
    ("tools", list, "tools", LIMITS.max_tools),
)
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
ONE_TEMPLATE = "a job has one, the checkpoint's or --chat-template FILE"
_SCHEMA = "response_format.json_schema.schema"


class Strict(BaseModel):
    """No conversions, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


def type_tag(value: Any) -> str | None:
    """The tag of a value in a union whose members differ by their JSON type."""
    return f"<{type(value).__name__}>"


def object_tag(value: Any) -> str | None:
    """The tag of an object that is known by its `type`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>"


def items_tag(value: Any) -> str | None:
    """As `type_tag`, but a list is known by the type that all its items have."""
    if not isinstance(value, list):
        return type_tag(value)
    kinds = {type(item).__name__ for item in value}
    return f"<list of {kinds.pop()}>" if len(kinds) == 1 else None


def by_tag(tag: Callable[[Any], str | None], code: str, message: str) -> Discriminator:
    """Chooses the member of a union. A value that has no member's tag gets this error."""
    return Discriminator(tag, custom_error_type=code, custom_error_message=message)


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


ResponseFormat = Annotated[
    Annotated[SchemaFormat, Tag("<json_schema>")] | Annotated[PlainFormat, Tag("<json_object>")]
    | Annotated[PlainFormat, Tag("<text>")],
    by_tag(object_tag, "format_kind", 'an object is needed whose type is "json_schema", "json_object" or "text"'),
]


class AnswerRules(Strict):
    """The fields that say what the answer must be; one of them at most."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def rule_fields(self) -> list[str]:
        """The fields that are used. To ask for text beside another rule is to ask for nothing."""
        used = [name for name in AnswerRules.model_fields if getattr(self, name) is not None]
        is_text = self.response_format is not None and self.response_format.type == "text"
        return used[1:] if is_text and len(used) > 1 else used

    def answer_rule(self) -> StructuredOutputsParams | None:
        """The rule for the answer; None: there is none. Raises RequestError for two of them."""
        used = self.rule_fields()
        if len(used) > 1:
            raise RequestError(f"{used[1]}: {used[0]} says already what the answer must be; give one of them",
                               "invalid_value", used[1])
        name = next(iter(used), None)
        if name == "structured_outputs":
            return StructuredOutputsParams.from_value(self.structured_outputs)
        if name is not None and name in _GUIDED:
            return StructuredOutputsParams(origin=name, **{_GUIDED[name]: getattr(self, name)})
        if isinstance(self.response_format, SchemaFormat):
            return StructuredOutputsParams(json=self.response_format.json_schema.schema_, origin=_SCHEMA)
        if name is None or self.response_format is None or self.response_format.type == "text":
            return None
        return StructuredOutputsParams(json_object=True, origin="response_format")


def asks_for_json(body: Mapping[str, Any], *, has_rule_of_job: bool) -> bool:
    """Whether the answer of a served row's body is to be JSON. `has_rule_of_job`: the job has a schema for rows without
    a rule and without tools."""
    rules = {name: value for name in AnswerRules.model_fields if (value := body.get(name)) is not None}
    if not rules:
        return has_rule_of_job and (not body.get("tools") or body.get("tool_choice") == "none")
    kind, rule = rules.get("response_format", {}).get("type"), rules.get("structured_outputs", {})
    return "guided_json" in rules or kind in ("json_schema", "json_object") or any(map(rule.get, JSON_KINDS))


@dataclass(frozen=True, kw_only=True)
class AnswerRow:
    """The row that completions are written to, and the values that all of them use."""

    out: io.BytesIO
    digest: str
    """It stands for the row in ids that the answer holds."""
    logprobs_json: LogprobsJson
    splits_reasoning: bool
    prompt_logprobs: PromptLogprobs | None
    """None: the request asked for none."""

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
    """Writes the part of a row's answer that depends on its endpoint. Made where the row is read; small and picklable.
    """

    id_prefix: ClassVar[str | None] = None
    """None: the answer has no id."""
    object: ClassVar[str | None] = None
    """None: the answer has no member of this name."""
    list_name: ClassVar[str] = "choices"
    """The member that holds the completions."""
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
    """The row's name of the model."""
    expected: str | None = None
    """The right answer, where the row knows it."""
    label: str = ""
    """The label of the block of a page that the row shows, as its metadata has it."""
    places: tuple[str, ...] = ()
    """The field of each prompt, where a row has several; () where errors need no such name."""

    def in_order(self, completions: Sequence[CompletionOutput]) -> Sequence[CompletionOutput]:
        """The completions that the answer has, in its order."""
        return completions

    def compared_text(self, output: RequestOutput) -> str:
        """The text that the row's `expected` is compared with."""
        return output.text

    @abstractmethod
    def write_choice(self, completion: CompletionOutput, row: AnswerRow) -> None:
        """Append the JSON of one completion."""

    @classmethod
    @abstractmethod
    def text_of(cls, item: Mapping[str, Any]) -> str:
        """The words that show a written item to a reader."""

    @classmethod
    @abstractmethod
    def cells_of(cls, item: Mapping[str, Any], num_prompt_tokens: int | None) -> dict[str, Any]:
        """The item as a line of a table, by column; None where a column has no value. Raises one of FAULTS
        (endpoints.py) where the item is not as `write_choice` writes it."""


class TextForm(AnswerForm):
    """The completions are texts."""

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


@dataclass(frozen=True, kw_only=True)
class PooledForm(AnswerForm):
    """The completions are numbers that were pooled, one item for each prompt."""

    object: ClassVar[str | None] = "list"
    list_name: ClassVar[str] = "data"
    has_text: ClassVar[bool] = False


def pooled_values(completion: CompletionOutput) -> np.ndarray:
    assert completion.pooled is not None, "a request for numbers that ended well has them"
    return completion.pooled


class Unserved:
    """A field that is known and not served. `harmless`: values that ask for nothing, beside null, and are let through.
    `instead`: a remedy."""

    def __init__(self, *harmless: Any, instead: str = ""):
        self.harmless, self.hint = harmless, instead and f"; {instead}"


OWN_TOKENS = Unserved(instead="they are added as the checkpoint's own tokenizer and processor do")


class RowBody(Strict):
    """The fields that all endpoints have. None: the row does not set the field."""

    task: ClassVar[str] = "generate"
    """The task that the model is to be loaded for: generate, or a PoolingConfig's."""
    unserved: ClassVar[Mapping[str, Unserved]] = {}

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    """It belongs to the caller alone: no row fails for its contents."""

    @property
    def requested_task(self) -> str:
        """The task of this row."""
        return self.task

    @classmethod
    def check_counts(cls, body: Mapping[str, Any]) -> None:
        """Validation makes an object of every entry, and an error of every wrong one: their number is checked before.
        """
        for name, kind, unit, limit in _COUNTED:
            if isinstance(value := body.get(name), kind):
                check_count(name, unit, len(value), limit)
        if isinstance(kwargs := body.get("chat_template_kwargs"), dict):
            plain_template_kwargs(kwargs)

    @classmethod
    def refuse_unserved(cls, body: dict[str, Any]) -> None:
        """Drop known fields that ask for nothing. Raises RequestError for a field that this runner does not serve."""
        for name, field in cls.unserved.items():
            value = body.pop(name, None)
            if value is not None and not any(type(value) is type(item) and value == item for item in field.harmless):
                message = f"{name}={shown(value)} is not supported{field.hint}"
                raise RequestError(message, "unsupported_parameter", name)

    @property
    def expected(self) -> str | None:
        """The right answer, where the row's metadata knows it."""
        value = (self.metadata or {}).get("expected")
        return None if value is None else str(value)

    @abstractmethod
    def to_params(self, defaults: Mapping[str, Any], fallback_seed: int) -> RequestParams:
        """The row's own parameters over `defaults`, the checkpoint's SamplingParams.

        `fallback_seed` stands in for a missing seed: a resumed job samples with the seed of an undisturbed one.
        """

    def with_forced_calls(self, params: Any, processor: ChatProcessor) -> Any:
        """`params` with a grammar of calls, where the row forces them. Raises RequestError where it cannot."""
        return params

    @abstractmethod
    def prepare(self, processor: ChatProcessor, media: MediaRules, params: Any) -> tuple[Prompts, AnswerForm]:
        """The row's prompts, and the form of its answer. `params`: of `to_params`, resolved."""


class RequestBody(RowBody, AnswerRules):
    """The fields of sampling, under vLLM's names where OpenAI has none. None: the row does not set the field."""

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
        # A default that the endpoint has no field for does not apply to it.
        defaults = {name: value for name, value in defaults.items() if name in names}
        own = {name: value for name in names - {"logprobs"} if (value := getattr(self, name)) is not None}
        if own.get("no_repeat_ngram_size") == 0:  # without a ban its window and exemptions mean nothing
            defaults = {name: value for name, value in defaults.items() if not name.startswith("no_repeat_ngram_")}
        if self.rule_fields():
            own["structured_outputs"] = self.answer_rule()
        own |= {"max_tokens": self.own_max_tokens(), "logprobs": self.num_logprobs(),
                "prompt_logprobs": self.num_prompt_logprobs()}
        top = "top_logprobs" if "top_logprobs" in type(self).model_fields else "logprobs"
        for name, value in ((top, own["logprobs"]), ("prompt_logprobs", own["prompt_logprobs"])):
            if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
                raise field_error(name, f"{shown(value)} is outside 0 to {MAX_TOP_LOGPROBS}; LLM alone gives those of "
                                  f"the whole vocabulary ({WHOLE_VOCABULARY})", "invalid_sampling_parameter")
        own.setdefault("seed", fallback_seed)
        return SamplingParams(**{**defaults, **own}).with_limit(self.default_max_tokens(defaults))

    def own_max_tokens(self) -> int | None:
        return self.max_tokens

    def default_max_tokens(self, defaults: Mapping[str, Any]) -> int | None:
        """The max_tokens of rows that have none: the checkpoint's. None: the rest of the model's length."""
        most: int | None = defaults.get("max_tokens")
        return most

    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @abstractmethod
    def num_logprobs(self) -> int | None: ...


def number_of(value: Any) -> float:
    """A number of JSON. Raises TypeError for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{shown(value)} is not a number")
    return float(value)
