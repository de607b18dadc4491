"""Tables as spreadsheets and Hugging Face's datasets write them; pandas, pyarrow and the job's reader are oracles."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.cli import main as cli
from npu_runner.errors import ConfigError
from npu_runner.prompts.media.media import load_media
from tests.batch.scripted import write_rows
from tests.tables.made import asked, made, rows, shown

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
FRAME = pd.DataFrame({"name": ["Stühle; alt", "Tisch"], "price": ["3,50", ""]})


def metadata(path: Path, source: Path, **options: Any) -> list[dict[str, Any]]:
    return [row["body"].get("metadata", {}) for row in rows(path / "r.jsonl", source, **options)]


def test_the_first_line_of_a_spreadsheet_names_the_delimiter(tmp_path: Path) -> None:
    for line in ("sep=;\n", "SEP=;\r\n", "\ufeffsep=;\n"):
        (tmp_path / "t.csv").write_bytes((line + FRAME.to_csv(sep=";", index=False)).encode())
        assert metadata(tmp_path, tmp_path / "t.csv", keep=("*",)) == FRAME.to_dict("records")
    (tmp_path / "t.csv").write_text("sep=;\na;b\n1;2\n3\n")
    with pytest.raises(ConfigError, match=r"line 4: has 1 cells, the first line has 2"):
        rows(tmp_path / "r.jsonl", tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("sep=;\na|b\n1|2\n")
    assert metadata(tmp_path, tmp_path / "t.csv", keep=("a", "b"), delimiter="|") == [{"a": "1", "b": "2"}]
    (tmp_path / "t.csv").write_text("sep=\n1\n")
    assert metadata(tmp_path, tmp_path / "t.csv", keep=("sep=",)) == [{"sep=": "1"}], "a column may be called so"


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-8-sig", "gb18030"])
def test_a_spreadsheet_may_be_in_another_encoding(tmp_path: Path, encoding: str) -> None:
    frame = FRAME if encoding != "gb18030" else FRAME.replace("Tisch", "桌子\n高")
    frame.to_csv(tmp_path / "t.csv", sep=";", index=False, encoding=encoding, lineterminator="\r\n")
    found = metadata(tmp_path, tmp_path / "t.csv", keep=("*",), delimiter=";", encoding=encoding)
    read = pd.read_csv(tmp_path / "t.csv", sep=";", encoding=encoding, dtype=str, keep_default_na=False)
    assert found == read.to_dict("records") == frame.to_dict("records")


def test_what_a_german_spreadsheet_needs_is_said(tmp_path: Path) -> None:
    source = tmp_path / "t.csv"
    FRAME.to_csv(source, sep=";", index=False, encoding="cp1252")
    with pytest.raises(ConfigError, match=r"t\.csv', line 1: has 1 ';' and no ','; .*--delimiter ';', or ','"):
        rows(tmp_path / "r.jsonl", source)
    words = r"line 2: byte 3 is not UTF-8; .* --encoding cp1252, and its delimiter with --delimiter ';'"
    with pytest.raises(ConfigError, match=words):
        rows(tmp_path / "r.jsonl", source, delimiter=";")
    with pytest.raises(ConfigError, match=r"behind line 0: is not ascii .*; name another --encoding"):
        rows(tmp_path / "r.jsonl", source, delimiter=";", encoding="ascii")
    FRAME.to_csv(source, sep=";", index=False, encoding="utf-16")
    with pytest.raises(ConfigError, match=r"line 1: byte 0 is not UTF-8; .* --encoding utf-16"):
        rows(tmp_path / "r.jsonl", source)
    for name in ("klingon", "base64", "a\0b"):
        with pytest.raises(ConfigError, match="is no encoding of text that Python knows"):
            rows(tmp_path / "r.jsonl", source, encoding=name)
    source.write_text("a;b\n1;2\n")
    assert metadata(tmp_path, source, keep=("a;b",), delimiter=",") == [{"a;b": "1;2"}], "one column, knowingly"


def test_an_empty_cell_of_a_csv_is_not_printed_by_a_template(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "t").write_text("{{ name }} ({{ price }} EUR)")
    with pytest.raises(ConfigError, match="line 3: an empty cell is printed"):
        rows(tmp_path / "r.jsonl", tmp_path / "t.csv", template=tmp_path / "t")
    (tmp_path / "t").write_text("{{ price or 'free' }}{% if price is none %}!{% endif %}")
    found = rows(tmp_path / "r.jsonl", tmp_path / "t.csv", template=tmp_path / "t", keep=("price",))
    assert [asked(row) for row in found] == ["3,50", "free!"]
    assert [row["body"]["metadata"]["price"] for row in found] == ["3,50", ""], "a cell is text, as it was"


CELLS = {"int": ["7", " -12 ", ""], "float": ["3.5", "1e3", ""], "bool": ["true", "0", "FALSE"],
         "text": ["7", "", " x"]}  # fmt: skip


@pytest.mark.parametrize("kind", CELLS)
def test_kept_columns_have_the_type_that_is_named(tmp_path: Path, kind: str) -> None:
    pd.DataFrame({"a:b": CELLS[kind], "n": "1"}).to_csv(tmp_path / "t.csv", index=False)
    found = metadata(tmp_path, tmp_path / "t.csv", keep=("*", f"a:b:{kind}"))
    read = {"int": int, "float": float, "bool": lambda text: text.lower() in ("true", "1"), "text": str}[kind]
    assert [each["a:b"] for each in found] == [read(cell) if cell else None for cell in CELLS[kind]]
    assert all(type(each["a:b"]) in (type(read("1")), type(None)) for each in found)
    assert [list(each) for each in found] == [["n", "a:b"]] * 3
    assert metadata(tmp_path, tmp_path / "t.csv", keep=("a:b",))[0] == {"a:b": CELLS[kind][0]}, "no type, no change"


@pytest.mark.parametrize(("kind", "cell", "words"), [
    ("float", "3,50", "'3,50' is no float; its numbers have a decimal comma"), ("float", "inf", "is no float"),
    ("float", "1_000", "is no float"), ("int", "3.5", "is no int"),
    ("int", "\N{ARABIC-INDIC DIGIT THREE}", "is no int"), ("bool", "yes", "is no bool"),
])  # fmt: skip
def test_a_cell_of_another_type_is_an_error_with_its_line(tmp_path: Path, kind: str, cell: str, words: str) -> None:
    pd.DataFrame({"a": ["1", cell]}).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(ConfigError, match=rf"line 3, column 'a': .*{words}"):
        rows(tmp_path / "r.jsonl", tmp_path / "t.csv", keep=(f"a:{kind}",))


def test_types_of_a_table_are_converted_as_well(tmp_path: Path) -> None:
    frame = pd.DataFrame({"i": [1, 2], "f": [2.0, math.nan], "t": [[1], [2, 3]]})
    frame.to_parquet(tmp_path / "t.parquet")
    kept = metadata(tmp_path, tmp_path / "t.parquet", keep=("i:float", "f:int", "t:text"))
    assert kept == [{"i": 1.0, "f": 2, "t": "[1]"}, {"i": 2.0, "f": None, "t": "[2,3]"}]
    assert type(kept[0]["f"]) is int


def test_all_columns_are_kept_but_those_of_bytes_and_of_reserved_names(tmp_path: Path) -> None:
    table = pa.table({"a": ["x"], "picture": pa.array([{"bytes": PNG, "path": None}], FILE), "raw": [b"\0"], "n": [3]})
    pq.write_table(table, tmp_path / "t.parquet")
    (tmp_path / "m").mkdir()
    assert metadata(tmp_path, tmp_path / "t.parquet", keep=("*",), media_dir=tmp_path / "m") == [{"a": "x", "n": 3}]
    source = write_rows(tmp_path / "t.jsonl", [{"kind": "k", "photo": "a.png", "b": None}, {"c": 1}])
    with pytest.raises(ConfigError, match=r"keep: metadata called 'kind' is .*, say --kind kind"):
        rows(tmp_path / "r.jsonl", source, keep=("*",))
    source = write_rows(tmp_path / "t.jsonl", [{"kind": "k", "photo": "a.png", "b": None}])
    options = {"keep": ("*",), "kind": "kind", "image": ("photo",)}
    assert metadata(tmp_path, source, **options) == [{"b": None, "kind": "k"}]
    with pytest.raises(ConfigError, match="a column is named twice"):
        rows(tmp_path / "r.jsonl", source, keep=("b", "b:int"))


def dataset(path: Path, features: dict[str, Any] | None, **columns: list[Any]) -> Path:
    arrays = {name: pa.array(values, FILE if isinstance(values[0], dict) else pa.list_(FILE))
              for name, values in columns.items()}  # fmt: skip
    said = None if features is None else {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(pa.table(arrays).replace_schema_metadata(said), path)
    return path


DATA = {"Image": PNG, "Video": b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom", "Audio": b"RIFF\x24\0\0\0WAVEfmt ",
        "Pdf": b"%PDF-1.7\n", "Mesh": PNG}  # fmt: skip


@pytest.mark.parametrize("form", ["plain", "Sequence", "list"])
@pytest.mark.parametrize("kind", DATA)
def test_only_what_the_schema_calls_an_image_is_shown_and_the_rest_is_named(
    tmp_path: Path, kind: str, form: str
) -> None:
    (tmp_path / "m").mkdir()
    feature: Any = {"plain": {"_type": kind}, "list": [{"_type": kind}],
                    "Sequence": {"feature": {"_type": kind}, "_type": "Sequence"}}[form]  # fmt: skip
    file = {"bytes": DATA[kind], "path": None}
    source = dataset(tmp_path / "t.parquet", {"clip": feature}, clip=[file] if form == "plain" else [[file, file]])
    result = made(tmp_path / "r.jsonl", source, prompt="?", media_dir=tmp_path / "m")
    (row,) = [json.loads(line) for line in (tmp_path / "r.jsonl").read_bytes().splitlines()]
    assert [load_media(url, tmp_path / "m") for url in shown(row)] == (
        [PNG] * (1 if form == "plain" else 2) if kind == "Image" else [])  # fmt: skip
    named = [line for line in result.to_lines() if line.startswith("not shown ")]
    assert named == ([] if kind == "Image" else [
        f"not shown column 'clip': {kind}; --image or --video shows a column"])  # fmt: skip
    (asked_for,) = rows(tmp_path / "r.jsonl", source, video=("clip",), media_dir=tmp_path / "m")
    assert len(shown(asked_for)) == (1 if form == "plain" else 2), "by its name any column is shown"


def test_without_a_word_of_the_schema_the_bytes_and_names_tell_what_an_image_is(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    files = [[{"bytes": PNG, "path": "a.wav"}, {"bytes": None, "path": "a.JPG"}, {"bytes": None, "path": None},
              {"bytes": DATA["Audio"], "path": "a.png"}, {"bytes": DATA["Video"], "path": None},
              {"bytes": None, "path": "a.wav"}]]  # fmt: skip
    for features in (None, {}, {"other": {"_type": "Image"}}):
        for number, file in enumerate(files[0]):
            source = dataset(tmp_path / "t.parquet", features, clip=[file])
            result = made(tmp_path / "r.jsonl", source, prompt="?", media_dir=tmp_path / "m")
            (row,) = [json.loads(line) for line in (tmp_path / "r.jsonl").read_bytes().splitlines()]
            assert len(shown(row)) == (number < 2)
            assert any(line.startswith("not shown column 'clip'") for line in result.to_lines()) == (number > 2)


@pytest.mark.parametrize("metadata", [
    b"{", b"[]", b'{"info": {"features": [1]}}', b'{"info": {"features": {"clip": 7}}}',
])  # fmt: skip
def test_metadata_that_say_nothing_are_no_error(tmp_path: Path, metadata: bytes) -> None:
    table = pa.table({"clip": pa.array([{"bytes": None, "path": "a.png"}], FILE)})
    pq.write_table(table.replace_schema_metadata({"huggingface": metadata}), tmp_path / "t.parquet")
    (row,) = rows(tmp_path / "r.jsonl", tmp_path / "t.parquet")
    assert shown(row) == ["a.png"]


def test_a_schema_goes_together_with_how_its_answers_are_written(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    source = write_rows(tmp_path / "t.jsonl", [{"a": "b"}])
    body = {"structured_outputs": {"disable_any_whitespace": True}}
    (row,) = rows(tmp_path / "r.jsonl", source, schema=tmp_path / "s.json", body=body)
    params: Any = parse_row(row).to_params({}, 0)
    assert (params.structured_outputs.json, params.structured_outputs.disable_any_whitespace) == (schema, True)
    for rule, words in (({"json": schema}, "leave one of them out"), ({"regex": "a"}, "the job would refuse this row"),
                        ({"nonsense": 1}, "the job would refuse this row")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            rows(tmp_path / "r.jsonl", source, schema=tmp_path / "s.json", body={"structured_outputs": rule})
    with pytest.raises(ConfigError, match=r"the job would refuse this row: .*says already"):
        rows(tmp_path / "r.jsonl", source, schema=tmp_path / "s.json", body={"guided_regex": "a"})


def test_files_that_records_name_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.png").write_bytes(PNG)
    source = write_rows(tmp_path / "t.jsonl", [{"photo": f"{number}.png"} for number in range(40)])
    for folder, count, first in ((tmp_path, 16, "0.png"), (tmp_path / "photos", 15, "0.png")):
        said = made(tmp_path / "r.jsonl", source, prompt="?", image=("photo",), media_dir=folder).to_lines()
        (line,) = [line for line in said if line.startswith("missing")]
        assert f" {count} of the first 16 files that records name are not below {folder}, as '{first}'; " in line
        assert line.endswith("name their folder with --media-dir")
    options: dict[str, Any] = {"prompt": "?", "image": ("photo",), "media_dir": tmp_path / "photos"}
    for value in ("1.png", "data:image/png;base64,aaaa", ""):
        said = made(tmp_path / "r.jsonl", write_rows(source, [{"photo": value}]), **options).to_lines()
        assert not [line for line in said if line.startswith("missing")]


def test_a_folder_of_other_files_says_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for name in ("a.docx", "b.DOCX", "c.xlsx"):
        (tmp_path / "docs" / name).write_bytes(b"PK")
    for source in ("docs", "docs/*"):
        assert cli.main(["rows", source, "--prompt", "?", "-o", "r.jsonl"]) == 2
        said = capsys.readouterr().err
        assert "there is no record in it, so there are no rows; left out: 3 files that are no document" in said
        assert "2 .docx, 1 .xlsx (one is a spreadsheet; save it as CSV; one is an Office file; soffice" in said
    assert cli.main(["rows", "docs/c.xlsx", "--prompt", "?", "-o", "r.jsonl"]) == 2
    assert "c.xlsx': is a spreadsheet; save it as CSV" in capsys.readouterr().err
