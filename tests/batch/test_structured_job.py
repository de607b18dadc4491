"""A job whose answers must parse: rows say what theirs are, a file says it for all others, wrong ones fail alone."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletion

from npu_runner.cli import main as cli
from npu_runner.runner.model_runner import ModelRunner
from npu_runner.serving.endpoint import Endpoint
from tests.batch.scripted import read_rows, row, write_rows
from tests.full_set import only_full
from tests.oracle.thinking_checkpoints import make_thinking

SMALL = ["--platform", "cpu", "--dtype", "float32", "--max-model-len", "384", "--kv-cache-bytes", "16M",
         "--progress", "off"]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip
OWN = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 200}
GOOD: dict[str, dict[str, Any]] = {
    "job's": {},
    "own": {"response_format": {"type": "json_schema", "json_schema": {"name": "own", "schema": OWN, "strict": True}}},
    "guided": {"guided_choice": ["circle", "square"], "n": 2, "temperature": 1},
    "text": {"response_format": {"type": "text"}, "max_tokens": 12, "ignore_eos": True},
    "thinks longer": {"max_thinking_tokens": 9},
    "cut": {"max_tokens": 6},
}
BAD: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "place": ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
        "properties": {"size": {"not": {"type": "string"}}}}}}}, "invalid_structured_outputs",
        "response_format.json_schema.schema", "#/properties/size"),
    "two rules": ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "invalid_value", "guided_regex",
                  "structured_outputs says already"),
    "nothing left": ({"guided_choice": ["a"], "min_tokens": 90}, "no_token_left", None, "or allowed_token_ids"),
    "ends nothing": ({"ignore_eos": True}, "invalid_sampling_parameter", "ignore_eos", "leave it out"),
    "deep": ({"guided_json": json.loads('{"allOf": [' * 30 + "{}" + "]}" * 30)}, "nested_too_deep", "guided_json",
             "at most 60"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_thinking(checkpoint, tmp_path_factory.mktemp("structured") / "model")


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    rows = [row(name, **{**ASKED, **body}) for name, body in GOOD.items()]
    rows += [row(name, **{**ASKED, **body}) for name, (body, *_) in BAD.items()]
    rows.append({"custom_id": "raw", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", **ASKED}})
    write_rows(folder / "in.jsonl", rows)
    assert run(folder, model, "--response-schema", str(folder / "schema.json"), "--max-thinking-tokens", "4",
               "--summary", str(folder / "sums.json")) == 3
    return folder


def run(folder: Path, model: Path, *arguments: str) -> int:
    return cli.main(["batch", "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--model", str(model),
                     *SMALL, *arguments])  # fmt: skip


@pytest.fixture(scope="module")
def found(finished: Path) -> dict[str, dict[str, Any]]:
    return {item["custom_id"]: item for item in read_rows(finished / "out.jsonl")}


def is_json(text: str) -> bool:
    try:
        return json.loads(text) is not None
    except ValueError:
        return False


def test_what_is_cut_off_and_what_does_not_parse_is_counted(finished: Path, found: dict[str, dict[str, Any]]) -> None:
    cut_off = {name for name in [*GOOD, "raw"]
               if any(choice["finish_reason"] == "length" for choice in choices(found, name))}  # fmt: skip
    of_json = {"job's", "own", "thinks longer", "cut", "raw"}
    texts = {name: [choice.get("text") or choice.get("message", {}).get("content") or "" for choice in
                    choices(found, name)] for name in of_json}  # fmt: skip
    unparsed = {name for name in of_json if not all(map(is_json, texts[name]))}
    assert {"cut", "text"} <= cut_off
    assert "cut" in unparsed
    rows = json.loads((finished / "sums.json").read_text())["rows"]
    assert (rows["cut_off"], rows["unparsed"]) == (len(cut_off), len(unparsed))


def choices(found: dict[str, dict[str, Any]], name: str) -> list[dict[str, Any]]:
    assert found[name]["error"] is None, found[name]["error"]
    body = found[name]["response"]["body"]
    if name != "raw":
        ChatCompletion.model_validate_json(json.dumps(body), strict=True)
    return list(body["choices"])


def test_answers_are_what_the_row_or_the_job_says(found: dict[str, dict[str, Any]]) -> None:
    for name, schema in (("job's", SCHEMA), ("own", OWN), ("thinks longer", SCHEMA)):
        (choice,) = choices(found, name)
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    (raw,) = choices(found, "raw")
    jsonschema.validate(json.loads(raw["text"]), SCHEMA)
    assert {choice["message"]["content"] for choice in choices(found, "guided")} <= {"circle", "square"}


def test_an_answer_that_was_cut_off_says_length(found: dict[str, dict[str, Any]]) -> None:
    (choice,) = choices(found, "cut")
    assert choice["finish_reason"] == "length"


def test_a_row_may_have_its_text_as_it_comes(found: dict[str, dict[str, Any]]) -> None:
    (choice,) = choices(found, "text")
    assert not (choice["message"]["content"] or "").startswith("{")


def test_thinking_ends_when_the_rows_or_the_jobs_budget_is_spent(found: dict[str, dict[str, Any]]) -> None:
    for name, budget in (("job's", 4), ("own", 4), ("text", 4), ("thinks longer", 9)):
        usage = found[name]["response"]["body"]["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == budget, name


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_row_fails_alone_and_names_field_and_place(found: dict[str, dict[str, Any]], name: str) -> None:
    _, code, param, what = BAD[name]
    error = found[name]["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert what in error["message"]


@pytest.mark.parametrize(("arguments", "name"), [
    ([], "answers.structured_outputs: was "),
    (["--response-schema", "other.json", "--max-thinking-tokens", "4"], "answers.structured_outputs: was "),
    (["--response-schema", "schema.json", "--max-thinking-tokens", "5"], "answers.max_thinking_tokens: was "),
])  # fmt: skip
def test_an_output_goes_on_with_no_other_rule(
    finished: Path, model: Path, arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (finished / "other.json").write_text(json.dumps(OWN))
    paths = [str(finished / item) if item.endswith(".json") else item for item in arguments]
    assert run(finished, model, "--retry-errors", *paths) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("has_schema", [True, *only_full("a job without a schema, which gets nothing ready", False)])
def test_a_job_with_a_schema_gets_ready_for_it_while_the_weights_load(
    model: Path, tmp_path: Path, has_schema: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    load = ModelRunner.load_model

    def load_model(runner: ModelRunner) -> None:
        begun.append(runner._matchers._tokens is not None)
        load(runner)

    monkeypatch.setattr(ModelRunner, "load_model", load_model)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    write_rows(tmp_path / "in.jsonl", [row("a", **ASKED)])
    assert run(tmp_path, model, *(["--response-schema", str(tmp_path / "schema.json")] if has_schema else [])) == 0
    assert begun == [has_schema]


@pytest.mark.parametrize(("text", "what"), [
    (None, "cannot be read"), ("{", "not JSON"), ('{"uniqueItems": true}', "at #: Unimplemented"),
    ("[]", "no JSON schema"),
    (json.dumps({"description": "x" * 300_000}), "at most 262144 are allowed"),
])  # fmt: skip
def test_a_jobs_wrong_schema_is_refused_before_anything_is_begun(
    model: Path, tmp_path: Path, text: str | None, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "in.jsonl", [row("a")])
    if text is not None:
        (tmp_path / "schema.json").write_text(text)
    assert run(tmp_path, model, "--response-schema", str(tmp_path / "schema.json")) == 2
    said = capsys.readouterr().err
    assert "response_schema: " in said
    assert what in said
    assert not (tmp_path / "out.jsonl").exists()


def test_a_jobs_budget_for_a_model_that_does_not_think_is_refused(
    checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "in.jsonl", [row("a")])
    assert run(tmp_path, checkpoint("qwen3"), "--max-thinking-tokens", "3") == 2
    assert "max_thinking_tokens: this model has no end-of-thinking token" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("asked", [{"guided_choice": ["circle"]}, *only_full("rows that ask for nothing", {})])
def test_the_table_of_tokens_is_begun_while_the_model_loads_if_a_first_row_needs_it(
    asked: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says so: a worker prepares the row meanwhile."""
    seen, begun = threading.Event(), []
    look_at, profile = Endpoint._record, ModelRunner.profile_run

    def look(endpoint: Endpoint, task: Any, prepared: Any) -> None:
        look_at(endpoint, task, prepared)
        seen.set()

    def profile_run(runner: ModelRunner) -> Any:
        assert seen.wait(60), "no row is prepared while the model loads"
        found = profile(runner)
        begun.append(runner._matchers._tokens is not None)
        return found

    monkeypatch.setattr(Endpoint, "_record", look)
    monkeypatch.setattr(ModelRunner, "profile_run", profile_run)
    write_rows(tmp_path / "in.jsonl", [row("first", **{**ASKED, "max_thinking_tokens": 4, **asked})])
    assert run(tmp_path, model) == 0
    assert begun == [bool(asked)]
