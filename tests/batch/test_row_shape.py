"""A row's name, depth and size as found on bytes, against what the json module says of the same row."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_runner.batch.rows import shape
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.batch.rows.shape import NameReader, ShapeReader, check_shape, name_of, shape_of
from npu_runner.errors import RequestError
from npu_runner.request.limits import LIMITS

NASTY = st.text(st.sampled_from('{}[]",:\\ab \n\t\u00e9\u2028\U0001f600'), max_size=6)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), NASTY),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(NASTY, inner, max_size=4)),
    max_leaves=12,
)
ROWS = st.dictionaries(st.one_of(st.just("custom_id"), NASTY), VALUES, max_size=4)


def in_pieces(data: bytes, size: int) -> ShapeReader:
    reader = ShapeReader()
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size])
    return reader


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def num_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(num_values, inner))


@given(value=VALUES, escapes=st.booleans(), size=st.integers(1, 9))
def test_the_shape_is_what_json_finds_wherever_the_pieces_are_cut(value: Any, escapes: bool, size: int) -> None:
    data = json.dumps(value, ensure_ascii=escapes).encode()
    found = in_pieces(data, size).shape()
    assert found == shape_of(data)
    assert found.nesting == depth_of(value)
    # An empty list counts as one that has a value: never less than there are.
    assert num_values(value) <= found.num_values <= num_values(value) + data.count(b"[]") + data.count(b"{}")


def names(data: bytes, size: int) -> list[str | None]:
    """As a short row, and as a long one in pieces."""
    found = [name_of(data)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape, "PIECE_BYTES", 0)
        reader = NameReader()
        for start in range(0, len(data), size):
            reader.feed(data[start : start + size])
        found.append(reader.name())
    return found


@given(row=ROWS, twice=st.one_of(st.none(), VALUES), escapes=st.booleans(), size=st.integers(1, 9))
def test_short_or_long_a_row_is_called_what_json_says(
    row: dict[str, Any], twice: Any, escapes: bool, size: int
) -> None:
    data = json.dumps(row, ensure_ascii=escapes).encode()
    if twice is not None and row:
        data = data[:-1] + b', "custom\\u005fid" : ' + json.dumps(twice).encode() + b" }\n"
    expected = json.loads(data).get("custom_id")
    usable = expected if isinstance(expected, str) and expected else None
    assert names(data, size) == [usable, usable]


@given(data=st.lists(st.sampled_from([b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"1", b'"custom_id"', b"\xff",
                                      b"\0", b'"a"', b" "]), max_size=14).map(b"".join), size=st.integers(1, 5))
def test_no_bytes_at_all_make_the_name_depend_on_the_pieces(data: bytes, size: int) -> None:
    short, long = names(data, size)
    assert long == names(data, len(data) or 1)[1]
    try:
        expected = json.loads(data.decode("utf-8"))
    except ValueError:
        assert short is None
        return
    assert short == long == (expected.get("custom_id") or None if isinstance(expected, dict) else None)


def nested(depth: int, custom_id: str = "a") -> bytes:
    return b'{"custom_id": "%s", "body": %s%s}' % (custom_id.encode(), b"[" * (depth - 1), b"]" * (depth - 1))


def test_the_deepest_row_is_parsed_and_the_next_one_refused_by_depth_and_limit() -> None:
    assert read_json(nested(LIMITS.max_nesting))["custom_id"] == "a"
    for depth in (LIMITS.max_nesting + 1, 995, 100_000, 3_000_000):
        with pytest.raises(RequestError, match=f"{depth} levels deep, at most {LIMITS.max_nesting}") as caught:
            read_json(nested(depth))
        assert caught.value.code == "nested_too_deep"
        assert name_of(nested(depth)) == "a", "it has a name nevertheless"


def test_a_row_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    most = LIMITS.max_json_values
    for count, item in ((most - 3, b"1"), (most // 2 - 3, b"{}")):
        check_shape(b'{"body": [%s]}' % b",".join([item] * count))
    for item in (b"1", b"{}", b'"x"', b"[1]"):
        with pytest.raises(RequestError, match=f"at most {most}") as caught:
            read_json(b'{"body": [%s]}' % b",".join([item] * (most + 1)))
        assert caught.value.code == "too_many_json_values"
    check_shape(b'{"body": "%s"}' % (b"[{," * most)), "brackets in a text are text"


def test_a_name_is_no_longer_than_its_limit() -> None:
    longest = "n" * LIMITS.max_custom_id_chars
    assert name_of(nested(2, longest)) == longest
    assert name_of(nested(2, longest + "n")) is None
