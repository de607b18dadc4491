"""`rows`, `table` and `merge` as commands: from a folder to a table by way of a real job, and what they need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from npu_runner.cli import main as cli
from npu_runner.cli.options import options_of
from npu_runner.tables.options import MergeOptions, RowsOptions, TableOptions
from scripts.shapes.drawing import TEST_SEEDS, draw_json_example
from tests import zygote
from tests.batch.scripted import read_rows, write_rows
from tests.full_set import only_full
from tests.tables.made import answered, completion

ROOT = Path(__file__).parents[2]
SMALL = ["--platform", "cpu", "--max-model-len", "1024", "--kv-cache-bytes", "64M", "--progress", "off"]
COMMANDS = {"rows": RowsOptions, "table": TableOptions, "merge": MergeOptions}


@pytest.mark.parametrize("source", ["parquet", *only_full("what scripts/demo.sh does, which CI runs", "folder")])
def test_a_folder_becomes_a_table_by_way_of_a_job(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files below a folder, and the same images embedded in a Parquet file, are answered alike."""
    monkeypatch.chdir(tmp_path)
    example = draw_json_example(TEST_SEEDS[3])
    (tmp_path / "pictures" / "drawn").mkdir(parents=True)
    (tmp_path / "schema.json").write_text(json.dumps(example.schema))
    for number in range(3):
        example.images[0].save(f"pictures/drawn/{number}.png")
    options = [
        "--prompt",
        example.question,
        "--schema",
        "schema.json",
        "--max-tokens",
        "96",
        "--body",
        '{"temperature": 0}',
    ]
    if source == "folder":
        sources, media = ["pictures", "--keep", "folder"], "pictures"
    else:
        images = [{"bytes": path.read_bytes(), "path": None} for path in sorted(tmp_path.glob("pictures/drawn/*"))]
        pd.DataFrame({"image": images, "folder": ["drawn"] * 3}).to_parquet("t.parquet")
        (tmp_path / "media").mkdir()
        sources, media = ["t.parquet", "--media-dir", "media", "--keep", "folder"], "media"
    assert cli.main(["rows", *sources, *options, "-o", "rows.jsonl"]) == 0
    assert f"--allowed-media-dir {tmp_path / media}" in capsys.readouterr().err
    assert cli.main(["batch", "-i", "rows.jsonl", "-o", "answers.jsonl", "--allowed-media-dir", media, *SMALL]) == 0
    assert cli.main(["table", "answers.jsonl", "-i", "rows.jsonl", "-o", "table.parquet"]) == 0
    frame = pd.read_parquet("table.parquet")
    assert list(frame["custom_id"]) == [row["custom_id"] for row in read_rows(tmp_path / "rows.jsonl")]
    assert set(frame["metadata.folder"]) == {"drawn"}
    assert example.schema is not None
    for name, kind in example.schema["properties"].items():
        if kind.get("type") == "integer":
            assert frame[f"answer.{name}"].dtype == "int64"
    answers = {row["custom_id"]: row["response"]["body"] for row in read_rows(tmp_path / "answers.jsonl")}
    for line in frame.to_dict("records"):
        body = answers[line["custom_id"]]
        assert line["text"] == body["choices"][0]["message"]["content"]
        assert line["completion_tokens"] == body["usage"]["completion_tokens"]
        for name, value in json.loads(line["text"]).items():
            assert line[f"answer.{name}"] == value or isinstance(value, list | dict)


def test_rows_go_through_standard_output(tmp_path: Path) -> None:
    write_rows(tmp_path / "t.jsonl", [{"a": "b"}])
    command = [sys.executable, "-m", "npu_runner", "rows", "t.jsonl", "--prompt", "?", "-o", "-"]
    done = zygote.run(command, cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(done.stdout)["custom_id"] == "t.jsonl#1"
    assert done.stderr.startswith(b"rows      -: 1 rows\n")


@pytest.mark.parametrize("arguments", [
    ["rows", "nowhere", "--prompt", "?", "-o", "r"], ["rows", ".", "-o", "r"], ["table", "nowhere", "-o", "t.csv"],
    ["table", "a.jsonl", "-o", "t.xlsx"], ["merge", "nowhere", "a.jsonl", "-o", "c"],
    ["table", "a.jsonl", "-o", "t.jsonl", "--excel-safe"],
], ids=" ".join)  # fmt: skip
def test_mistakes_exit_with_2_and_write_nothing(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(answered("a", completion("x")))
    assert cli.main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("npu-runner: ")
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained_in_help_and_named_on_the_page(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit):
        cli.main([command, "--help-all"])
    said = " ".join(capsys.readouterr().out.split())
    page = (ROOT / "docs" / "tables.md").read_text()
    for option in options_of(COMMANDS[command]):
        assert option.flag in said
        assert len(option.text) > 15, option.flag
        assert f"`{option.flag}" in page or option.flag == "--output", option.flag


WITHOUT = """
import sys
sys.modules["pyarrow"] = None
from npu_runner.cli import main as cli
for line in sys.stdin:
    print(cli.main(eval(line)), file=sys.stderr)
assert "torch" not in sys.modules
"""
COMMANDS_WITHOUT = [
    ["rows", "t.jsonl", "--prompt", "?", "-o", "r.jsonl"], ["table", "a.jsonl", "-o", "t.csv"],
    ["merge", "a.jsonl", "b.jsonl", "-o", "c.jsonl"], ["table", "a.jsonl", "-o", "u.parquet"],
    ["rows", "t.parquet", "--prompt", "?", "-o", "s.jsonl"],
]  # fmt: skip


def test_pyarrow_is_only_needed_where_it_is_used_and_then_named(tmp_path: Path) -> None:
    """And torch is not needed at all."""
    write_rows(tmp_path / "t.jsonl", [{"a": "b"}])
    (tmp_path / "t.parquet").write_bytes(b"")
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(answered("a", completion("x")))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        input="\n".join(map(repr, COMMANDS_WITHOUT)),
    )
    said = done.stderr.splitlines()
    assert [line for line in said if line in "012"] == ["0", "0", "0", "2", "2"]
    named = [line for line in said if "pip install 'pyarrow>=17'" in line]
    assert [line.endswith("or write CSV, which needs no package: -o table.csv") for line in named] == [True, False]
    assert {path.name for path in tmp_path.iterdir()} == {
        "t.jsonl",
        "t.parquet",
        "a.jsonl",
        "b.jsonl",
        "r.jsonl",
        "t.csv",
        "c.jsonl",
    }


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from npu_runner.cli import main as cli\n"
        "for name in ('rows', 'table', 'merge'):\n"
        "    try: cli.main([name, '--help'])\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'pyarrow', 'numpy', 'pydantic', 'jinja2', 'PIL'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
