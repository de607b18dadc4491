"""Turns structured_outputs into the grammar that a matcher takes, or into the error that they deserve.

Runs where prompts are prepared. llguidance is imported when a request needs it, and not before. It is
treated as hostile: our own bounds stand before it, and it is called with a stack of a stated size.

It says what is wrong with a schema and not where. So parts are emptied, half of them at a time. The smallest part
without which the error disappears is the place. A branch is not emptied but closed: one that admits everything would
make a complaint about any other go away.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from npu_runner.errors import RequestError
from npu_runner.grammars.exact_schema import OPTIONS, check_keys, exact_schema
from npu_runner.grammars.forced_text import Text, num_tokens
from npu_runner.grammars.lark import with_schemas
from npu_runner.grammars.lark_bounds import check_lark
from npu_runner.grammars.rule_size import OutOfBounds
from npu_runner.grammars.schema_bounds import check_schema, multiples_within_bounds
from npu_runner.grammars.stack import CHECK_STACK_BYTES, NUM_THREADS, call_with_stack, parser_limits
from npu_runner.request.limits import shown
from npu_runner.request.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Indents are far below it, and a model that can add white space forever does.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{0,40}"
# Text that a rule forces is sampled as any other: its mask costs no more, a control token's text is characters.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_MOST_KNOWN_CHARS = 1 << 24
# What an entry counts beside its text: 16,384 small ones are kept.
_ENTRY_CHARS = 1 << 10
_Path = tuple[str | int, ...]
_MOST_ASKED = 100
_MOST_SECONDS = 0.5
_OF_BRANCHES = ("anyOf", "oneOf")


class _Known:
    """Grammars, and bytes of the text that they force in one piece, by what was asked for. The oldest go first."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[str, int]] = {}
        self._num_chars = 0
        self._lock = threading.Lock()

    def get(self, asked: str) -> tuple[str, int] | None:
        return self._entries.get(asked)

    def add(self, asked: str, known: tuple[str, int]) -> None:
        with self._lock:
            if asked in self._entries:
                return
            self._entries[asked] = known
            self._num_chars += self._size(asked)
            while self._num_chars > _MOST_KNOWN_CHARS and len(self._entries) > 1:
                oldest = next(iter(self._entries))
                self._num_chars -= self._size(oldest)
                del self._entries[oldest]

    def _size(self, asked: str) -> int:
        return _ENTRY_CHARS + len(asked) + len(self._entries[asked][0])


_KNOWN = _Known()


def with_grammar(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """`params` with `compiled`, a grammar that was checked. May be called twice. Equal rules are compiled once.

    Raises RequestError with the place in the schema, or what is wrong with the expression or grammar.
    """
    if params.compiled:
        return params
    white_space = "" if params.disable_any_whitespace else params.whitespace_pattern
    asked = json.dumps([params.kind, getattr(params, params.kind), white_space])
    known = _KNOWN.get(asked)
    if known is None:
        known = _checked(params)
        _KNOWN.add(asked, known)
    return params.replace(compiled=known[0], forced_tokens=known[1])


def check_side_by_side(asked: Sequence[StructuredOutputsParams]) -> None:
    """`with_grammar` of all of them, several at once. Errors are raised later, by `with_grammar` of each."""

    def check(params: StructuredOutputsParams) -> None:
        with contextlib.suppress(RequestError):
            with_grammar(params)

    if len(asked) > 1:
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="checks") as threads:
            list(threads.map(check, asked))


def followed(lark: str, origin: str) -> StructuredOutputsParams:
    """A grammar of our own making. Raises RequestError where it is more than a matcher takes."""
    params = StructuredOutputsParams(grammar=lark, origin=origin, compiled=lark)
    grammar, forced_tokens = _checked_lark(params, lark)
    return params.replace(compiled=grammar, forced_tokens=forced_tokens)


class Room(Protocol):
    """For the tokens of an answer."""

    max_model_len: int

    @property
    def longest_token(self) -> int: ...


def with_room(params: StructuredOutputsParams, encode: Callable[[str], Sequence[int]],
              room: Room) -> StructuredOutputsParams:
    """`params`, whose grammar was made, with the number of tokens that it forces in one piece where that was not known.

    Raises RequestError where that is more than the model has room for: no answer could be whole.
    """
    if params.forced_tokens <= room.max_model_len:
        return params
    text = _forced(params)
    count = 0 if text is None else num_tokens(text, encode, room.longest_token)
    if count > room.max_model_len:
        raise params.error(f"the text that it forces takes {shown(count)} tokens in one piece, and the model has room "
                           f"for {room.max_model_len}; shorten it, or raise max_model_len")
    return params.replace(forced_tokens=count)


def json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """llguidance's options for JSON: nothing is approximated, nothing that a schema asks for is ignored."""
    white_space = "" if params.disable_any_whitespace else params.whitespace_pattern or _WHITE_SPACE
    return {"whitespace_pattern": white_space or None, "whitespace_flexible": bool(white_space),
            "coerce_one_of": False, "lenient": False}


def json_grammar(schema: Any, options: Mapping[str, Any]) -> str:
    """The grammar of JSON that fits `schema`, an object, not checked."""
    given = {name: value for name, value in options.items() if value is not None}
    return json.dumps({"grammars": [{"lark_grammar": f"{_NO_FORCING}start: @json"},
                                    {"name": "json", "json_schema": exact_schema({**schema, OPTIONS: given})}]})


