"""The first reading of rows and answers, which finds the columns of a table, their types and the size of vectors.

A result row becomes one line of cells for each of its answers. Nothing depends on the order in which answers finished.
Knows nothing of formats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from npu_runner.batch.rows import endpoints
from npu_runner.batch.rows.attempt import ATTEMPTS, BEST_OF, attempts_of
from npu_runner.batch.rows.openai_response import PAGE, error_of, has_failed, name_of_answer, object_in
from npu_runner.batch.rows.shape import parse_json
from npu_runner.errors import ConfigError
from npu_runner.tables.column_types import BOOL, DOUBLE, INT64, LIST, TEXT, VECTOR32, Seen, declared_types

Answer = dict[str, Any]
Cells = dict[str, Any]
FIELD, METADATA, PROB = "answer.", "metadata.", "prob."
"""The names of columns of fields of answers, of metadata of rows, and of probabilities of rows' labels start so. No
other name has a dot."""
MORE_METADATA = "metadata"
VECTOR, SCORE, LABEL, PROBS = "vector", "score", "label", "probs"
LOGPROB, PROMPT_COUNT = "mean_logprob", "prompt_tokens"
TEXT_COLUMNS = ("text", "reasoning", "tool_calls", "finish_reason", "stop_reason")
COUNT_COLUMNS = ("completion_tokens", "reasoning_tokens")
PAGE_FACTS = {"blank": BOOL, "width": INT64, "height": INT64, "text_layer": BOOL}
"""Facts of the page of a document that a row shows, which get columns. A row of several pages has none here."""
ERROR_COLUMNS = ("error_code", "error_message")
MAX_FIELDS = 256
"""Fields beside a schema's that get columns. Answers with more of them are no table; they stay text."""
MAX_METADATA = 256
"""Names of metadata that get columns: those of most rows. The others are in one column of JSON."""
MAX_LABELS = 64
"""Labels that get columns, where all rows have the same."""
_MAX_CANDIDATES = 4096
"""Only this many names of metadata are counted, the first ones, so that rows cannot fill the memory."""
_MAX_NAME_CHARS = 256
_POOLED = {VECTOR: VECTOR32, SCORE: DOUBLE, LABEL: TEXT, PROBS: LIST + DOUBLE}


def cells_of(answer: Answer) -> list[Cells]:
    """The cells of each answer of a row; a failed row is one line. A column that is not there is empty. Raises one of
    FAULTS for a row that is no answer of an endpoint."""
    name = name_of_answer(answer)
    if has_failed(answer):
        error = error_of(answer)
        return [{"custom_id": name, "error_code": error.get("code"), "error_message": error.get("message"),
                 **_attempts(answer)}]
    page = answer.get(PAGE)
    facts = {f"{PAGE}_{fact}": page.get(fact) for fact in PAGE_FACTS} if isinstance(page, dict) else {}
    more = {**facts, **_attempts(answer)}
    return [{"custom_id": name, **cells, **more} for cells in endpoints.cells_of(answer["response"]["body"])]


def _attempts(answer: Answer) -> Cells:
    later = attempts_of(answer)
    return {ATTEMPTS: 1 + len(later), BEST_OF: bool(answer.get(BEST_OF))} if later else {}


