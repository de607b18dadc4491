"""Rows with schemas, thinking budgets, guards, tools and forced calls: two replicas give the bytes of one engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_runner.cli import main as cli
from tests.batch.scripted import read_rows, row, write_rows
from tests.oracle.thinking_checkpoints import make_thinking
from tests.replicas.ray_nodes import Node, need_ray, nodes, wait_for_resource

SMALL = ["--platform", "cpu", "--dtype", "float32", "--max-model-len", "768", "--kv-cache-bytes", "16M",
         "--progress", "off", "--preprocessing-workers", "1", "--max-num-seqs", "4"]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
_TOOLS = "{% if tools is defined and tools %}{{ '<tool_call>' + (tools | tojson) }}{% endif %}"


def rows() -> list[dict[str, Any]]:
    """Of each kind several, so that both replicas have some; greedy and drawn."""
    kinds: dict[str, dict[str, Any]] = {
        "job's schema": {}, "own": {"guided_regex": "[a-f]{4}", "max_thinking_tokens": 2},
        "budget alone": {"response_format": {"type": "text"}, "max_thinking_tokens": 7, "max_tokens": 24},
        "guarded": {"response_format": {"type": "text"}, "max_tokens": 24, "no_repeat_ngram_size": 2,
                    "repetition_detection": {"max_pattern_size": 9, "min_count": 2}},
        "tools": {"tools": [TOOL], "max_tokens": 24}, "forced": {"tools": [TOOL], "tool_choice": {
            "type": "function", "function": {"name": "look"}}},
        "wrong": {"guided_json": {"not": {}}},
    }  # fmt: skip
    return [row(f"{name} {number}", "which?", **{"max_tokens": 240, "temperature": number % 2, **body})
            for number in range(4) for name, body in kinds.items()]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rules")
    model = make_thinking(checkpoint, made / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = _TOOLS + settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (made / "schema.json").write_text(json.dumps(SCHEMA))
    write_rows(made / "in.jsonl", rows())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        assert run(made, "one.jsonl") == 3, "some rows are there to fail"
    return made


def run(folder: Path, output: str, *options: str) -> int:
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / output), "--model", str(folder / "model")]
    rules = ["--response-schema", str(folder / "schema.json"), "--max-thinking-tokens", "4"]
    return cli.main(["batch", *files, *rules, *SMALL, *options])


def lines(path: Path) -> list[bytes]:
    return sorted(path.read_bytes().splitlines())


@pytest.mark.full("what rows with rules ask for stays in batch/test_structured_job.py and test_tools_job.py")
def test_the_rows_of_one_engine_are_what_they_ask_for(folder: Path) -> None:
    found = {item["custom_id"]: item for item in read_rows(folder / "one.jsonl")}
    for name, item in found.items():
        if name.startswith("wrong"):
            assert item["error"]["code"] == "invalid_structured_outputs"
            continue
        (choice,) = item["response"]["body"]["choices"]
        if name.startswith("forced"):
            assert choice["finish_reason"] == "tool_calls"
        thought = item["response"]["body"]["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert thought <= 7 if name.startswith("budget") else thought <= 4


@pytest.mark.usefixtures("fixed_time")
@pytest.mark.full("two replicas load a model; rows without rules over replicas stay")
def test_two_replicas_give_the_bytes_of_one_engine(folder: Path) -> None:
    assert run(folder, "two.jsonl", "--data-parallel-size", "2") == 3
    assert lines(folder / "two.jsonl") == lines(folder / "one.jsonl")


@pytest.mark.usefixtures("fixed_time")
@pytest.mark.full("an actor of a Ray cluster loads a model; Ray with scripted engines stays")
def test_actors_of_a_cluster_give_the_bytes_of_one_engine(folder: Path) -> None:
    need_ray()
    with nodes() as made:
        made.append(Node(num_cpus=1))
        wait_for_resource(made[0].address, "CPU", 1)
        assert run(folder, "ray.jsonl", "--ray", made[0].address) == 3
    assert lines(folder / "ray.jsonl") == lines(folder / "one.jsonl")
