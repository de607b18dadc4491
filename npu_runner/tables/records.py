"""Records: what one row will be made of, whatever kind of source it comes from. Knows nothing of rows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_runner.errors import ConfigError
from npu_runner.tables.arrow_records import arrow_records, num_arrow_records
from npu_runner.tables.sources import ARROW, CSV, MEDIA, PARQUET, Source, Sources
from npu_runner.tables.text_records import csv_records, json_records

Columns = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """`id`: unique, relative to the root of the sources. `where`: for messages."""

    id: str
    where: str
    columns: Columns
    file: Source | None = None
    """The image or video that the record is; None: it comes from a table."""
    media_columns: Mapping[str, str | None] = field(default_factory=dict)
    """Columns that hold files in the form of Hugging Face's datasets, and what the schema calls these (Image, Video,
    Audio, ...); None: it does not say."""
    is_text: bool = False
    """Its cells are text, as those of a CSV: an empty text is an empty cell."""

    @property
    def cells(self) -> dict[str, Any]:
        """By column; None where one is empty."""
        return {name: None if self.is_text and value == "" else without_nan(value)
                for name, value in self.columns.items()}

    def value(self, column: str) -> Any:
        """None where it is empty, NaN included. Raises ConfigError for a column that is not there."""
        if column not in self.columns:
            known = ", ".join(map(repr, list(self.columns)[:20]))
            raise ConfigError(f"{self.where}: there is no column {column!r}; it has {known}")
        return without_nan(self.columns[column])


def without_nan(value: Any) -> Any:
    """Tables of numbers have no other word for an empty cell."""
    return None if isinstance(value, float) and math.isnan(value) else value


class Reader:
    """All records of the sources, again and again. `needed`: columns that are looked at; None: all.

    `delimiter`, `encoding`: those of CSV files; None: as the file says, else a comma or a tab, and UTF-8.
    """

    def __init__(self, sources: Sources, *, delimiter: str | None = None, encoding: str | None = None,
                 needed: frozenset[str] | None = None):
        self.sources = sources
        self._delimiter, self._encoding = delimiter, encoding
        self._needed = needed

    def records(self) -> Iterator[Record]:
        """In an order that follows from names and contents alone."""
        for source in self.sources.files():
            yield from self._of(source)

    def count(self) -> int:
        return sum(self._count_of(source) for source in self.sources.files())

    def sample(self, num_wanted: int) -> Iterator[Record]:
        """So many of them, evenly; all where there are fewer."""
        total = self.count()
        if num_wanted >= total:
            yield from self.records()
            return
        chosen = 0
        for place, record in enumerate(self.records()):
            if chosen < num_wanted and place == chosen * total // num_wanted:
                chosen += 1
                yield record

    def _of(self, source: Source) -> Iterator[Record]:
        name = self.sources.shown(source.path)
        if source.kind in MEDIA:
            folder, base = os.path.split(name)
            yield Record(name, repr(name), {"path": name, "name": base, "folder": folder}, source)
            return
        for number, (where, columns, media) in enumerate(self._of_table(source), 1):
            yield Record(f"{name}#{number}", f"{name!r}, {where}", columns, None, media, is_text=source.kind == CSV)

    def _count_of(self, source: Source) -> int:
        if source.kind in MEDIA:
            return 1
        if source.kind in (PARQUET, ARROW):
            return num_arrow_records(source.path, is_parquet=source.kind == PARQUET)
        return sum(1 for _ in self._of_table(source))

    def _of_table(self, source: Source) -> Iterator[tuple[str, Columns, Mapping[str, str | None]]]:
        """(where, columns, Record's media_columns)."""
        if source.kind in (PARQUET, ARROW):
            return arrow_records(source.path, self._needed, is_parquet=source.kind == PARQUET)
        found: Iterator[tuple[str, Columns]] = (
            csv_records(source.path, self._delimiter, self._encoding) if source.kind == CSV
            else json_records(source.path))
        return ((where, columns, {}) for where, columns in found)
