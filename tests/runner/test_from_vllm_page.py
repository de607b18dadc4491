"""docs/from-vllm.md: its examples run as they stand there, and each name in its tables is what the code has."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM, RunnerConfig, SamplingParams
from npu_runner.cli import main as cli
from npu_runner.config import flat_fields
from npu_runner.llm import vllm_settings
from npu_runner.request.outputs import CompletionOutput, RequestMetrics, RequestOutput
from npu_runner.serving.options import ReplicaOptions
from tests.batch.scripted import read_rows

PAGE = (Path(__file__).parents[2] / "docs" / "from-vllm.md").read_text()
EXAMPLES = {title.lower(): code for title, code in re.findall(r"^### (.+?)\n.*?```python\n(.*?)```", PAGE, re.M | re.S)}


def run(example: str) -> tuple[list[str], dict[str, Any]]:
    """What it prints, and its variables. It is a script of its own."""
    printed, names = io.StringIO(), {"__name__": "__main__"}
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(EXAMPLES[example], example, "exec"), names)
    finally:
        llm = names.get("llm")
        if isinstance(llm, LLM):
            llm.close()
    return printed.getvalue().splitlines(), names


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_an_example_of_each_kind() -> None:
    assert list(EXAMPLES) == ["basic", "chat", "vision", "structured output", "embedding"]


def test_basic() -> None:
    lines, names = run("basic")
    assert len(lines) == 2
    for line, prompt in zip(lines, names["prompts"], strict=True):
        said, _, text = line.partition(" -> ")
        assert ast.literal_eval(said) == prompt
        assert ast.literal_eval(text)
    assert len(names["output"].outputs[0].token_ids) <= 16


def test_chat() -> None:
    lines, names = run("chat")
    assert names["output"].prompt == "You are a careful observer.\nWhat is a circle?\n"
    assert lines[-3:] == ["You are a careful observer.", "What is a circle?", ""]
    assert "<|im_start|>assistant" in "\n".join(lines)
    assert len(names["outputs"]) == 4


def test_vision() -> None:
    lines, names = run("vision")
    assert lines == [names["same"].outputs[0].text] != [""]


def test_structured_output() -> None:
    lines, names = run("structured output")
    assert lines[0] in ("circle", "square")
    answer = names["output"].outputs[0]
    assert answer.finish_reason == "length" or names["Shape"].model_validate_json(answer.text)


def test_embedding() -> None:
    lines, names = run("embedding")
    assert [line.partition("[")[0] for line in lines[:2]] == ["a red circle ", "two squares "]
    assert np.linalg.norm(names["output"].outputs.embedding) == pytest.approx(1.0, abs=1e-5)


def test_batch(folder: Path) -> None:
    (rows,) = re.findall(r"```jsonl\n(.*?)```", PAGE, re.S)
    (folder / "rows.jsonl").write_text(rows)
    (command,) = re.findall(r"^    npu-runner (batch .*)$", PAGE, re.M)
    settings = ["--max-model-len", "512", "--kv-cache-bytes", "64M", "--progress", "off"]
    assert cli.main([*command.replace("MODEL", "shapes-vl").split(), *settings]) == 0
    answers = {row["custom_id"]: row["response"]["body"] for row in read_rows(folder / "answers.jsonl")}
    assert set(answers) == {json.loads(line)["custom_id"] for line in rows.splitlines()}
    assert answers["request-2"]["usage"]["completion_tokens"] == 8


def first_column(section: str) -> list[list[str]]:
    """The names in code of each row's first cell, up to what is assigned or called."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ") and " vLLM " not in line]
    return [re.findall(r"`(\w+)[^`]*`", cell) for cell in cells if not cell.startswith("|--")]


def test_the_names_in_the_tables_are_those_of_the_code() -> None:
    settings = {*flat_fields(RunnerConfig), *flat_fields(ReplicaOptions), *vllm_settings._HARMLESS,
                *vllm_settings._IGNORED, *vllm_settings._RENAMED, *vllm_settings._SPECIAL}
    assert {name for row in first_column("Settings") for name in row} - {"model"} <= settings
    params = {field.name for field in dataclasses.fields(SamplingParams)}
    *there, not_there = first_column("SamplingParams")
    assert {name for row in there for name in row} <= params
    assert not params & set(not_there)
    results = {*dir(RequestOutput), *dir(CompletionOutput), *RequestOutput.__dataclass_fields__,
               *CompletionOutput.__dataclass_fields__}
    calls = {"embed", "classify", "score", "encode"}
    assert {name for row in first_column("Results") for name in row} - calls <= results
    assert calls <= set(dir(LLM))
    assert {name for name in re.findall(r"`(\w+)`", next(line for line in PAGE.splitlines() if "`metrics`" in line))
            if name.endswith(("_ts", "_time", "_tokens", "_latency"))} == {
                *RequestMetrics.__dataclass_fields__, "first_token_latency"}
    assert {name for row in first_column("Calls") for name in row if hasattr(LLM, name)} == {
        "generate", "chat", "classify", "embed", "score", "get_tokenizer", "get_default_sampling_params"}
