"""What a row's answer must be, by whatever name the row says it: OpenAI's response_format or one of vLLM's.

Knows nothing of grammars or tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from npu_runner.errors import RequestError
from npu_runner.request.structured_outputs import StructuredOutputsParams

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_SCHEMA = "response_format.json_schema.schema"


class Strict(BaseModel):
    """No conversions, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


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
        _tag_of_format,
        custom_error_type="format_kind",
        custom_error_message='an object is needed whose type is "json_schema", "json_object" or "text"',
    ),
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
                               "invalid_value", said[1])  # fmt: skip
        name = next(iter(said), None)
        if name == "structured_outputs":
            return StructuredOutputsParams.of(self.structured_outputs)
        if name == "response_format" and self.response_format is not None:
            return _of_format(self.response_format)
        return StructuredOutputsParams(origin=name, **{_GUIDED[name]: getattr(self, name)}) if name else None


def _of_format(response_format: SchemaFormat | PlainFormat) -> StructuredOutputsParams | None:
    if isinstance(response_format, SchemaFormat):
        return StructuredOutputsParams(json=response_format.json_schema.schema_, origin=_SCHEMA)
    if response_format.type == "text":
        return None
    return StructuredOutputsParams(json_object=True, origin="response_format")
