"""Whatever a model answers and a row has for metadata is a cell in each format: one row costs no other its table."""

from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from npu_runner.errors import ConfigError
from npu_runner.tables.first_pass import MAX_METADATA
from tests.full_set import examples
from tests.tables.made import POOLED, answered, answered_by, begun, completion, failed, request, table

EASY = settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FORMATS = ("parquet", "csv", "jsonl")
LONG = "9" * 5000
SPELLED = {"<1e999>": "1e999", "<-1e999>": "-1e999", "<long>": LONG, "<-long>": "-" + LONG}
"""What json.dumps cannot write: it stands in the value as a text."""
TEXTS = st.sampled_from(["", "a", "\ud800", "x\udfff", "\x00", "\ufeff", "=1", '"', ",", "\r\n", "\u2028", "é"]) \
    | st.text(st.characters(codec=None), max_size=5)  # fmt: skip
PLAIN = (st.none() | st.booleans() | st.integers() | st.integers(2**53 - 1, 2**64 + 1) | st.integers(10**400, 10**401)
         | st.floats() | TEXTS | st.sampled_from(sorted(SPELLED)))  # fmt: skip
NAMES = st.sampled_from(["a", "b", "c"]) | TEXTS | st.just("n" * 300)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
                      max_leaves=6)  # fmt: skip
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=4)


def as_json(value: Any) -> str:
    text = json.dumps(value)
    for marked, spelled in SPELLED.items():
        text = text.replace(f'"{marked}"', spelled)
    return text


def row_with(name: str, metadata: Any) -> bytes:
    return request(name, metadata={}).replace(b'"metadata": {}', b'"metadata": ' + as_json(metadata).encode())