class FirstPass:
    """`schema` of all answers; None: rows may have their own. `columns` are complete once both files were read."""

    def __init__(self, schema: Any):
        self.vector_size = 0
        self.sizes_differ: str | None = None
        """The words that name two vectors of different sizes."""
        self.has_more_metadata = False
        self._size_of = ""
        self._names: set[str] = set()
        """The names of the cells of all answers."""
        self._metadata: dict[str, Seen] = {}
        self._declared: dict[str, str | None] = declared_types(schema)
        self._has_schema = schema is not None
        self._fields: dict[str, Seen] = {}
        self._schemas: set[bytes] = set()
        self._labels: set[tuple[str, ...]] = set()
        """The labels of the rows, at most two different lists."""

    def add_request(self, request: Mapping[str, Any]) -> None:
        metadata = metadata_of(request)
        for name, value in list(_named(metadata).items())[:MAX_METADATA]:
            if name in self._metadata or len(self._metadata) < _MAX_CANDIDATES:
                self._metadata.setdefault(name, Seen()).add(value)
        self.has_more_metadata |= len(metadata) > MAX_METADATA or not all(map(_may_be_column, metadata))
        if (labels := labels_of(request)) and len(self._labels) < 2:
            self._labels.add(labels)
        schema = None if self._has_schema else _schema_of(_object(request.get("body")))
        if schema is None:
            return
        digest = hashlib.blake2b(json.dumps(schema).encode(), digest_size=16).digest()
        if digest in self._schemas:
            return
        self._schemas.add(digest)
        for name, kind in _named(declared_types(schema)).items():
            if name in self._declared or len(self._declared) < MAX_FIELDS:
                # Two schemas that do not agree declare nothing.
                self._declared[name] = kind if self._declared.get(name, kind) == kind else None

    def add_answer(self, answer: Answer) -> int:
        """Returns the number of lines in the table. Raises one of FAULTS for a row that is no answer."""
        lines = cells_of(answer)
        for cells in lines:
            self._names |= cells.keys() - set(ERROR_COLUMNS)
            if cells.get(VECTOR) is not None:
                self._add_vector(cells["custom_id"], cells[VECTOR].size)
            self._add_fields(_fields_of(cells.get("text")))
        return len(lines)

    def _add_vector(self, name: str, size: int) -> None:
        if not self.vector_size:
            self.vector_size, self._size_of = size, name
        if size != self.vector_size:
            self.sizes_differ = (f"the vector of {self._size_of!r} has {self.vector_size} numbers, that of {name!r} "
                                 f"has {size}")

    def _add_fields(self, fields: Mapping[str, Any]) -> None:
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

    def metadata_names(self) -> list[str]:
        """The names that most rows have, in the order in which they came."""
        if len(self._metadata) <= MAX_METADATA:
            return list(self._metadata)
        most = set(sorted(self._metadata, key=lambda name: -self._metadata[name].num_rows)[:MAX_METADATA])
        return [name for name in self._metadata if name in most]

    def label_names(self) -> tuple[str, ...]:
        """The labels of all rows; none, where they differ or are no names of columns."""
        (labels,) = self._labels if len(self._labels) == 1 else ((),)
        return labels if len(labels) <= MAX_LABELS and all(map(_may_be_column, labels)) else ()

    def columns(self) -> dict[str, str]:
        """Types by name, in order."""
        found = {"custom_id": TEXT, "index": INT64}
        found |= {f"{METADATA}{name}": self._metadata[name].type for name in self.metadata_names()}
        if self.has_more_metadata or len(self._metadata) > MAX_METADATA:
            found[MORE_METADATA] = TEXT
        found |= {name: kind for name, kind in _POOLED.items() if name in self._names}
        if PROBS in found and self._labels:
            labels = self.label_names()
            found |= {f"{PROB}{label}": DOUBLE for label in labels} if labels else {PROBS: TEXT}
            found = {name: kind for name, kind in found.items() if name != PROBS or not labels}
        if self._names.issuperset(TEXT_COLUMNS) or not self._names & _POOLED.keys():
            found |= {f"{FIELD}{name}": self._seen(name).type for name in self.field_names()}
            found |= {**dict.fromkeys(TEXT_COLUMNS, TEXT), LOGPROB: DOUBLE, **dict.fromkeys(COUNT_COLUMNS, INT64)}
        found |= {name: kind for fact, kind in PAGE_FACTS.items() if (name := f"{PAGE}_{fact}") in self._names}
        found |= {ATTEMPTS: INT64, BEST_OF: BOOL} if ATTEMPTS in self._names else {}
        return {**found, PROMPT_COUNT: INT64, **dict.fromkeys(ERROR_COLUMNS, TEXT)}

    def mixed(self) -> list[str]:
        """Columns that are text because their values are of several types."""
        seen = {**{f"{METADATA}{name}": self._metadata[name] for name in self.metadata_names()},
                **{f"{FIELD}{name}": self._seen(name) for name in self.field_names()}}
        return [name for name, each in seen.items() if each.is_mixed]

    def _seen(self, name: str) -> Seen:
        return self._fields.get(name) or Seen(self._declared.get(name))

    def require_one_size(self) -> None:
        """Raises ConfigError where there is no array of vectors."""
        if VECTOR not in self._names:
            raise ConfigError("npy: there is no vector among the answers; others go into .parquet, .csv or .jsonl")
        if self.sizes_differ is not None:
            raise ConfigError(f"npy: {self.sizes_differ}, and one array has vectors of one size; write .parquet")


def joiner(found: FirstPass) -> Callable[[Cells, Mapping[str, Any]], Cells]:
    """A function that adds the cells of an answer's own fields, of its row's metadata and of its row's labels."""
    field_names, metadata_names = set(found.field_names()), set(found.metadata_names())
    have_columns = bool(found.label_names())

    def join(cells: Cells, request: Mapping[str, Any]) -> Cells:
        metadata = metadata_of(request)
        if (probs := cells.get(PROBS)) is not None and len(labels := labels_of(request)) == len(probs):
            by_label = dict(zip(labels, probs, strict=True))
            cells = {**cells, **({f"{PROB}{label}": prob for label, prob in by_label.items()} if have_columns
                                 else {PROBS: by_label})}
        named = _named(metadata)
        more = {name: value for name, value in metadata.items() if _shown(name) not in named.keys() & metadata_names}
        return {**cells, **_columns(METADATA, named, metadata_names),
                **_columns(FIELD, _fields_of(cells.get("text")), field_names),
                **({MORE_METADATA: more} if more else {})}

    return join


def labels_of(request: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels that a row brings; none, where it brings no list of texts."""
    labels = _object(request.get("body")).get("labels")
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        return ()
    return tuple(labels)


def metadata_of(request: Mapping[str, Any]) -> Mapping[str, Any]:
    return _object(_object(request.get("body")).get("metadata"))


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _columns(prefix: str, values: Mapping[str, Any], names: set[str]) -> Cells:
    return {f"{prefix}{name}": value for name, value in values.items() if name in names}


def _fields_of(text: Any) -> Mapping[str, Any]:
    return _named(object_in(text, is_strict=True) or {}) if isinstance(text, str) else {}


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose names can be a column's. JSON can spell half a surrogate pair, which no file can hold: a name
    shows how it is spelled."""
    return {_shown(name): value for name, value in values.items() if _may_be_column(name)}


def _shown(name: str) -> str:
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def _may_be_column(name: str) -> bool:
    return len(name) <= _MAX_NAME_CHARS


def _schema_of(body: Mapping[str, Any]) -> Any:
    """The schema that a row sets for its answer; None: it sets none."""
    described = body.get("response_format")
    if isinstance(described, dict) and isinstance(described.get("json_schema"), dict):
        return described["json_schema"].get("schema")
    rule = body.get("structured_outputs")
    schema = rule.get("json") if isinstance(rule, dict) else body.get("guided_json")
    if not isinstance(schema, str):
        return schema
    try:
        return parse_json(schema)
    except (ValueError, RecursionError):
        return None
