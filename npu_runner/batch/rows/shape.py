"""A row as bytes: where it is read, how deep and how large its JSON is, and the name by which it is known.

Works a piece at a time and without recursion, so it needs the same small memory for every row and gives the same result
in every process, however deep in its stack. Knows nothing of what a row asks for.

Shapes: C characters of a piece.
"""

from __future__ import annotations

import hashlib
import json
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from npu_runner.errors import RequestError
from npu_runner.request.limits import LIMITS
from npu_runner.serving.replica import RawRow

KEY_BYTES = 16
CHECKSUM_BYTES = 8
PIECE_BYTES = 1 << 20
"""Rows are read in pieces of this size; one that is a single piece is read by the json module."""
_MAX_TOP_BYTES = 64 << 10
_QUOTE, _COMMA, _NESTED = ord('"'), ord(","), ord("0")
_STEP = np.zeros(256, dtype=np.int8)  # the change of depth at each byte outside of strings
_STEP[[ord("["), ord("{")]], _STEP[[ord("]"), ord("}")]] = 1, -1


def parse_json(text: str, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text, as json.loads has it. A whole number of more digits than Python converts (4,300) is
    infinite, as 1e999 is. Raises ValueError and RecursionError."""
    try:
        return json.loads(text, parse_constant=parse_constant)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_constant=parse_constant, parse_int=_whole_number)


def _whole_number(digits: str) -> int | float:
    is_short = len(digits.lstrip("-")) <= sys.get_int_max_str_digits()
    return int(digits) if is_short else float(digits)


@dataclass(frozen=True)
class RowShape:
    """`nesting`: most lists and objects inside each other; `num_values` of the JSON, if it is JSON at all.

    `top`: the row's outermost object with 0 for every value that is a list or an object; None: no whole object, or
    more than 64 KiB of it.
    """

    nesting: int
    num_values: int
    top: bytes | None

    def check(self) -> None:
        """Raises RequestError for a row that must not be parsed."""
        if self.nesting > LIMITS.max_nesting:
            raise RequestError(
                f"the row's JSON is {self.nesting} levels deep, at most {LIMITS.max_nesting} are allowed",
                "nested_too_deep")
        if self.num_values > LIMITS.max_json_values:
            raise RequestError(
                f"the row's JSON has {self.num_values} values, at most {LIMITS.max_json_values} are allowed",
                "too_many_json_values")


class ShapeReader:
    """Finds the shape of a row that comes in pieces."""

    def __init__(self) -> None:
        self._depth = self._nesting = 0
        self._num_values = 1
        self._is_in_string = self._is_mismatched = False
        self._rest = b""
        self._top: bytearray | None = bytearray()

    def feed(self, piece: bytes) -> None:
        """The next bytes, in order."""
        if self._is_in_string and self._depth > 1 and not self._rest and b'"' not in piece and b"\\" not in piece:
            return  # the middle of an image
        piece = self._rest + piece
        # Pairs of backslashes first: the one that is left before a quote then escapes it.
        flat = piece.replace(b"\\\\", b"__") if b"\\" in piece else piece
        self._rest = b"\\" if flat.endswith(b"\\") else b""
        if self._rest:
            flat, piece = flat[:-1], piece[:-1]
        flat = flat.replace(b'\\"', b"__")
        if self._is_in_string and b'"' not in flat:
            self._add_top(piece if self._depth <= 1 else b"")
        else:
            self._measure(np.frombuffer(flat, dtype=np.uint8), np.frombuffer(piece, dtype=np.uint8))

    def shape(self) -> RowShape:
        """The shape, once all of the row is fed."""
        is_whole = not (self._depth or self._is_in_string or self._is_mismatched or self._rest)
        top = bytes(self._top) if is_whole and self._top is not None else None
        return RowShape(self._nesting, self._num_values, top)

    def _measure(self, flat_C: np.ndarray, text_C: np.ndarray) -> None:
        is_quote_C = flat_C == _QUOTE
        # Odd: within a string. Quotes are counted modulo 256, which keeps them odd or even.
        in_string_C = (np.cumsum(is_quote_C, dtype=np.uint8) + np.uint8(self._is_in_string)) & 1
        step_C = _STEP[flat_C] * (in_string_C ^ 1)  # a quote steps nowhere
        depth_C = np.cumsum(step_C, dtype=np.int32) + self._depth
        num_commas = np.count_nonzero((flat_C == _COMMA) & (in_string_C == 0))
        self._num_values += int(np.count_nonzero(step_C == 1) + num_commas)
        if len(flat_C):
            self._nesting = max(self._nesting, int(depth_C.max()))
            self._is_mismatched |= int(depth_C.min()) < 0
            self._is_in_string, self._depth = bool(in_string_C[-1]), int(depth_C[-1])
        self._add_top(_outermost(text_C, depth_C, step_C))

    def _add_top(self, found: bytes) -> None:
        if self._top is not None:
            self._top += found
            if len(self._top) > _MAX_TOP_BYTES:
                self._top = None


def _pieces(row: bytes) -> Iterator[bytes]:
    return (row[start : start + PIECE_BYTES] for start in range(0, len(row), PIECE_BYTES))


def shape_of(row: bytes) -> RowShape:
    """The shape of a row that is in memory."""
    reader = ShapeReader()
    for piece in _pieces(row):
        reader.feed(piece)
    return reader.shape()


def check_shape(row: bytes) -> None:
    """Refuse a row whose JSON is nested too deeply, or holds more values than the memory has room for."""
    num_containers = row.count(b"[") + row.count(b"{")
    # Characters in strings count as well, so this is an upper bound. Nearly all rows end here.
    if num_containers > LIMITS.max_nesting or num_containers + row.count(b",") >= LIMITS.max_json_values:
        shape_of(row).check()


class NameReader:
    """Finds the name of a row that comes in pieces: its custom_id, if it is an object that has a usable one.

    A short row has to be JSON to have a name. A longer one is parsed on its outermost level alone.
    """

    def __init__(self) -> None:
        self._short: bytes | None = b""
        """All of the row, as long as it is short."""
        self._reader = ShapeReader()

    def feed(self, piece: bytes) -> None:
        """The next bytes, in order."""
        if self._short is None:
            self._reader.feed(piece)
        elif len(self._short) + len(piece) <= PIECE_BYTES:
            self._short += piece
        else:
            self._reader.feed(self._short + piece)
            self._short = None

    def name(self) -> str | None:
        """None: this row is named by its line."""
        if self._short is None:
            return _custom_id(self._reader.shape().top)
        num_containers = self._short.count(b"[") + self._short.count(b"{")
        if num_containers > LIMITS.max_nesting and (shape := shape_of(self._short)).nesting > LIMITS.max_nesting:
            return _custom_id(shape.top)
        return _custom_id(self._short)


def name_of(row: bytes) -> str | None:
    """The name of a row that is in memory."""
    return _name_in(_pieces(row))


def _name_in(pieces: Iterator[bytes]) -> str | None:
    reader = NameReader()
    for piece in pieces:
        reader.feed(piece)
    return reader.name()


class RowSource(Protocol):
    """Reads rows in any process of the job. Raises JobError when they are not what they were.

    A row that waits is a RawRow, the place of its bytes. The process that prepares it reads them, and drops them.
    """

    @abstractmethod
    def pieces(self, row: RawRow) -> Iterator[bytes]:
        """The row's bytes, in order, in pieces of bounded size."""

    def read(self, row: RawRow) -> bytes:
        return b"".join(self.pieces(row))

    def name(self, row: RawRow) -> str | None:
        """The row's custom_id; None: it is known by its line."""
        return _name_in(self.pieces(row))


def row_key(custom_id: str | None, line: int) -> bytes:
    """Names a row in 16 bytes: by its custom_id or, without a usable one, by its line."""
    name = f"line {line}" if custom_id is None else f"id {custom_id}"
    return hashlib.blake2b(name.encode("utf-8"), digest_size=KEY_BYTES).digest()


def _custom_id(text: bytes | None) -> str | None:
    if text is None:
        return None
    try:
        row = parse_json(text.decode("utf-8"))
        value = row.get("custom_id") if isinstance(row, dict) else None
        if not isinstance(value, str) or not 0 < len(value) <= LIMITS.max_custom_id_chars:
            return None
        value.encode("utf-8")  # half a surrogate pair can be spelled in JSON and written nowhere
    except ValueError:
        return None
    return value


def _outermost(text_C: np.ndarray, depth_C: np.ndarray, step_C: np.ndarray) -> bytes:
    """The bytes directly in the outermost object, and 0 for each list or object in it."""
    begins_C = (step_C == 1) & (depth_C == 2)
    ends_C = (step_C == -1) & (depth_C == 1)
    places = np.flatnonzero(((depth_C <= 1) & ~ends_C) | begins_C)
    return np.where(begins_C[places], np.uint8(_NESTED), text_C[places]).tobytes()
