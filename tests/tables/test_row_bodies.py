"""What stands in a row: the question, the fields of its body, metadata. OpenAI's own types read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import EmbeddingCreateParams
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from pydantic import TypeAdapter

from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.errors import ConfigError
from tests.batch.scripted import write_rows
from tests.tables.made import asked, made, rows, shown

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture
def people(tmp_path: Path) -> Path:
    records: list[dict[str, Any]] = [
        {"name": "Ada", "born": 1815, "image": "a.png", "expected": "yes", "kind": "x",
         "custom_id": "1", "record": "r"},
        {"name": "Al <3", "born": None, "image": ["b.png", "c.png"], "expected": "no", "kind": "y", "custom_id": "2",
         "record": None},
    ]  # fmt: skip
    return write_rows(tmp_path / "people.jsonl", records)


def test_openais_types_read_the_rows(people: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    body = {"model": "m", "temperature": 0.5, "seed": 3}
    found = rows(
        tmp_path / "r.jsonl",
        people,
        image=("image",),
        keep=("name",),
        expected="expected",
        system="Be brief.",
        schema=tmp_path / "schema.json",
        max_tokens=9,
        body=body,
    )
    for row in found:
        read = TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(row["body"])
        assert {**read, "messages": None} == {**row["body"], "messages": None}
        assert [message["role"] for message in row["body"]["messages"]] == ["system", "user"]
        assert row["body"].items() >= {**body, "max_tokens": 9}.items()
        assert row["body"]["response_format"]["json_schema"]["schema"] == SCHEMA
        parse_row(row)
    assert [shown(row) for row in found] == [["a.png"], ["b.png", "c.png"]]


@pytest.mark.parametrize(("endpoint", "kind"), [("completions", TextParams), ("embeddings", EmbeddingCreateParams)])
def test_other_endpoints(people: Path, tmp_path: Path, endpoint: str, kind: Any) -> None:
    (tmp_path / "t").write_text("{{ name }}")
    found = rows(tmp_path / "r.jsonl", people, endpoint=endpoint, template=tmp_path / "t", body={"model": "m"})
    field = {"completions": "prompt", "embeddings": "input"}[endpoint]
    assert [TypeAdapter(kind).validate_python(row["body"])[field] for row in found] == ["Ada", "Al <3"]
    assert all(parse_row(row) and row["url"] == f"/v1/{endpoint}" for row in found)


def test_vectors_of_images_are_asked_for_as_messages(people: Path, tmp_path: Path) -> None:
    found = rows(tmp_path / "r.jsonl", people, endpoint="embeddings", image=("image",))
    assert [shown(row) for row in found] == [["a.png"], ["b.png", "c.png"]]
    assert all(parse_row(row) for row in found)


def test_nothing_goes_along_that_is_not_named(people: Path, tmp_path: Path) -> None:
    assert all("metadata" not in row["body"] for row in rows(tmp_path / "r.jsonl", people))


def test_expected_and_kind_come_from_the_columns_that_are_named_for_it(people: Path, tmp_path: Path) -> None:
    found = rows(tmp_path / "r.jsonl", people, expected="name", kind="born", keep=("custom_id",))
    assert [row["body"]["metadata"] for row in found] == [
        {"custom_id": "1", "expected": "Ada", "kind": 1815},
        {"custom_id": "2", "expected": "Al <3", "kind": None},
    ]
    for name in ("expected", "kind"):
        with pytest.raises(ConfigError, match=rf"keep: metadata called '{name}' is .*say --{name} {name}"):
            rows(tmp_path / "r.jsonl", people, keep=(name,))


def test_an_id_column_names_the_rows(people: Path, tmp_path: Path) -> None:
    assert [row["custom_id"] for row in rows(tmp_path / "r.jsonl", people, id="born", sample=1)] == ["1815"]
    assert [row["custom_id"] for row in rows(tmp_path / "r.jsonl", people, id="custom_id")] == ["1", "2"]
    with pytest.raises(ConfigError, match="line 2: its 'born' is empty"):
        rows(tmp_path / "r.jsonl", people, id="born")


def test_an_id_that_is_there_twice_is_an_error_that_names_both(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "t.jsonl", [{"id": n % 7} for n in range(9)])
    with pytest.raises(
        ConfigError,
        match=r"custom_id '[01]': is that of 't.jsonl', line (1|2) and of 't.jsonl', line "
        r"(8|9).*2 ids in all",
    ):
        rows(tmp_path / "r.jsonl", source, id="id")


def test_a_template_sees_columns_and_the_record(people: Path, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(
        "{{ name }}{% if born is none %} (?){% endif %}: {{ record['kind'] }} {{ record | tojson }}\n"
    )
    first, second = rows(tmp_path / "r.jsonl", people, template=tmp_path / "t")
    assert asked(first).startswith('Ada: x {"name": "Ada"')
    assert asked(second).startswith('Al <3 (?): y {"name": "Al <3"'), "nothing is escaped as HTML"


def test_a_template_of_files_sees_path_name_and_folder(tmp_path: Path) -> None:
    (tmp_path / "in" / "cats").mkdir(parents=True)
    (tmp_path / "in" / "cats" / "1.png").write_bytes(b"")
    (tmp_path / "t").write_text("{{ path }} {{ folder }} {{ name }}")
    (row,) = rows(tmp_path / "r.jsonl", tmp_path / "in", template=tmp_path / "t", expected="folder")
    assert asked(row) == "cats/1.png cats 1.png"
    assert row["body"]["metadata"] == {"expected": "cats"}


@pytest.mark.parametrize(("template", "words"), [
    ("{{ born }}", "line 2: an empty cell is printed"), ("{{ nmae }}", "'nmae' is undefined"), ("{{ name", "line 1"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"), ("{{ record.__init__.__globals__ }}", "unsafe"),
    ("{{ cycler() }}", "'cycler' is undefined"), ("{% set x = record.update({'a': 1}) %}", "unsafe"),
    ("{{ 1 // 0 }}", "by zero"), ("{% include 'people.jsonl' %}", "no loader"),
])  # fmt: skip
def test_a_template_that_does_not_fit_is_an_error_and_reaches_nothing(
    people: Path, tmp_path: Path, template: str, words: str
) -> None:
    (tmp_path / "t").write_text(template)
    with pytest.raises(ConfigError, match=words):
        rows(tmp_path / "r.jsonl", people, template=tmp_path / "t")
    assert not (tmp_path / "r.jsonl").exists()


def test_a_prompt_file_is_asked_as_it_stands(people: Path, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes("  {{ name }} \N{SNOWMAN}\n\n".encode())
    assert asked(rows(tmp_path / "r.jsonl", people, prompt_file=tmp_path / "p")[0]) == "  {{ name }} \N{SNOWMAN}\n"


@pytest.mark.parametrize(("options", "words"), [
    ({"prompt": None}, "one of --prompt, --prompt-file and --template is needed, not none"),
    ({"template": Path("t")}, "not --prompt and --template"),
    ({"keep": ("nmae",)}, r"line 1: there is no column 'nmae'; it has 'name'"),
    ({"image": ("born",)}, "column 'born': holds a int"), ({"keep": ("name", "name")}, "a column is named twice"),
    ({"body": {"temprature": 1}}, "temprature: unknown field; did you mean temperature"),
    ({"body": {"temperature": "hot"}}, "temperature: Input should be a valid number"),
    ({"body": {"messages": []}}, "messages is made of the records"),
    ({"body": {"max_tokens": 1}, "max_tokens": 2}, "already"),
    ({"max_tokens": 0}, "max_tokens: 0"), ({"sample": 0}, "sample: 0"), ({"delimiter": '"'}, "delimiter"),
    ({"endpoint": "abacus"}, "is not one of chat, completions, embeddings"),
    ({"endpoint": "completions", "image": ("image",)}, "use chat"),
    ({"schema": Path("nowhere")}, "cannot be read"), ({"media_dir": Path("/nowhere")}, "is not a folder"),
])  # fmt: skip
def test_what_cannot_be_a_row_is_refused_before_anything_is_written(
    people: Path, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "r.jsonl").write_text("before")
    with pytest.raises(ConfigError, match=words):
        made(tmp_path / "r.jsonl", people, **{"prompt": "?", **options})
    assert (tmp_path / "r.jsonl").read_text() == "before"


def test_rows_without_an_image_are_counted(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "t.jsonl", [{"image": "a.png"}, {"image": None}, {"image": ""}])
    result = made(tmp_path / "r.jsonl", source, prompt="?", image=("image",))
    assert "          2 rows show no image or video: theirs is empty" in result.to_lines()
