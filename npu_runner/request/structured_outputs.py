"""The rule for an answer: vLLM's StructuredOutputsParams, checked for sizes. Knows no grammar compiler, no tokens."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_runner.errors import RequestError
from npu_runner.request.limits import LIMITS, check_count, field_error, given_fields, plain_json, shown

NAME = "structured_outputs"
_CODE = "invalid_structured_outputs"
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
JSON_KINDS = ("json", "json_object")
"""The kinds of rules whose answer is JSON."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """One of the first five says what the answer must be; with reasoning, what comes behind it.

    Raises RequestError naming the field for anything else, and for more than the limits allow.
    """

    json: Mapping[str, Any] | bool | str | type | None = None
    """A JSON schema, its text, or a class of pydantic's that has one: the answer is JSON that fits it. True is {}, any
    JSON."""
    regex: str | None = None
    """The whole answer matches this regular expression (Rust's syntax: no look-around, no back-references)."""
    choice: Sequence[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in llguidance's Lark, or in GBNF with a rule `root ::=`."""
    json_object: bool | None = None
    """True: the answer is any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without white space between its tokens. Else there may be some: up to 40 characters, as an indent has."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between JSON's tokens, in the place of ours."""
    origin: str = NAME
    """The field or option that it came from, for messages."""
    compiled: str = dataclasses.field(default="", repr=False)
    """The same for the matcher, checked: `ChatProcessor.resolve_params` makes it."""
    forced_tokens: int = dataclasses.field(default=0, repr=False)
    """An upper bound of the tokens that it forces in one piece; set with `compiled`."""

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) not in (None, False) or
                 (kind == "json" and self.json is False)]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise self.error(f"one of {', '.join(_KINDS)} is needed, not {found}")
        if self.compiled:
            return  # checked before it was compiled
        for name in ("regex", "grammar", "whitespace_pattern"):
            limit = LIMITS.max_grammar_chars if name == "grammar" else LIMITS.max_regex_chars
            self._check_text(name, getattr(self, name), limit)
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise self.error(f"{name}: {shown(getattr(self, name))} is neither true nor false")
        if self.choice is not None:
            object.__setattr__(self, "choice", self._checked_choice())
        if self.json is not None:
            object.__setattr__(self, "json", self._checked_schema())

    @classmethod
    def from_value(cls, value: Any) -> StructuredOutputsParams:
        """`value` itself, or one from a mapping of its fields. Raises RequestError for an unknown one."""
        known = {field.name for field in dataclasses.fields(cls)} - {"origin", "compiled", "forced_tokens"}
        return value if isinstance(value, cls) else cls(**given_fields(value, NAME, sorted(known), _CODE))

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None and
                    (kind != "json_object" or self.json_object))

    def error(self, what: str) -> RequestError:
        """The error that names where this came from."""
        return field_error(self.origin, f"{what}", _CODE)

    def replace(self, **changes: Any) -> StructuredOutputsParams:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    def _check_text(self, name: str, value: Any, limit: int) -> None:
        if value is None:
            return
        if not isinstance(value, str) or not value:
            raise self.error(f"{name}: {shown(value)} is not a non-empty string")
        check_count(f"{self.origin}: {name}", "characters", value, limit)

    def _checked_choice(self) -> tuple[str, ...]:
        value = self.choice
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence) or not value:
            raise self.error(f"choice: {shown(value)} is not a list of texts")
        check_count(f"{self.origin}: choice", "entries", value, LIMITS.max_choices)
        for item in value:
            self._check_text("choice", item, LIMITS.max_grammar_chars)
        check_count(f"{self.origin}: choice", "characters", sum(map(len, value)), LIMITS.max_grammar_chars)
        return tuple(value)

    def _checked_schema(self) -> Any:
        schema: Any = self.json
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            check_count(f"{self.origin}: json", "characters", schema, LIMITS.max_schema_chars)
            try:
                schema = json_module.loads(schema)
            except (ValueError, RecursionError) as error:
                raise self.error(f"json: not JSON ({error})") from error
        if schema is False:
            raise self.error("json: false is the schema that nothing fits; true, or {}, is any JSON")
        if not isinstance(schema, (Mapping, bool)):
            raise self.error(f"json: {shown(schema)} is no JSON schema: that is an object, true, or a class of "
                             "pydantic's")
        plain = dict(schema) if isinstance(schema, Mapping) else {}
        try:
            return plain_json(self.origin, plain, max_nesting=LIMITS.max_schema_nesting,
                              max_chars=LIMITS.max_schema_chars)
        except RequestError as error:
            raise RequestError(error.message, error.code, self.origin) from error
