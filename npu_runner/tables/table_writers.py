"""Writes lines of cells in one format, a part at a time. Knows nothing of answers.

The same cells give the same bytes, as long as pyarrow is the same.
"""

from __future__ import annotations

import functools
import json
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import numpy as np

from npu_runner.batch.rows.logprobs_json import encoded, to_json
from npu_runner.tables.arrow_records import pyarrow_for
from npu_runner.tables.column_types import BOOL, DOUBLE, INT64, LIST, TEXT, UINT64, VECTOR32, as_type

_ROWS_AT_ONCE = 16_384
_BYTES_AT_ONCE = 16 << 20
# A spreadsheet that splits the file at another character than the comma starts a cell behind each of that character.
_FORMULA = re.compile("(?:^|(?<=[;|\t\r\n]))(?=[=+@\t\r\uff1d\uff0b\uff0d\uff20-])")


class TableWriter:
    """`columns`: their types, by name, in order."""

    def __init__(self, file: BinaryIO, columns: Mapping[str, str]):
        self.file = file
        self.columns = columns

    def write(self, cells: Mapping[str, Any]) -> None:
        """One line; cells that are not there are empty."""
        self.add([as_type(cells.get(name), kind) for name, kind in self.columns.items()])

    @abstractmethod
    def add(self, values: list[Any]) -> None:
        """One line, a value of its column's type for each column."""

    def finish(self) -> None:
        """Write the rest, so that the file is complete."""


class JsonlWriter(TableWriter):
    """An object a line, with every column."""

    def add(self, values: list[Any]) -> None:
        named = {name: _as_list(value) if isinstance(value, np.ndarray) else value
                 for name, value in zip(self.columns, values, strict=True)}
        self.file.write(encoded(to_json(named)) + b"\n")


class CsvWriter(TableWriter):
    """Texts are quoted where they must be, and where they are empty: an empty cell without quotes has no value."""

    def __init__(self, file: BinaryIO, columns: Mapping[str, str], *, is_excel_safe: bool = False):
        super().__init__(file, columns)
        self._is_excel_safe = is_excel_safe
        self.add(list(columns))

    def add(self, values: list[Any]) -> None:
        self.file.write(encoded(",".join(map(self._cell, values))) + b"\n")

    def _cell(self, value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, (int, float)):
            return repr(value)
        if isinstance(value, np.ndarray):
            value = _as_list(value)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self._is_excel_safe:
            text = _FORMULA.sub("'", text)
        is_quoted = (self._is_excel_safe or not text or any(character in text for character in ',"\n\r')
                     or text != text.strip())
        return '"' + text.replace('"', '""') + '"' if is_quoted else text


class ParquetTable(TableWriter):
    """In groups of bounded size, through pyarrow."""

    def __init__(self, file: BinaryIO, columns: Mapping[str, str]):
        super().__init__(file, columns)
        self._arrow = pyarrow_for("Parquet")
        import pyarrow.parquet

        self._schema = self._arrow.schema([(name, self._type(kind)) for name, kind in columns.items()])
        self._parquet = pyarrow.parquet.ParquetWriter(file, self._schema)
        self._lines: list[list[Any]] = []
        self._num_bytes = 0

    def add(self, values: list[Any]) -> None:
        self._lines.append(values)
        self._num_bytes += sum(len(value) for value in values if isinstance(value, (str, list)))
        self._num_bytes += sum(value.nbytes for value in values if isinstance(value, np.ndarray))
        if len(self._lines) >= _ROWS_AT_ONCE or self._num_bytes >= _BYTES_AT_ONCE:
            self._flush()

    def finish(self) -> None:
        self._flush()
        self._parquet.close()

    def _flush(self) -> None:
        if not self._lines:
            return
        columns = zip(*self._lines, strict=True)
        arrays = [self._arrow.array(values, type=field.type)
                  for values, field in zip(columns, self._schema, strict=True)]
        self._parquet.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))
        self._lines, self._num_bytes = [], 0

    def _type(self, kind: str) -> Any:
        arrow = self._arrow
        if kind.startswith(LIST):
            return arrow.list_(self._type(kind.removeprefix(LIST)))
        made = {BOOL: arrow.bool_, INT64: arrow.int64, UINT64: arrow.uint64, DOUBLE: arrow.float64, TEXT: arrow.string,
                VECTOR32: lambda: arrow.list_(arrow.float32())}
        return made[kind]()


class VectorsWriter(TableWriter):
    """NumPy's .npy: one array of float32, a vector of `size` numbers for each of `num_rows` lines; NaN where there is
    none."""

    def __init__(self, file: BinaryIO, columns: Mapping[str, str], *, num_rows: int, size: int):
        super().__init__(file, {name: kind for name, kind in columns.items() if kind == VECTOR32})
        self._none = np.full(size, np.nan, dtype="<f4").tobytes()
        described = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, size)}
        np.lib.format.write_array_header_1_0(file, described)

    def add(self, values: list[Any]) -> None:
        (vector,) = values
        self.file.write(self._none if vector is None else vector.astype("<f4").tobytes())


def text_writer(kind: str, is_excel_safe: bool) -> Callable[[BinaryIO, Mapping[str, str]], TableWriter]:
    """The writer of a format that has columns."""
    if kind == "csv":
        return functools.partial(CsvWriter, is_excel_safe=is_excel_safe)
    return ParquetTable if kind == "parquet" else JsonlWriter


def _as_list(vector_D: np.ndarray) -> list[float | None]:
    """Its numbers; null for those that JSON has not."""
    return [value if math.isfinite(value) else None for value in vector_D.tolist()]
