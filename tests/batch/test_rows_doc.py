"""docs/rows.md and example_rows/: every row does what its name says, through a real job, and no field is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.rows.chat import ChatBody, Message
from npu_runner.batch.rows.completions import CompletionBody
from npu_runner.batch.rows.endpoint import RowBody
from npu_runner.batch.rows.endpoints import ENDPOINTS
from npu_runner.batch.rows.pooled import ClassifyBody, EmbeddingBody
from npu_runner.batch.rows.scores import RerankBody, ScoreBody
from npu_runner.cli import main as cli
from tests.batch.scripted import read_rows
from tests.oracle.classifiers import make_classifier

DOC = (Path(__file__).parents[2] / "docs" / "rows.md").read_text()
SMALL = ["--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off"]
JOBS = {"text": [], "pooling": ["--runner", "pooling"], "ranking": ["--task", "score"], "classes": []}
"""The options of each job. A job runs one file, and the blocks of the page that are marked with its name."""
BLOCKS = re.findall(r"```jsonl ?([a-z]*)\n(.*?)```", DOC, re.DOTALL)
ROWS_OF = {job: [line for mark, block in BLOCKS if (mark or "text") == job for line in block.splitlines()]
           + (Path(__file__).parent / "example_rows" / f"{job}.jsonl").read_text().splitlines() for job in JOBS}
EXAMPLES = [line for rows in ROWS_OF.values() for line in rows]
FIELDS = {"custom_id", "method", "url", "body", *ChatBody.model_fields, *CompletionBody.model_fields,
          *EmbeddingBody.model_fields, *ClassifyBody.model_fields, *ScoreBody.model_fields, *RerankBody.model_fields,
          *Message.model_fields}  # fmt: skip


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rows")
    of_classes = ["--model", str(make_classifier(checkpoint("qwen3_5"), folder / "classifier"))]
    found = {}
    for job, options in (JOBS | {"classes": of_classes}).items():
        (folder / "rows.jsonl").write_text("\n".join(ROWS_OF[job]) + "\n")
        output = folder / f"answers-{job}.jsonl"
        files = ["-i", str(folder / "rows.jsonl"), "-o", str(output), "--allowed-media-dir", str(folder)]
        assert cli.main(["batch", *files, *SMALL, *options]) == 3, "some rows are there to fail"
        found.update({item["custom_id"]: item for item in read_rows(output)})
    assert len(found) == len(EXAMPLES)
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda line: json.loads(line)["custom_id"])
def test_a_row_does_what_the_page_says(example: str, answers: dict[str, dict[str, Any]]) -> None:
    name = json.loads(example)["custom_id"]
    code = re.search(r"\[(\w+)\]$", name)
    answer = answers[name]
    assert (answer["error"] or {}).get("code") == (code[1] if code else None), answer["error"]
    assert answer["response"]["status_code"] == (400 if code else 200)
    if code and code[1] != "wrong_endpoint" and json.loads(example)["body"]:
        assert answer["error"]["param"], "a wrong field is named"


def names_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from names_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from names_in(item)


def test_every_field_is_in_a_table_and_in_a_row_and_no_other_is() -> None:
    cells = re.findall(r"^\| (`[^|]*`) \|", DOC, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == FIELDS
    assert set(names_in([json.loads(line) for line in EXAMPLES])) >= FIELDS


@pytest.mark.parametrize("body", [endpoint.body for endpoint in ENDPOINTS.values()], ids=list(ENDPOINTS))
def test_every_field_that_is_known_and_not_served_is_named(body: type[RowBody]) -> None:
    assert {name for name in body.unserved if f"`{name}`" not in DOC} == set()
