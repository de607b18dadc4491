"""A table holds what the answers say, with the types of their schema; pyarrow and pandas read it."""

from __future__ import annotations

import csv as csv_module
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from npu_runner.errors import ConfigError
from tests.full_set import examples
from tests.tables.made import answered, completion, embedded, failed, request, table

EASY = settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCHEMA = {"type": "object", "properties": {
    "n": {"type": "integer"}, "share": {"type": "number"}, "ok": {"type": "boolean"},
    "name": {"type": ["string", "null"]}, "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    "part": {"type": "object"}, "never": {"type": "integer"},
    "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}, "$defs": {"tag": {"type": "string"}}}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def written(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with rows.jsonl and answers.jsonl, in another order and not all there."""
    values = [{"n": 1, "share": 1, "ok": True, "name": "a", "tags": ["x", "y"], "part": {"z": [1]}, "either": 3},
              {"n": 2, "share": 0.5, "ok": False, "name": None, "tags": [], "part": {}, "either": None}]  # fmt: skip
    written(
        tmp_path / "rows.jsonl",
        *[
            request(name, metadata={"place": place, "who": name}, response_format=FORMAT)
            for place, name in enumerate("abcde")
        ],
    )
    written(
        tmp_path / "answers.jsonl", failed("d", line=4),
        answered("b", completion(json.dumps(values[1]), reasoning="hm", logprobs=[-1.0, -2.0])),
        answered("a", completion(json.dumps(values[0]), num_tokens=5), completion('{"n": ', 1, finish_reason="length")),
        answered("c", completion("no JSON", finish_reason="length", stop_reason="repetition_detected")),
    )  # fmt: skip
    return tmp_path


def test_each_answer_is_a_line_in_the_order_of_the_input(job: Path) -> None:
    made = table(job / "answers.jsonl", job / "t.parquet", rows=job / "rows.jsonl")
    found = read(job / "t.parquet")
    assert [(line["custom_id"], line["index"]) for line in found] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("c", 0),
        ("d", None),
    ]
    assert [line["metadata.place"] for line in found] == [0, 0, 1, 2, 3]
    assert [line["finish_reason"] for line in found] == ["stop", "length", "stop", "length", None]
    assert [line["stop_reason"] for line in found] == [None, None, None, "repetition_detected", None]
    assert [line["error_code"] for line in found] == [None, None, None, None, "media_missing"]
    assert [line["text"] for line in found][1] == '{"n": '
    assert [line["reasoning"] for line in found][2] == "hm"
    assert [line["mean_logprob"] for line in found] == [None, None, -1.5, None, None]
    assert [line["prompt_tokens"] for line in found] == [7, None, 7, 7, None], "of a row, with its first answer"
    assert [line["completion_tokens"] for line in found] == [8, None, 3, 3, None]
    assert made.to_lines() == [
        f"table     {job / 't.parquet'}: 5 lines of 4 rows, 1 of them failed; 1 answers were cut off; 1 are "
        "repetitions; 1 rows have no answer yet"
    ]


def test_fields_have_the_types_of_their_schema(job: Path) -> None:
    table(job / "answers.jsonl", job / "t.parquet", rows=job / "rows.jsonl")
    schema = pq.read_schema(job / "t.parquet")
    assert {name: schema.field(f"answer.{name}").type for name in SCHEMA["properties"]} == {  # type: ignore[attr-defined]
        "n": pa.int64(), "share": pa.float64(), "ok": pa.bool_(), "name": pa.string(), "tags": pa.list_(pa.string()),
        "part": pa.string(), "never": pa.int64(), "either": pa.int64()}  # fmt: skip
    first, cut_off, second, *_ = read(job / "t.parquet")
    assert {name: first[f"answer.{name}"] for name in SCHEMA["properties"]} == {  # type: ignore[attr-defined]
        "n": 1,
        "share": 1.0,
        "ok": True,
        "name": "a",
        "tags": ["x", "y"],
        "part": '{"z": [1]}',
        "never": None,
        "either": 3,
    }
    assert (second["answer.share"], second["answer.tags"], second["answer.name"]) == (0.5, [], None)
    assert cut_off["answer.n"] is None


def test_a_schema_decides_where_values_alone_would_not(tmp_path: Path) -> None:
    numbers = {"type": "array", "items": {"type": "number"}}
    properties = {"share": {"type": "number"}, "n": {"type": "integer"}, "ids": numbers}
    (tmp_path / "schema.json").write_text(json.dumps({"type": "object", "properties": properties}))
    answers = written(tmp_path / "a.jsonl", answered("a", completion('{"share": 1, "n": 3.0, "ids": [1, 2]}')))
    table(answers, tmp_path / "t.parquet", schema=tmp_path / "schema.json")
    schema, (found,) = pq.read_schema(tmp_path / "t.parquet"), read(tmp_path / "t.parquet")
    assert [schema.field(f"answer.{name}").type for name in properties] == [
        pa.float64(), pa.int64(), pa.list_(pa.float64())]  # fmt: skip
    assert [found[f"answer.{name}"] for name in properties] == [1.0, 3, [1.0, 2.0]]


@pytest.mark.parametrize("where", ["option", "manifest", "nowhere"])
def test_the_schema_may_be_named_or_the_jobs_or_be_found_in_the_values(job: Path, where: str) -> None:
    (job / "schema.json").write_text(json.dumps(SCHEMA))
    if where == "manifest":
        manifest = {
            "format": 3,
            "created": 1,
            "model_name": "m",
            "model_files": {},
            "input": {"num_bytes": 0, "blake2b": ""},
            "settings": {"answers.structured_outputs": SCHEMA},
        }
        (job / "answers.jsonl.manifest.json").write_text(json.dumps(manifest))
    table(job / "answers.jsonl", job / "t.parquet", schema=job / "schema.json" if where == "option" else None)
    schema = pq.read_schema(job / "t.parquet")
    found = [name.removeprefix("answer.") for name in schema.names if name.startswith("answer.")]
    if where == "nowhere":
        assert found == sorted(SCHEMA["properties"].keys() - {"never"})  # type: ignore[attr-defined]
    else:
        assert found == list(SCHEMA["properties"])
        assert schema.field("answer.never").type == pa.int64()
    assert schema.field("answer.share").type == pa.float64()


@pytest.mark.parametrize(("values", "kind", "cells"), [
    ([1, 2], pa.int64(), [1, 2]), ([1, 2.5], pa.float64(), [1.0, 2.5]), ([True, None], pa.bool_(), [True, None]),
    ([1, "1"], pa.string(), ["1", "1"]), ([True, 1], pa.string(), ["true", "1"]),
    ([None, None], pa.string(), [None, None]),
    ([2**63 - 1, -(2**63)], pa.int64(), [2**63 - 1, -(2**63)]), ([2**64 - 1, 0], pa.uint64(), [2**64 - 1, 0]),
    ([2**64, 1], pa.string(), [str(2**64), "1"]), ([2**53 + 1, 0.5], pa.string(), [str(2**53 + 1), "0.5"]),
    ([[1], [2, None]], pa.list_(pa.int64()), [[1], [2, None]]), ([[1], ["a"]], pa.list_(pa.string()), [["1"], ["a"]]),
    ([[[1]], []], pa.string(), ["[[1]]", "[]"]), ([{"a": 1}, "x"], pa.string(), ['{"a": 1}', "x"]),
    (["\ud800", "a"], pa.string(), ["?", "a"]), ([1e308, -0.0], pa.float64(), [1e308, -0.0]),
])  # fmt: skip
def test_without_a_schema_the_values_decide_and_mixed_columns_are_text(
    tmp_path: Path, values: list[Any], kind: Any, cells: list[Any]
) -> None:
    answers = written(
        tmp_path / "a.jsonl",
        *[answered(str(place), completion(json.dumps({"v": value}))) for place, value in enumerate(values)],
    )
    made = table(answers, tmp_path / "t.parquet")
    assert pq.read_schema(tmp_path / "t.parquet").field("answer.v").type == kind
    assert [line["answer.v"] for line in read(tmp_path / "t.parquet")] == cells
    items = [item for value in values for item in (value if kind == pa.list_(pa.string()) else [value])]
    kinds = {type(item).__name__ for item in items if item is not None}
    is_mixed = len(kinds) > 1 and kind in (pa.string(), pa.list_(pa.string()))
    assert made.mixed == (["answer.v"] if is_mixed else [])


JSON = st.recursive(st.none() | st.booleans() | st.integers(-(2**70), 2**70)
                    | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5)  # fmt: skip


@EASY
@given(st.lists(st.dictionaries(st.sampled_from(["a", "b", "c.d", ""]), JSON, max_size=4), min_size=1, max_size=5))
@example([{"a": "\r"}, {"a": 'x\ny,"z"'}, {"a": ""}, {"a": None}])
def test_parquet_jsonl_and_csv_say_the_same_as_the_answers(tmp_path: Path, values: list[dict[str, Any]]) -> None:
    answers = written(
        tmp_path / "a.jsonl",
        *[answered(str(place), completion(json.dumps(value))) for place, value in enumerate(values)],
    )
    for ending in ("parquet", "jsonl", "csv"):
        table(answers, tmp_path / f"t.{ending}")
    parquet = read(tmp_path / "t.parquet")
    # JSON can spell half a character, Arrow and files cannot.
    assert [json.loads(line) for line in (tmp_path / "t.jsonl").read_bytes().splitlines()] == parquet
    with open(tmp_path / "t.csv", encoding="utf-8", newline="") as file:
        csv = list(csv_module.DictReader(file, strict=True))
    for line, cells, value in zip(parquet, csv, values, strict=True):
        assert list(cells) == list(line)
        assert json.loads(line["text"]) == value
        for name, kept in value.items():
            assert same(line[f"answer.{name}"], kept)
            assert cells[f"answer.{name}"] == as_csv(line[f"answer.{name}"])


def same(cell: Any, value: Any) -> bool:
    """In a column of several types a value is text: its JSON."""
    if isinstance(value, list) and isinstance(cell, list):
        return len(cell) == len(value) and all(map(same, cell, value))
    if isinstance(cell, str) and not isinstance(value, str):
        cell = json.loads(cell)
    return bool(cell == value)


def as_csv(cell: Any) -> str:
    if cell is None or isinstance(cell, str):
        return cell or ""
    return repr(cell) if type(cell) in (int, float) else json.dumps(cell, ensure_ascii=False)


def test_the_same_answers_give_the_same_table_in_whatever_order_they_finished(job: Path) -> None:
    lines = (job / "answers.jsonl").read_bytes().splitlines(keepends=True)
    for ending in ("parquet", "csv", "jsonl"):
        table(job / "answers.jsonl", job / f"one.{ending}", rows=job / "rows.jsonl")
        written(job / "other.jsonl", *reversed(lines))
        table(job / "other.jsonl", job / f"two.{ending}", rows=job / "rows.jsonl")
        assert (job / f"one.{ending}").read_bytes() == (job / f"two.{ending}").read_bytes()


def test_a_job_at_work_gives_its_whole_lines(job: Path) -> None:
    whole = (job / "answers.jsonl").read_bytes()
    with open(job / "answers.jsonl", "ab") as file:
        file.write(answered("e", completion("late"))[:-20])
        file.flush()
        made = table(job / "answers.jsonl", job / "t.jsonl", rows=job / "rows.jsonl")
    assert (made.num_answers, made.num_unanswered, made.num_broken_lines) == (4, 1, 0)
    assert len(whole.splitlines()) == 4


def test_lines_that_are_no_answers_are_counted(job: Path) -> None:
    with open(job / "answers.jsonl", "ab") as file:
        file.write(
            b"torn by a power cut\n{}\n"
            + answered("a", completion("again"))
            + answered("d", completion("better"))
            + answered("stranger", completion("?"))
        )
    made = table(job / "answers.jsonl", job / "t.jsonl", rows=job / "rows.jsonl")
    assert (made.num_broken_lines, made.num_repeated, made.num_strangers) == (2, 2, 1)
    by_id = {line["custom_id"]: line for line in map(json.loads, (job / "t.jsonl").read_bytes().splitlines())}
    assert by_id["d"]["text"] == "better", "a row that was answered since has failed no more"
    assert by_id.keys() == set("abcd")


def test_the_error_file_of_a_job_belongs_to_it(job: Path) -> None:
    manifest = {
        "format": 3,
        "created": 1,
        "model_name": "m",
        "model_files": {},
        "settings": {},
        "error_file": "bad.jsonl",
        "input": {"num_bytes": 0, "blake2b": ""},
    }
    (job / "answers.jsonl.manifest.json").write_text(json.dumps(manifest))
    written(job / "bad.jsonl", failed("e", "poison", line=5))
    assert table(job / "answers.jsonl", job / "t.jsonl", rows=job / "rows.jsonl").num_failed == 2
    with pytest.raises(ConfigError, match=r"table .*bad.jsonl: is the error file"):
        table(job / "answers.jsonl", job / "bad.jsonl")


def test_rows_that_are_known_by_their_line_find_their_answer(tmp_path: Path) -> None:
    rows = written(tmp_path / "r.jsonl", b"\n", b"no json\n", request("a", metadata={"m": 1}))
    answers = written(tmp_path / "a.jsonl", answered("a", completion("x")), failed(None, "not_json", line=2))
    table(answers, tmp_path / "t.jsonl", rows=rows)
    found = list(map(json.loads, (tmp_path / "t.jsonl").read_bytes().splitlines()))
    assert [(line["custom_id"], line["metadata.m"]) for line in found] == [("line 2", None), ("a", 1)]


def test_another_jobs_rows_are_refused(job: Path) -> None:
    written(job / "other.jsonl", request("z"))
    with pytest.raises(ConfigError, match=r"none of the answers .* belongs to a row of it"):
        table(job / "answers.jsonl", job / "t.csv", rows=job / "other.jsonl")


@pytest.mark.parametrize("is_base64", [True, False])
def test_vectors_are_one_array_line_by_line_with_the_table(tmp_path: Path, is_base64: bool) -> None:
    vectors = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    lists = [vector.tolist() for vector in vectors]
    rows = written(tmp_path / "r.jsonl", *map(request, "abcd"))
    answers = written(
        tmp_path / "a.jsonl",
        embedded("d", lists[4], is_base64=is_base64),
        embedded("a", *lists[:3], is_base64=is_base64),
        failed("c", line=3),
        embedded("b", lists[3], is_base64=is_base64),
    )
    table(answers, tmp_path / "t.npy", rows=rows)
    table(answers, tmp_path / "t.parquet", rows=rows)
    array, frame = np.load(tmp_path / "t.npy"), pd.read_parquet(tmp_path / "t.parquet")
    assert (array.dtype, array.shape) == (np.float32, (6, 8))
    assert list(frame["custom_id"]) == ["a", "a", "a", "b", "c", "d"]
    np.testing.assert_array_equal(array[[0, 1, 2, 3, 5]], vectors)
    assert np.isnan(array[4]).all(), "a failed row keeps its place"
    np.testing.assert_array_equal(np.stack(list(frame["vector"].dropna())), vectors)
    assert pq.read_schema(tmp_path / "t.parquet").field("vector").type == pa.list_(pa.float32())
    assert not {"text", "finish_reason"} & set(frame.columns)


def test_vectors_of_two_sizes_and_texts_are_no_array(tmp_path: Path) -> None:
    answers = written(tmp_path / "a.jsonl", embedded("a", [1.0]), embedded("b", [1.0, 2.0]))
    with pytest.raises(ConfigError, match="the vector of 'a' has 1 numbers, that of 'b' has 2"):
        table(answers, tmp_path / "t.npy")
    table(answers, tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match="there is no vector"):
        table(written(tmp_path / "a.jsonl", answered("a", completion("x"))), tmp_path / "t.npy")


FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\uff1d1", "=cmd|'/C calc'!A0", "x=1", "", "'=1", " =1", "a, b", 'a "b"']


@pytest.mark.parametrize("is_safe", [True, False])
def test_no_cell_of_an_excel_safe_csv_is_a_formula(tmp_path: Path, is_safe: bool) -> None:
    name = "=evil"
    rows = written(
        tmp_path / "r.jsonl", *[request(f"={n}", metadata={name: text, "n": -1}) for n, text in enumerate(FORMULAS)]
    )
    answers = written(tmp_path / "a.jsonl", *[answered(f"={n}", completion(text)) for n, text in enumerate(FORMULAS)])
    table(answers, tmp_path / "t.csv", rows=rows, excel_safe=is_safe)
    frame = pd.read_csv(tmp_path / "t.csv", dtype=str, keep_default_na=False)
    expected = ["'" + text if is_safe and text[:1] in tuple("=+-@\uff1d") and text else text for text in FORMULAS]
    assert list(frame["text"]) == expected
    assert list(frame[f"metadata.{name}"]) == expected
    assert list(frame["metadata.n"]) == ["-1"] * len(FORMULAS), "a number is no formula"
    assert frame["custom_id"][0] == ("'=0" if is_safe else "=0")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_an_excel_safe_csv_has_no_formula_wherever_a_spreadsheet_splits_it(tmp_path: Path, delimiter: str) -> None:
    """Most of Europe splits at ";". A quote that does not begin a cell is a character there, and ends nothing."""
    texts = [f"x{mark}{text}" for mark in (";", "\t", "|", "\n", "\r", "\t\t", '";') for text in FORMULAS] + FORMULAS
    rows = written(tmp_path / "r.jsonl", *[request(str(n), metadata={f"n{text}"[:9]: text}) for n, text in
                                           enumerate(texts[:20])])  # fmt: skip
    answers = written(tmp_path / "a.jsonl", *[answered(str(n), completion(text)) for n, text in enumerate(texts)])
    for name, of in (("t.csv", None), ("rows.csv", rows)):
        table(answers, tmp_path / name, excel_safe=True, **({} if of is None else {"rows": of}))
        with open(tmp_path / name, encoding="utf-8", newline="") as file:
            cells = [cell for line in csv_module.reader(file, delimiter=delimiter) for cell in line]
        assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\uff1d"))]
    with open(tmp_path / "t.csv", encoding="utf-8", newline="") as file:
        quoted = [line["text"] for line in csv_module.DictReader(file)]
    assert [text.replace("'", "") for text in quoted] == [text.replace("'", "") for text in texts]


def test_every_text_of_an_excel_safe_csv_is_quoted(tmp_path: Path) -> None:
    table(written(tmp_path / "a.jsonl", answered("a", completion("x"))), tmp_path / "t.csv", excel_safe=True)
    header, line = (tmp_path / "t.csv").read_text().splitlines()
    assert header.startswith('"custom_id","index","text",')
    assert line == '"a",0,"x",,,"stop",,,3,0,7,,'


def test_an_empty_text_is_told_from_none_in_a_csv(tmp_path: Path) -> None:
    answers = written(tmp_path / "a.jsonl", answered("a", completion("")), failed("b"))
    table(answers, tmp_path / "t.csv")
    with open(tmp_path / "t.csv", "rb") as file:
        read_back = pa.csv.read_csv(
            file,
            convert_options=pa.csv.ConvertOptions(
                strings_can_be_null=True, quoted_strings_can_be_null=False, column_types={"text": pa.string()}
            ),
        )
    assert read_back["text"].to_pylist() == ["", None]


def test_the_mean_log_probability_is_of_the_answer_alone(tmp_path: Path) -> None:
    def text_row(name: str, values: list[float | None]) -> bytes:
        body = {
            "choices": [{"index": 0, "text": "x", "finish_reason": "stop", "logprobs": {"token_logprobs": values}}],
            "usage": {"prompt_tokens": 2, "completion_tokens": 2},
        }
        return (
            json.dumps({"custom_id": name, "error": None, "response": {"status_code": 200, "body": body}}).encode()
            + b"\n"
        )

    answers = written(tmp_path / "a.jsonl", text_row("plain", [-1.0, -3.0]), text_row("echo", [None, -9.0, -1.0, -2.0]))
    table(answers, tmp_path / "t.parquet")
    assert [line["mean_logprob"] for line in read(tmp_path / "t.parquet")] == [-2.0, -1.5]
    assert math.isclose(sum([-1.0, -3.0]) / 2, -2.0)


def test_an_output_of_openai_is_a_table_too(tmp_path: Path) -> None:
    body = {"error": {"message": "no", "type": "invalid_request_error", "code": "bad"}}
    line = {"id": "b", "custom_id": "a", "response": {"status_code": 400, "body": body}, "error": None}
    table(written(tmp_path / "a.jsonl", json.dumps(line).encode() + b"\n"), tmp_path / "t.parquet")
    (found,) = read(tmp_path / "t.parquet")
    assert (found["error_code"], found["error_message"], found["text"]) == ("bad", "no", None)


def test_fields_without_end_stay_text(tmp_path: Path) -> None:
    answers = written(
        tmp_path / "a.jsonl",
        *[answered(str(n), completion(json.dumps({f"f{n}-{m}": m for m in range(50)}))) for n in range(20)],
    )
    made = table(answers, tmp_path / "t.parquet")
    assert made.has_too_many_fields
    assert not [name for name in pq.read_schema(tmp_path / "t.parquet").names if name.startswith("answer.")]


@pytest.mark.parametrize(
    "output",
    [
        "answers.jsonl",
        "rows.jsonl",
        "answers.jsonl.manifest.json",
        "answers.jsonl.rows",
        "t",
        "t.xlsx",
        "link.csv",
        "schema.json",
    ],
)
def test_a_table_is_never_written_over_what_it_is_made_of(job: Path, output: str) -> None:
    (job / "answers.jsonl.manifest.json").write_text(
        json.dumps(
            {
                "format": 3,
                "created": 1,
                "model_name": "m",
                "model_files": {},
                "settings": {},
                "input": {"num_bytes": 0, "blake2b": ""},
            }
        )
    )
    (job / "schema.json").write_text("{}")
    os.symlink(job / "answers.jsonl", job / "link.csv")
    before = {path.name: path.read_bytes() for path in job.iterdir()}
    with pytest.raises(ConfigError):
        table(
            job / "answers.jsonl",
            job / output,
            rows=job / "rows.jsonl",
            schema=job / "schema.json",
            format="auto" if output.startswith("t") else "csv",
        )
    assert before == {path.name: path.read_bytes() for path in job.iterdir()}


def test_a_table_that_cannot_be_made_leaves_the_one_before(job: Path) -> None:
    (job / "t.npy").write_bytes(b"before")
    with pytest.raises(ConfigError):
        table(job / "answers.jsonl", job / "t.npy")
    assert (job / "t.npy").read_bytes() == b"before"


def test_no_answers_yet_are_an_empty_table(tmp_path: Path) -> None:
    rows = written(tmp_path / "r.jsonl", request("a", metadata={"m": 1}, response_format=FORMAT))
    answers = written(tmp_path / "a.jsonl")
    for ending in ("parquet", "csv", "jsonl"):
        assert table(answers, tmp_path / f"t.{ending}", rows=rows).num_lines == 0
    schema = pq.read_schema(tmp_path / "t.parquet")
    assert (schema.field("metadata.m").type, schema.field("answer.n").type) == (pa.int64(), pa.int64())
    assert len(pd.read_csv(tmp_path / "t.csv")) == 0
