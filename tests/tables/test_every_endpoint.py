"""Every command that reads answers knows every endpoint: what one of them writes, all of them read."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from npu_runner.batch.rows.endpoints import ENDPOINTS, answers_of
from npu_runner.cli import main as cli
from tests.batch.job_folder import Job
from tests.batch.scripted import read_rows, write_rows
from tests.batch.scripted import row as scripted_row
from tests.full_set import only_full
from tests.oracle.classifiers import make_classifier
from tests.reports.report_pages import plain
from tests.tables.made import FORMS, POOLED, answered_by, begun, failed

SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off"]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "a red", "max_tokens": 2},
    "/v1/embeddings": {"input": ["a red circle", "two squares"]},
    "/v1/score": {"text_1": "a red circle", "text_2": ["a round red shape", "two squares"]},
    "/v1/rerank": {"query": "a red circle", "documents": ["a round red shape", "two squares"]},
    "/v1/classify": {"input": ["a red circle", "two squares"]},
}
SIGMOIDS = {url: [float(np.float32(1 / (1 + np.exp(-values[0])))) for values in POOLED[url]]
            for url in ("/v1/score", "/v1/rerank")}  # fmt: skip
CELLS: dict[str, dict[str, list[Any]]] = {
    "/v1/chat/completions": {"index": [0, 1], "text": ["text 0", "text 1"], "completion_tokens": [6, None]},
    "/v1/completions": {"index": [0, 1], "text": ["text 0", "text 1"], "completion_tokens": [6, None]},
    "/v1/embeddings": {"index": [0, 1], "vector": POOLED["/v1/embeddings"]},
    "/v1/score": {"index": [0, 1], "score": SIGMOIDS["/v1/score"]},
    "/v1/rerank": {"index": [1, 0], "score": SIGMOIDS["/v1/rerank"][::-1]},
    "/v1/classify": {"index": [0, 1], "label": ["good", "bad"], "probs": [[0.1192, 0.8808], [0.5, 0.5]]},
}
"""The columns in which a table has the answers of `answered_by`."""
SHOWN = {
    "/v1/chat/completions": "text 1", "/v1/completions": "text 1", "/v1/embeddings": "2 numbers:",
    "/v1/score": "0.6225", "/v1/rerank": "document 1: 0.8808", "/v1/classify": "good",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outputs(folder: Path, url: str) -> None:
    """in.jsonl with three rows of an endpoint, and two outputs: a answered, b failed in the first; a, b, c answered in
    the second."""
    write_rows(folder / "in.jsonl", [row(url, name) for name in "abc"])
    (folder / "one.jsonl").write_bytes(answered_by(url, "a") + failed("b", line=2))
    (folder / "two.jsonl").write_bytes(answered_by(url, "a") + answered_by(url, "b") + answered_by(url, "c"))
    for name in ("one", "two"):
        begun(folder / f"{name}.jsonl", folder / "in.jsonl")


def row(url: str, name: str, **more: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {**BODIES[url], **more}}


def test_all_endpoints_are_tried() -> None:
    assert ENDPOINTS.keys() == FORMS.keys() == BODIES.keys() == CELLS.keys() == SHOWN.keys()


@pytest.mark.parametrize("url", ENDPOINTS)
def test_the_form_of_an_answer_is_found_in_its_body(url: str) -> None:
    form, items = answers_of(json.loads(answered_by(url, "a"))["response"]["body"])
    assert (form, len(items)) == (ENDPOINTS[url].form, 2)


@pytest.mark.parametrize("url", ENDPOINTS)
def test_merge_keeps_every_row(url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs(folder, url)
    assert cli.main(["merge", "one.jsonl", "two.jsonl", "-o", "all.jsonl", "--dropped", "dropped.jsonl"]) == 0
    assert (folder / "all.jsonl").read_bytes() == b"".join(answered_by(url, name) for name in "abc")
    assert (folder / "dropped.jsonl").read_bytes() == failed("b", line=2) + answered_by(url, "a")
    said = capsys.readouterr().err
    assert "merged    all.jsonl: 3 rows (1 of one.jsonl, 2 of two.jsonl), 0 of them failed\n" in said
    assert "inputs " not in said, "their manifests say that it is one"


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "npy"])
@pytest.mark.parametrize("url", ENDPOINTS)
def test_table_has_a_line_of_every_answer(
    url: str, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs(folder, url)
    status = cli.main(["table", "two.jsonl", "-i", "in.jsonl", "-o", f"t.{kind}"])
    if kind == "npy" and not ENDPOINTS[url].form.has_vectors:
        assert status == 2
        assert "npy: there is no vector among the answers" in capsys.readouterr().err
        return
    assert status == 0
    assert "t." + kind + ": 6 lines of 3 rows, 0 of them failed\n" in capsys.readouterr().err
    if kind == "npy":
        np.testing.assert_array_equal(np.load("t.npy"), np.array(POOLED[url] * 3, dtype=np.float32))
        return
    if kind == "parquet":
        lines = pq.read_table("t.parquet").to_pylist()
    elif kind == "jsonl":
        lines = read_rows(folder / "t.jsonl")
    else:
        with open("t.csv", newline="") as file:
            lines = [{name: read_cell(cell) for name, cell in line.items()} for line in csv.DictReader(file)]
    assert [line["custom_id"] for line in lines] == list("aabbcc")
    for name, values in CELLS[url].items():
        for line, value in zip(lines, values * 3, strict=True):
            assert line[name] == (pytest.approx(value, abs=1e-4) if name in ("probs", "score") else value)
    assert [line["prompt_tokens"] for line in lines] == [5, None] * 3
    others = {name for cells in CELLS.values() for name in cells} - CELLS[url].keys() - {"completion_tokens"}
    assert not others & lines[0].keys()


def read_cell(cell: str) -> Any:
    try:
        return json.loads(cell) if cell else None
    except ValueError:
        return cell


@pytest.mark.parametrize("url", ENDPOINTS)
def test_report_shows_what_is_said(url: str, folder: Path) -> None:
    outputs(folder, url)
    assert cli.main(["report", "two.jsonl", "-i", "in.jsonl", "-o", "page.html"]) == 0
    page = plain((folder / "page.html").read_text())
    assert SHOWN[url] in page
    assert "a red" in page or "What is it?" in page


@pytest.mark.parametrize("command", ["summary", "status"])
@pytest.mark.parametrize("url", ENDPOINTS)
def test_summary_and_status_count_the_rows(
    url: str, command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs(folder, url)
    assert cli.main([command, "one.jsonl", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert (rows["answered"], rows["failed"], rows["cut_off"], rows["repetition"]) == (1, 1, 0, 0)


TASKS = {"/v1/embeddings": "embed", "/v1/score": "score", "/v1/rerank": "score", "/v1/classify": "classify"}


@pytest.mark.parametrize("url", [
    "/v1/rerank", *only_full("two real jobs of each other endpoint", *sorted(ENDPOINTS.keys() - {"/v1/rerank"}))])
def test_a_failed_row_is_tried_again(
    url: str, folder: Path, checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder / "in.jsonl", [row(url, "a"), row(url, "b", no_such_field=1)])
    options = ["-i", "in.jsonl", "-o", "out.jsonl", *SMALL]
    options += ["--task", TASKS[url]] if url in TASKS else []
    if url == "/v1/classify":
        options += ["--model", str(make_classifier(checkpoint("qwen3_5"), folder / "classifier"))]
    assert cli.main(["batch", *options]) == 3
    first, bad = (folder / "out.jsonl").read_bytes().splitlines(keepends=True)
    first, bad = (first, bad) if json.loads(first)["custom_id"] == "a" else (bad, first)
    write_rows(folder / "in.jsonl", [row(url, "a"), row(url, "b")])
    assert cli.main(["batch", *options, "--retry-errors"]) == 0
    lines = (folder / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert lines[0] == first, "an answer stays as it is"
    assert [json.loads(line)["custom_id"] for line in lines] == ["a", "b"]
    form, items = answers_of(json.loads(lines[1])["response"]["body"])
    assert form is ENDPOINTS[url].form
    assert len(items) == (1 if url in ("/v1/chat/completions", "/v1/completions") else 2)
    assert cli.main(["table", "out.jsonl", "-i", "in.jsonl", "-o", "t.csv"]) == 0
    assert "of 2 rows, 0 of them failed" in capsys.readouterr().err


@pytest.mark.parametrize("field", ['"custom_id": null, "error": {"line": 1e999}', '"custom_id": null, "error": null',
                                   '"custom_id": null, "error": {"line": 1.5}', '"custom_id": 5, "error": null'])
def test_a_line_that_names_no_row_is_no_result_row(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for the job, which goes on and drops it."""
    job = Job(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_rows(job.input, [scripted_row(name) for name in "ab"])
    job.run()
    whole = job.output.read_bytes()
    job.output.write_bytes(whole + f'{{{field}, "response": null}}\n'.encode())
    for command in (["summary"], ["table", "-o", "t.csv"], ["report", "-o", "t.html"]):
        assert cli.main([command[0], "out.jsonl", *command[1:]]) == 0
    said = capsys.readouterr()
    assert "out.jsonl: finished\nrows      2 answered, 0 failed" in said.out
    assert "1 lines are no result rows, the first of them is line 3" in said.err
    assert job.run().exit_status == 0
    assert job.output.read_bytes() == whole


@pytest.mark.parametrize("command", ["table", "merge", "report", "summary", "status"])
def test_a_file_without_a_result_row_is_no_output(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(folder / "in.jsonl", [row("/v1/score", "a")])
    (folder / "x.jsonl").write_bytes(b'{"text": "of another program"}\n[]\nno JSON\n')
    (folder / "y.jsonl").write_bytes(answered_by("/v1/score", "a"))
    begun(folder / "x.jsonl", folder / "in.jsonl")
    more = {"table": ["-o", "t.csv"], "merge": ["y.jsonl", "-o", "t", "--dropped", "d"], "report": ["-o", "t.html"]}
    before = sorted(folder.iterdir())
    assert cli.main([command, "x.jsonl", *more.get(command, [])]) == 2
    assert "none of its 3 lines is a result row; name the output of a job" in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before
    (folder / "x.jsonl").write_bytes(b'{"custom_id": "a", "resp')  # a job writes its first row
    if command != "merge":
        assert cli.main([command, "x.jsonl", *more.get(command, [])]) == 0