def tables(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """The lines of the table, which are the same in each format."""
    for kind in FORMATS:
        table(folder / "a.jsonl", folder / f"t.{kind}", **options)
    lines: list[dict[str, Any]] = pq.read_table(folder / "t.parquet").to_pylist()
    for line in lines:  # a vector may hold infinity, but not in JSON
        if line.get("vector") is not None:
            line["vector"] = [value if math.isfinite(value) else None for value in line["vector"]]
    assert [json.loads(line, parse_constant=pytest.fail) for line in (folder / "t.jsonl").read_bytes().splitlines()] \
        == lines  # fmt: skip
    with open(folder / "t.csv", encoding="utf-8", newline="") as file:
        cells = list(csv.reader((line.replace("\0", "0") for line in file), strict=True))
    assert [len(line) for line in cells] == [len(cells[0])] * (1 + len(lines))
    assert len(cells[0]) == len(lines[0])
    return lines


@EASY
@given(st.lists(st.tuples(OBJECTS, OBJECTS), min_size=1, max_size=4))
@example([({"x": "<1e999>"}, {"m": float("nan")}), ({"x": 1.5}, {"m": 1})])
@example([({"\ud800": 1}, {"\ud800": 1, "?": 2}), ({"a": ["\ud800"]}, {"a": "\ud800"})])
@example([({"a": {"b": [float("inf"), "<1e999>"]}}, {"a": [[float("nan")], {"": "<long>"}]}), ({"a": 1}, {"a": True})])
@example([({"a": "<long>"}, {"a": "<-long>"}), ({"a": 10**400}, {"a": 10**400}), ({"a": 0.5}, {"a": 0.5})])
def test_any_answer_and_any_metadata_is_a_cell(tmp_path: Path, rows: list[tuple[Any, Any]]) -> None:
    names = [f"r{number}" for number in range(len(rows))]
    (tmp_path / "in.jsonl").write_bytes(b"".join(row_with(name, metadata) for name, (_, metadata) in
                                                 zip([*names, "failed"], [*rows, rows[0]], strict=True)))  # fmt: skip
    answers = [answered(name, completion(as_json(value))) for name, (value, _) in zip(names, rows, strict=True)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(answers) + failed("failed", "not_unicode", line=len(rows) + 1))
    lines = tables(tmp_path, rows=tmp_path / "in.jsonl")
    assert [line["custom_id"] for line in lines] == [*names, "failed"]
    for line, (value, metadata) in zip(lines, rows, strict=False):
        assert line["text"] == as_json(value)
        for name, item in metadata.items():
            if name in ("a", "b", "c") and isinstance(item, int):
                assert line[f"metadata.{name}"] in (item, as_json(item), float(item) if abs(item) < 2**53 else item)
    assert [line for line in lines if line["error_code"]] == lines[-1:]


ODD: list[Any] = [None, True, -1, 2**63, 1.5, "<1e999>", "<long>", "\ud800", [], {}, [[]], {"a": {"b": 1}}]


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a row."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for name, item in items for place in places_in(item, (*path, name))]


@pytest.mark.parametrize("url", [*sorted(POOLED), "/v1/chat/completions", "/v1/completions"])
def test_an_answer_with_any_value_anywhere_is_a_line_or_is_counted(url: str, tmp_path: Path) -> None:
    """Each value of a whole answer in turn is what nobody writes."""
    answers = [answered_by(url, "good")]
    for place in places_in(json.loads(answers[0])):
        for odd in ODD:
            changed = json.loads(answered_by(url, f"odd {len(answers)}"))
            of = changed
            for name in place[:-1]:
                of = of[name]
            of[place[-1]] = odd
            answers.append(as_json(changed).encode() + b"\n")
    (tmp_path / "a.jsonl").write_bytes(b"".join(answers))
    lines = tables(tmp_path)
    made = table(tmp_path / "a.jsonl", tmp_path / "t.csv")
    assert made.num_answers + made.num_broken_lines + made.num_repeated == len(answers)
    assert [line["custom_id"] for line in lines][:2] == ["good", "good"]
    assert made.num_answers > 1
    assert made.num_broken_lines > 1


def test_vectors_of_any_numbers_are_written(tmp_path: Path) -> None:
    line = json.loads(answered_by("/v1/embeddings", "a"))
    line["response"]["body"]["data"][0]["embedding"] = ["<1e999>", 1e300]
    (tmp_path / "a.jsonl").write_text(as_json(line) + "\n")
    first, second = [json.loads(text) for text in
                     (table(tmp_path / "a.jsonl", tmp_path / "t.jsonl") and (tmp_path / "t.jsonl").read_text()
                      ).splitlines()]  # fmt: skip
    assert (first["vector"], second["vector"]) == ([None, None], [3.0, 4.0])
    for kind in ("npy", "parquet", "csv"):
        table(tmp_path / "a.jsonl", tmp_path / f"t.{kind}")
    assert np.load(tmp_path / "t.npy").tolist() == [[np.inf, np.inf], [3.0, 4.0]]


def test_names_of_metadata_without_end_are_one_column_of_json(tmp_path: Path) -> None:
    """Names of few rows give way, wherever they stand, and so do long ones."""
    rows = [{**{f"n{number}_{k}": k for k in range(100)}, "all": number, "x" * 300: 1} for number in range(10)]
    rows[0] = {**{f"first{k}": k for k in range(400)}, **rows[0]}
    (tmp_path / "in.jsonl").write_bytes(b"".join(row_with(str(n), metadata) for n, metadata in enumerate(rows)))
    (tmp_path / "a.jsonl").write_bytes(b"".join(answered(str(n), completion("x")) for n in range(10)))
    for kind in FORMATS:
        made = table(tmp_path / "a.jsonl", tmp_path / f"t.{kind}", rows=tmp_path / "in.jsonl")
        assert made.to_lines()[-1].startswith("text      rows have more than 256 names of metadata")
    lines = pq.read_table(tmp_path / "t.parquet").to_pylist()
    names = [name for name in lines[0] if name.startswith("metadata.")]
    assert len(names) == MAX_METADATA
    assert [line["metadata.all"] for line in lines[1:]] == list(range(1, 10))
    for line, metadata in zip(lines, rows, strict=True):
        found = {name.removeprefix("metadata."): line[name] for name in names if line[name] is not None}
        assert {**found, **json.loads(line["metadata"])} == metadata


def test_schemas_without_end_are_no_columns_without_end(tmp_path: Path) -> None:
    def schema(number: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"p{number}_{k}": {"type": "integer"} for k in range(50)}}

    (tmp_path / "in.jsonl").write_bytes(b"".join(request(str(n), guided_json=schema(n)) for n in range(20)))
    (tmp_path / "a.jsonl").write_bytes(b"".join(answered(str(n), completion("x")) for n in range(20)))
    table(tmp_path / "a.jsonl", tmp_path / "t.parquet", rows=tmp_path / "in.jsonl")
    assert sum(name.startswith("answer.") for name in pq.read_schema(tmp_path / "t.parquet").names) == 256