def failure_of(grammar: str) -> str | None:
    """The fault of a grammar or of its first mask, or None. It uses the caller's stack."""
    from llguidance import LLMatcher

    matcher = LLMatcher(_byte_tokens(), grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return None
    said = " ".join(matcher.get_error().partition("\n<")[0].split())
    return "nothing that can be written fits it" if said.startswith("NoExtension") else said or "no reason is given"


@functools.cache
def _byte_tokens() -> LLTokenizer:
    """A token for each byte: whether a rule can be followed does not depend on the model's."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _checked(params: StructuredOutputsParams) -> tuple[str, int]:
    if params.kind in ("json", "json_object"):
        return _checked_schema(params)
    return _checked_lark(params, _lark(params))


def _forced(params: StructuredOutputsParams) -> Text | None:
    """The forced text of a rule that was checked already."""
    return check_schema(_schema(params)) if params.kind in ("json", "json_object") else check_lark(_lark(params))


def _schema(params: StructuredOutputsParams) -> Any:
    return {"type": "object"} if params.kind == "json_object" else params.json


def _checked_schema(params: StructuredOutputsParams) -> tuple[str, int]:
    schema = _schema(params)
    if OPTIONS in schema:
        raise params.error(f"{OPTIONS}: unknown keyword; disable_any_whitespace and whitespace_pattern are fields")
    options = json_options(params)

    def failure(candidate: Any) -> str | None:
        return failure_of(json_grammar(candidate, options))

    def place_and_reason() -> tuple[str, str] | None:
        for place, numbers in multiples_within_bounds(schema).items():
            if (reason := failure(numbers)) is not None:
                return place, reason
        reason = failure(schema)
        return None if reason is None else (place_of(schema, reason, failure), reason)

    try:
        text = check_schema(schema)
        check_keys(schema)
        found = call_with_stack(CHECK_STACK_BYTES, place_and_reason)
    except OutOfBounds as error:
        found = (error.place, str(error))
    if found is not None:
        raise params.error(f"the schema cannot be served at {found[0]}: {found[1]}")
    return json_grammar(schema, options), text.run.num_bytes if text is not None else 0


def _checked_lark(params: StructuredOutputsParams, lark: str) -> tuple[str, int]:
    try:
        text = check_lark(lark)
        # The last statement counts, and the grammar may have one of its own before.
        grammar = f"{_NO_FORCING}{with_schemas(lark, exact_schema)}\n{_NO_FORCING}"
    except OutOfBounds as error:
        place = f"{error.place}: " if error.place else ""
        raise params.error(f"{params.kind}: {place}{error}") from error
    reason = call_with_stack(CHECK_STACK_BYTES, failure_of, grammar)
    if reason is not None:
        raise params.error(f"{params.kind}: {reason}")
    return grammar, text.run.num_bytes if text is not None else 0


def _lark(params: StructuredOutputsParams) -> str:
    if params.kind == "regex":
        return _regex_lark(params)
    if params.kind == "choice":
        # A terminal: as a rule each of many would be an item of the parser's.
        texts = (json.dumps(text).replace("\x7f", "\\u007f") for text in params.choice or ())
        return "start: CHOICE\nCHOICE: " + " | ".join(texts)
    return _user_lark(params)


def _regex_lark(params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    return str(json.loads(LLMatcher.grammar_from_regex(str(params.regex)))["grammars"][0]["lark_grammar"])


def _user_lark(params: StructuredOutputsParams) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(str(params.grammar)))
    except Exception as error:  # the border to a converter that raises what it likes
        raise params.error(f"grammar: it cannot be read ({error})") from error


def place_of(schema: Any, reason: str, failure: Callable[[Any], str | None],
             spent: Callable[[], float] = time.thread_time) -> str:
    """Where in `schema` the failure lies, as a JSON pointer of a URI: #/properties/size. `failure` of the whole is
    `reason`; of a schema that can be served it is None. It is called about depth * log(number of parts) times. What was
    found by the hundredth time, or when half a second of the processor was `spent`, is the answer."""
    place: _Path = ()
    num_asked, began = 0, spent()

    def is_enough() -> bool:
        return num_asked >= _MOST_ASKED or spent() - began > _MOST_SECONDS

    def goes_away(keys: Sequence[str | int]) -> bool:
        nonlocal num_asked
        num_asked += 1
        emptied = schema
        for key in keys:
            emptied = _emptied(emptied, (*place, key))
        return failure(emptied) != reason

    while True:
        keys = _parts(_at(schema, place))
        if not keys or is_enough() or not goes_away(keys):
            return "#" + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in place)
        while len(keys) > 1 and not is_enough():
            half = keys[: len(keys) // 2]
            keys = half if goes_away(half) else keys[len(half):]
        if len(keys) == 1:
            place = (*place, *keys)


def _parts(node: Any) -> list[str | int]:
    """The keys of what can be looked into."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [key for key, value in items if isinstance(value, (dict, list)) and value]


def _at(schema: Any, path: _Path) -> Any:
    for key in path:
        schema = schema[key]
    return schema


def _emptied(schema: Any, path: _Path, name: str | int | None = None) -> Any:
    """A copy with nothing in the object or list at `path`, or with no way into it if it is a branch of `name`."""
    if not path:
        return False if name in _OF_BRANCHES and isinstance(schema, dict) else type(schema)()
    copy: Any = dict(schema) if isinstance(schema, dict) else list(schema)
    copy[path[0]] = _emptied(copy[path[0]], path[1:], name if isinstance(schema, list) else path[0])
    return copy
