"""What a first reading of rows and answers finds out: the columns of a table, their types, the size of vectors.

Nothing of it depends on the order in which answers finished. Knows nothing of formats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from npu_runner.batch.rows.openai_response import name_of_answer, object_in
from npu_runner.errors import ConfigError
from npu_runner.tables.answer_cells import (
    COUNT_COLUMNS,
    ERROR_COLUMNS,
    FIELD,
    LOGPROB,
    METADATA,
    PROMPT_COUNT,
    TEXT_COLUMNS,
    VECTOR,
    Cells,
    cells_of,
)
from npu_runner.tables.answer_files import Answer
from npu_runner.tables.column_types import DOUBLE, INT64, TEXT, VECTOR32, Seen, declared_types

MAX_FIELDS = 256
"""Fields beside a schema's that get columns. Answers with more of them are no table; they stay text."""


class FirstPass:
    """`schema`: of all answers; None: rows may have their own. Columns are in `columns` once both files were read."""

    def __init__(self, schema: Any):
        self.has_vectors = self.has_texts = False
        self.vector_size = 0
        self.sizes_differ: str | None = None
        """Says which vectors are no part of one array."""
        self._size_of = ""
        self._metadata: dict[str, Seen] = {}
        self._declared: dict[str, str | None] = declared_types(schema)
        self._has_schema = schema is not None
        self._fields: dict[str, Seen] = {}
        self._schemas: set[str] = set()

    def look_at_row(self, metadata: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        for name, value in metadata.items():
            self._metadata.setdefault(name, Seen()).add(value)
        schema = None if self._has_schema else _schema_of(body)
        if schema is None or (text := json.dumps(schema)) in self._schemas:
            return
        self._schemas.add(text)
        for name, kind in declared_types(schema).items():
            # Two schemas that do not agree declare nothing.
            self._declared[name] = kind if self._declared.get(name, kind) == kind else None

    def look_at_answer(self, answer: Answer) -> int:
        """Returns how many lines of the table it becomes."""
        num_lines = 0
        for cells in cells_of(answer):
            num_lines += 1
            if cells.get(VECTOR) is not None:
                self._look_at_vector(answer, cells[VECTOR].size)
            elif "error_code" not in cells:
                self.has_texts = True
                self._look_at_fields(_fields_of(cells["text"]))
        return num_lines

    def _look_at_vector(self, answer: Answer, size: int) -> None:
        self.has_vectors = True
        if not self.vector_size:
            self.vector_size, self._size_of = size, name_of_answer(answer)
        if size != self.vector_size:
            self.sizes_differ = (f"the vector of {self._size_of!r} has {self.vector_size} numbers, that of "
                                 f"{name_of_answer(answer)!r} has {size}")

    def _look_at_fields(self, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            if name not in self._fields and len(self._fields) > MAX_FIELDS + len(self._declared):
                continue  # too many already: none will be a column but the schema's
            self._fields.setdefault(name, Seen(self._declared.get(name))).add(value)

    @property
    def _others(self) -> list[str]:
        """Fields that no schema has, by name."""
        return sorted(self._fields.keys() - self._declared.keys())

    @property
    def has_too_many_fields(self) -> bool:
        return len(self._others) > MAX_FIELDS

    def field_names(self) -> list[str]:
        return [*self._declared, *([] if self.has_too_many_fields else self._others)]

    def columns(self) -> dict[str, str]:
        """Types by name, in order."""
        metadata = {f"{METADATA}{name}": seen.type for name, seen in self._metadata.items()}
        found = {"custom_id": TEXT, "index": INT64, **metadata}
        if self.has_vectors:
            found[VECTOR] = VECTOR32
        if self.has_texts or not self.has_vectors:
            found |= {f"{FIELD}{name}": self._seen(name).type for name in self.field_names()}
            found |= {**dict.fromkeys(TEXT_COLUMNS, TEXT), LOGPROB: DOUBLE, **dict.fromkeys(COUNT_COLUMNS, INT64)}
        return {**found, PROMPT_COUNT: INT64, **dict.fromkeys(ERROR_COLUMNS, TEXT)}

    def mixed(self) -> list[str]:
        """Columns that are text because their values are of several types."""
        seen = {**{f"{METADATA}{name}": each for name, each in self._metadata.items()},
                **{f"{FIELD}{name}": self._seen(name) for name in self.field_names()}}
        return [name for name, each in seen.items() if each.is_mixed]

    def _seen(self, name: str) -> Seen:
        return self._fields.get(name) or Seen(self._declared.get(name))

    def require_one_size(self) -> None:
        """Raises ConfigError where there is no array of vectors."""
        if not self.has_vectors:
            raise ConfigError("npy: there is no vector among the answers; texts go into .parquet, .csv or .jsonl")
        if self.sizes_differ is not None:
            raise ConfigError(f"npy: {self.sizes_differ}, and one array has vectors of one size; write .parquet")


def with_fields(cells: Cells, names: list[str], metadata: Mapping[str, Any]) -> Cells:
    """Cells with those of the row's metadata and of the answer's own fields."""
    fields = _fields_of(cells.get("text"))
    return {**cells, **{f"{METADATA}{name}": value for name, value in metadata.items()},
            **{f"{FIELD}{name}": fields[name] for name in names if name in fields}}


def _fields_of(text: Any) -> Mapping[str, Any]:
    return (object_in(text, is_strict=True) or {}) if isinstance(text, str) else {}


def _schema_of(body: Mapping[str, Any]) -> Any:
    """What a row says its answer has to fit; None: nothing."""
    described = body.get("response_format")
    if isinstance(described, dict) and isinstance(described.get("json_schema"), dict):
        return described["json_schema"].get("schema")
    rule = body.get("structured_outputs")
    schema = rule.get("json") if isinstance(rule, dict) else body.get("guided_json")
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        return None