@pytest.mark.parametrize(("values", "mixed"), [
    ([[1, -4], [2, "x"]], True), ([[1], [2.5]], False), ([[1], 2], True), ([["a"], [None]], False),
    ([{"a": 1}, {"b": "x"}], False), ([[[1]], [2]], True), ([1, "<1e999>"], False), ([True, 0.5], True),
])  # fmt: skip
def test_columns_of_several_types_are_said(tmp_path: Path, values: list[Any], mixed: bool) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"".join(answered(str(n), completion(as_json({"v": value}))) for n, value in
                                                enumerate(values)))  # fmt: skip
    assert table(tmp_path / "a.jsonl", tmp_path / "t.csv").mixed == (["answer.v"] if mixed else [])


@pytest.mark.parametrize("change", ["another", "edited", "shorter", "grown", "same", "packed"])
def test_rows_are_held_to_the_input_that_the_job_was_begun_with(change: str, tmp_path: Path) -> None:
    rows = [request(name, metadata={"city": city}) for name, city in (("1", "Rome"), ("2", "Oslo"))]
    (tmp_path / "in.jsonl").write_bytes(b"".join(rows))
    (tmp_path / "a.jsonl").write_bytes(answered("1", completion("x")) + answered("2", completion("y")))
    begun(tmp_path / "a.jsonl", tmp_path / "in.jsonl")
    given = {
        "another": [request("1", metadata={"city": "Lima"}), request("3")], "edited": [rows[0], request("2")],
        "shorter": rows[:1], "grown": [*rows, request("3")], "same": rows, "packed": rows,
    }[change]  # fmt: skip
    data = b"".join(given)
    (tmp_path / "rows").write_bytes(gzip.compress(data) if change == "packed" else data)
    if change in ("another", "edited", "shorter"):
        with pytest.raises(ConfigError, match=r"rows: it is not the input that .*a\.jsonl was begun with"):
            table(tmp_path / "a.jsonl", tmp_path / "t.jsonl", rows=tmp_path / "rows")
        assert not (tmp_path / "t.jsonl").exists()
        return
    made = table(tmp_path / "a.jsonl", tmp_path / "t.jsonl", rows=tmp_path / "rows")
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_bytes().splitlines()]
    assert [line["metadata.city"] for line in lines] == ["Rome", "Oslo"]
    assert made.num_unanswered == (change == "grown")


def test_a_row_that_is_too_long_to_be_read_costs_its_metadata_alone(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(request("1", metadata={"m": 1}) + request("2", metadata={"m": "x" * 2000}))
    (tmp_path / "a.jsonl").write_bytes(answered("1", completion("x")) + failed("2", "row_too_long", line=2))
    table(tmp_path / "a.jsonl", tmp_path / "t.jsonl", rows=tmp_path / "in.jsonl", max_row_bytes=1000)
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_bytes().splitlines()]
    assert [line["metadata.m"] for line in lines] == [1, None]
