"""All limits of a request, and the checks whose messages name value and limit. Knows no request.

They are checked before any data is decoded, tokenized, validated or queued. Generous ones are settings (RunnerConfig)
or options of the batch job (BatchOptions), whose defaults are these; docs/limits.md lists all of them.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from npu_runner.errors import RequestError

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits, each with its unit."""

    max_row_bytes: int = 256 * MIB
    """Bytes of a row."""
    max_nesting: int = 64
    """Lists and objects inside each other in a row's JSON."""
    max_json_values: int = 50_000
    """Values in a row's JSON: a list of 10 numbers has 11."""
    max_custom_id_chars: int = 1024
    """Characters of a custom_id; a row with a longer one is named by its line."""
    max_name_chars: int = 1024
    """Characters of `model` and of `user`."""
    max_messages: int = 4096
    """Messages of a conversation."""
    max_parts: int = 4096
    """Parts of all messages together."""
    max_images_per_prompt: int = 64
    """Images of a prompt; an image that comes twice counts twice, and is read once."""
    max_media_bytes: int = 64 * MIB
    """Bytes of one image's file or decoded data: URL."""
    max_prompt_media_bytes: int = 512 * MIB
    """Bytes of all different images of a prompt together."""
    max_path_chars: int = 4096
    """Characters of an address that is no data: URL."""
    max_source_pixels: int = 178_956_970  # what Pillow calls a decompression bomb
    """Pixels that an image's file declares."""
    max_video_seconds: int = 14_400
    """Seconds that a video's file declares."""
    max_video_frames: int = 1_000_000
    """Frames that a video's file declares, or has: they are counted before any is decoded."""
    max_video_pixels: int = 35_389_440  # 8192 x 4320, the most that H.264 has a level for
    """Pixels of one frame of a video."""
    max_stop_strings: int = 64
    """Entries of `stop`."""
    max_stop_chars: int = 1024
    """Characters of one stop string."""
    max_stop_token_ids: int = 1024
    """Entries of `stop_token_ids`."""
    max_allowed_token_ids: int = 262_144
    """Entries of `allowed_token_ids`; in a row `max_json_values` comes first."""
    max_bad_words: int = 256
    """Entries of `bad_words`."""
    max_bad_word_chars: int = 128
    """Characters of one bad word."""
    max_logit_bias: int = 1024
    """Entries of `logit_bias`."""
    max_pattern_size: int = 512
    """Tokens of a pattern that `repetition_detection` looks for."""
    max_ngram_window: int = 8192
    """Last tokens of an answer in which `no_repeat_ngram_size` finds repetitions; the default of
    `no_repeat_ngram_window`."""
    max_ngram_exempt_ids: int = 64
    """Entries of `no_repeat_ngram_exempt_ids`."""
    max_template_kwargs: int = 64
    """Entries of `chat_template_kwargs`."""
    max_template_kwargs_nesting: int = 8
    """Lists and objects inside each other in `chat_template_kwargs`, itself included."""
    max_template_kwargs_chars: int = 65_536
    """Characters of `chat_template_kwargs` as JSON."""
    max_tools: int = 128
    """Entries of `tools`, and of the `tool_calls` of one message."""
    max_tools_nesting: int = 32
    """Lists and objects inside each other in `tools` and in a call's `arguments`, itself included."""
    max_tools_chars: int = 262_144
    """Characters of `tools`, and of one call's `arguments`, as JSON."""
    max_schema_chars: int = 262_144
    """Characters of a JSON schema that an answer must fit."""
    max_schema_nesting: int = 60
    """Lists and objects inside each other in such a schema, itself included."""
    max_regex_chars: int = 16_384
    """Characters of a regular expression that an answer must match."""
    max_choices: int = 4096
    """Entries of `choice`."""
    max_grammar_chars: int = 262_144
    """Characters of a grammar, and of all entries of `choice` together."""
    max_rule_chain: int = 512
    """Definitions of a schema, or rules and terminals of a grammar, that lead to each other, one behind the other."""
    max_rule_levels: int = 4096
    """Levels of schemas, or of rules and groups, inside each other, over everything that they lead to."""
    max_rule_alternatives: int = 2048
    """Alternatives of one place of an answer, each of its properties counted as well: work grows with the square."""
    max_rule_parts: int = 10_000
    """Objects of a schema, its required names, binary digits of minItems and maxItems, what lists and objects of const
    and enum hold; definitions of a grammar, places with alternatives, repetitions (one that is counted by its binary
    digits), and 64 for each schema or grammar inside."""
    max_optional_parts: int = 512
    """Optional parts of one expression, or of a terminal: memory grows with the square."""
    max_all_optional_parts: int = 4096
    """The same of all expressions of a rule together."""
    max_rule_intersections: int = 8
    """Expressions that one text has to match."""
    max_rule_count: int = 2**31 - 1
    """minLength, maxItems and their like; how often a grammar repeats."""
    max_multiple_of: int = 16_384
    """`multipleOf` as an integer, without its factors 2 and 5: 0.75 is 3."""
    max_common_multiple: int = 2**20
    """The least common multiple of all values of `multipleOf` in a rule, without their factors 2 and 5."""
    max_bounded_multiples: int = 256
    """Different ones of `multipleOf` with bounds in one schema."""
    max_bounded_multiples_sum: int = 131_072
    """These values added up, as in `max_multiple_of`: each is tried by itself, which takes time in proportion."""
    max_pattern_properties: int = 64
    """Expressions in one `patternProperties`."""
    max_matcher_bytes: int = 256 * MIB
    """Bytes of what was built for rules of answers and is kept for rows to come."""
    max_embedding_inputs: int = 2048  # OpenAI's
    """Prompts of the `input` of a row for vectors."""
    max_labels: int = 512
    """Entries of `labels`."""
    max_documents: int = 2048
    """Documents of a row that is scored."""
    max_pairs_bytes: int = GIB
    """Bytes that a row's queries and documents take once they are prepared: of pixels, each image once, and 8 for each
    token."""
    max_logprobs_per_request: int = 262_144
    """n x max_tokens x (top_logprobs + 1) of a request that wants log probabilities; and of its prompt, where it wants
    those, tokens x (prompt_logprobs + 1)."""
    max_hidden_states_bytes: int = 4 * GIB
    """Bytes of the hidden states of a request: 4 x layers x hidden size x (prompt tokens + max_tokens - 1)."""
    worker_memory_bytes: int = 4 * GIB
    """Memory that preparing one row may take in its worker process."""


