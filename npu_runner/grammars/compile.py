"""Turns structured_outputs into the grammar that a matcher takes, or into the error that they deserve.

Runs where prompts are prepared. llguidance is imported for whoever asks for such an answer, and not before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from npu_runner.grammars.place import place_of
from npu_runner.structured_outputs import StructuredOutputsParams

# Indents are far below it, and whoever can add white space for ever does.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{0,40}"
_OWN_OPTIONS = "x-guidance"
_MOST_KNOWN = 256
_KNOWN: dict[str, str] = {}
"""Grammars by what was asked for, the oldest first."""


def with_grammar(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """`params` with `compiled`, a grammar that was checked. May be called twice; of many requests that ask for the same
    the first one alone pays.

    Raises RequestError with the place in the schema, or what is wrong with the expression or grammar.
    """
    if params.compiled:
        return params
    white_space = "" if params.disable_any_whitespace else params.whitespace_pattern
    asked = json.dumps([params.kind, getattr(params, params.kind), white_space])
    grammar = _KNOWN.get(asked)
    if grammar is None:
        grammar = _schema_grammar(params) if params.kind in ("json", "json_object") else _text_grammar(params)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)), None)
        _KNOWN[asked] = grammar
    return params.replace(compiled=grammar)


def followed(lark: str, origin: str) -> StructuredOutputsParams:
    """A grammar of our own making. Raises RequestError where it is more than a matcher takes."""
    params = StructuredOutputsParams(grammar=lark, origin=origin, compiled=lark)
    reason = failure_of(lark)
    if reason is not None:
        raise params.error(f"{reason}")
    return params


def json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """llguidance's options for JSON: nothing is approximated, nothing that a schema asks for is ignored."""
    white_space = "" if params.disable_any_whitespace else params.whitespace_pattern or _WHITE_SPACE
    return {"whitespace_pattern": white_space or None, "whitespace_flexible": bool(white_space),
            "coerce_one_of": False, "lenient": False}  # fmt: skip


def json_grammar(schema: Any, options: Mapping[str, Any]) -> str:
    """The grammar of JSON that fits `schema`, not checked."""
    from llguidance import LLMatcher

    given = {name: value for name, value in options.items() if value is not None}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=given)  # type: ignore[arg-type]


def failure_of(grammar: str) -> str | None:
    """What is wrong with a grammar; None: nothing."""
    from llguidance import LLMatcher

    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return " ".join(messages[0].split()) if is_wrong else None


def _schema_grammar(params: StructuredOutputsParams) -> str:
    schema = {"type": "object"} if params.kind == "json_object" else params.json
    if isinstance(schema, dict) and _OWN_OPTIONS in schema:
        raise params.error(f"{_OWN_OPTIONS}: unknown keyword; disable_any_whitespace and whitespace_pattern are fields")
    options = json_options(params)

    def failure(candidate: Any) -> str | None:
        return failure_of(json_grammar(candidate, options))

    reason = failure(schema)
    if reason is not None:
        raise params.error(f"the schema cannot be served at {place_of(schema, failure)}: {reason}")
    return json_grammar(schema, options)


def _text_grammar(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    kind = params.kind
    if kind == "regex":
        grammar = LLMatcher.grammar_from_regex(str(params.regex))
    elif kind == "choice":
        grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice or ())))
    else:
        try:
            grammar = LLMatcher.grammar_from_lark(any_to_lark(str(params.grammar)))
        except Exception as error:  # the border to a converter that raises what it likes
            raise params.error(f"grammar: it cannot be read ({error})") from error
    reason = failure_of(grammar)
    if reason is not None:
        raise params.error(f"{kind}: {reason}")
    return grammar
