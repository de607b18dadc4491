"""Tells which rows ask for the same, and writes the answer of one of them under the name of another.

Rows are equal if their bytes are, but for the values of `custom_id` and of the body's `metadata`. A row for which that
is in doubt equals no other. Knows nothing of files, or of what a row asks for.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from npu_runner.batch.rows.logprobs_json import encoded, to_json
from npu_runner.batch.rows.openai_response import row_digest
from npu_runner.batch.rows.shape import KEY_BYTES
from npu_runner.request.limits import LIMITS

MAX_ROW_BYTES = 16 << 20
"""A larger row equals no other: it would have to be in memory as a whole."""
_MAX_METADATA_BYTES = 64 << 10
_MAX_METADATA_CONTAINERS = 32
_MAX_METADATA_KEYS = 8
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_STRINGS = re.compile(_STRING, re.DOTALL)
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*(' + _STRING + rb")", re.DOTALL)
_METADATA, _COLON = b'"metadata"', re.compile(rb"\s*:\s*")
_DECODER = json.JSONDecoder()
_CACHED_TOKENS = re.compile(rb'("cached_tokens":)\d+')
_NUM_SHARED_DIGITS = 24
"""Digits of a row's digest that the ids of its tool calls have."""


def equal_digest(row: bytes) -> bytes | None:
    """16 bytes, the same for rows that are equal and have usable names; None: the row equals no other.

    What stays of two rows is compared byte for byte, so a value is cut at the same place of both. If that was another
    place than the row's own `custom_id`, the names would stay, and names are unique.
    """
    found = _CUSTOM_ID.match(row, max(0, row.find(b'"custom_id"')))
    metadata = _metadata_spans(row)
    if found is None or metadata is None:
        return None
    digest, view, start = hashlib.blake2b(digest_size=KEY_BYTES), memoryview(row), 0
    for begin, end in sorted([found.span(1), *metadata]):
        if begin < start:
            return None
        digest.update(view[start:begin])
        start = end
    digest.update(view[start : len(row) - row.endswith(b"\n")])
    return digest.digest()


def _metadata_spans(row: bytes) -> list[tuple[int, int]] | None:
    """The values of each `metadata` in an object in the outermost object. None: one of them is in doubt."""
    spans, place = list[tuple[int, int]](), -1
    for _ in range(_MAX_METADATA_KEYS):
        place = row.find(_METADATA, place + 1)
        if place < 0:
            # With other metadata a row of this number of values may be too large to be parsed.
            is_large = bool(spans) and len(row) >= LIMITS.max_json_values <= sum(map(row.count, (b",", b"[", b"{")))
            return None if is_large else spans
        value = _COLON.match(row, place + len(_METADATA))
        # Behind a backslash it is a part of a text.
        if value is None or row[place - 1 : place] == b"\\" or _depth(row, place, value.end()) != 2:
            continue
        size = _object_size(row[value.end() : value.end() + _MAX_METADATA_BYTES])
        if size is None:
            return None
        place = value.end() + size
        spans.append((value.end(), place))
    return None


def _depth(row: bytes, key: int, value: int) -> int:
    """The number of lists and objects around a member, counted on its shorter side."""
    sign, side = (1, row[:key]) if key < len(row) - value else (-1, row[value:])
    rest = _STRINGS.sub(b"", side)
    return sign * (sum(map(rest.count, (b"{", b"["))) - sum(map(rest.count, (b"}", b"]"))))


def _object_size(data: bytes) -> int | None:
    """The bytes of the JSON object, or the null, that `data` begins with. None: it begins with no other, or with one
    that is large."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        value, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, (dict, type(None))) or (value and "label" in value):
        return None  # a ladder judges an answer by its label
    found = text[:end]
    if found.count("{") + found.count("[") > _MAX_METADATA_CONTAINERS:
        return None
    try:
        return len(found.encode("utf-8"))
    except UnicodeEncodeError:  # it was no UTF-8
        return None


# -- the answer of an equal row ----------------------------------------------------------------------------------------


def renamed_answer(line: bytes, name: str, new_name: str, num_prompt_tokens: int) -> bytes | None:
    """The result row of `name` as that of `new_name`. Its prompt counts as cached, if it counts such tokens. None: the
    line is not as this version writes it."""
    old, new = row_digest(name).encode(), row_digest(new_name).encode()
    head, new_head = (_head(*each) for each in ((name, old), (new_name, new)))
    if not line.startswith(head):
        return None
    short, rest = old[:_NUM_SHARED_DIGITS], old[_NUM_SHARED_DIGITS:]
    # In a text of the answer these quotes would stand behind backslashes.
    ids = re.compile(rb'("(?:request_)?id":"[a-z_-]*)' + short + b"(" + rest + b")?")
    renamed = ids.sub(lambda found: found[1] + (new if found[2] else new[:_NUM_SHARED_DIGITS]), line[len(head) :])
    usage = max(0, renamed.rfind(b'"cached_tokens":'))
    return new_head + renamed[:usage] + _CACHED_TOKENS.sub(rb"\g<1>%d" % num_prompt_tokens, renamed[usage:], count=1)


def _head(name: str, digest: bytes) -> bytes:
    members: dict[str, Any] = {"id": f"batch_req_{digest.decode()}", "custom_id": name}
    return encoded(to_json(members).removesuffix("}"))