LIMITS = Limits()


def check_count(name: str, what: str, value: Sized | int, limit: int, code: str = "limit_exceeded") -> None:
    """RequestError, naming the field, the value and the limit, if there are more than `limit`."""
    count = value if isinstance(value, int) else len(value)
    if count > limit:
        raise field_error(name, f"{count} {what}, at most {limit} are allowed", code)


def field_error(field: str, what: str, code: str = "invalid_value") -> RequestError:
    """The error of one field of a request. The message begins with its name."""
    return RequestError(f"{field}: {what}", code, field)


def wrong_type(field: str, needed: str, value: object, code: str = "invalid_type") -> RequestError:
    return field_error(field, f"{needed} is needed, not {type(value).__name__}", code)


def given_fields(value: Any, name: str, known: Sequence[str], code: str) -> dict[str, Any]:
    """The fields of the object `value` that are not null. Raises RequestError for an unknown field, and, with `code`,
    for a value that is no object."""
    if not isinstance(value, Mapping):
        raise wrong_type(name, "an object", value, code)
    for each in value:
        if each not in known:
            field = f"{name}.{str(each)[:60]}"
            raise field_error(field, f"unknown field; {', '.join(known)} are known", "unknown_parameter")
    return {each: item for each, item in value.items() if item is not None}


def check_logprobs(n: int, max_tokens: int, num_top: int | None, limit: int) -> None:
    """Refuse more log probabilities than one answer may hold. `num_top`: None where none are wanted."""
    if num_top is None or n * max_tokens * (num_top + 1) <= limit:
        return
    most = limit // (n * (num_top + 1))
    remedy = f"max_tokens {most} would fit" if most else "raise that"
    raise field_error("logprobs", f"n {n} x max_tokens {max_tokens} x (top_logprobs {num_top} + 1) is "
                      f"{n * max_tokens * (num_top + 1)} log probabilities, at most {limit} are allowed "
                      f"(max_logprobs_per_request); {remedy}", "too_many_logprobs")


def check_prompt_logprobs(num_tokens: int, num_top: int | None, limit: int) -> None:
    """Refuse more log probabilities of a prompt of `num_tokens` than one answer may hold. `num_top`: as above."""
    if num_top is None or num_tokens * (num_top + 1) <= limit:
        return
    raise field_error("prompt_logprobs", f"{num_tokens} prompt tokens x ({num_top} most probable + 1) is "
                      f"{num_tokens * (num_top + 1)} log probabilities, at most {limit} are allowed "
                      "(max_logprobs_per_request); shorten the prompt or ask for fewer", "too_many_logprobs")


def plain_template_kwargs(value: Any) -> dict[str, Any]:
    """A copy of `value` that holds what JSON can say and nothing else. Raises RequestError where it is no such object,
    or too much of one."""
    name = "chat_template_kwargs"
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    check_count(name, "entries", value, LIMITS.max_template_kwargs)
    plain: dict[str, Any] = plain_json(
        name, value, max_nesting=LIMITS.max_template_kwargs_nesting, max_chars=LIMITS.max_template_kwargs_chars)
    return plain


def plain_json(name: str, value: Any, *, max_nesting: int, max_chars: int) -> Any:
    """A copy of `value` that holds what JSON can say. Raises RequestError, naming `name`, where it holds anything else
    or is too much."""
    _check_nesting(name, value, max_nesting)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (TypeError, ValueError) as error:  # half a surrogate pair is a ValueError, too
        raise field_error(name, f"JSON cannot say it ({error})") from error
    check_count(name, "characters of JSON", text, max_chars)
    return json.loads(text)


def _check_nesting(name: str, value: Any, limit: int, depth: int = 1) -> None:
    if not isinstance(value, (dict, list, tuple)):
        return
    if depth > limit:
        raise field_error(name, f"more than {limit} levels deep, at most {limit} are allowed", "nested_too_deep")
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        raise field_error(name, "a key is not a string", "invalid_type")
    for item in value.values() if isinstance(value, dict) else value:
        _check_nesting(name, item, limit, depth + 1)


def shown(value: object, num_chars: int = 60) -> str:
    """`value` as an error message may repeat it: whole if it is short."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = num_chars
    return short.repr(value)


def size(num_bytes: int) -> str:
    """Bytes as a message says them."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:.1f} KiB"
