"""Rows of /v1/classify with labels, through real jobs with a model that generates text, and the tables of them."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from npu_runner import LLM, PoolingParams
from npu_runner.cli import main as cli
from tests.batch.pooled_jobs import MESSAGES, classify_row, embedding_row, job, probs, response
from tests.batch.scripted import completion_row, write_rows
from tests.oracle.classifiers import make_classifier
from tests.oracle.thinking_checkpoints import make_thinking

LABELS = ["red", "red circle", "blue"]
BEGUN = [{"role": "user", "content": "Which colour is it?"}, {"role": "assistant", "content": "It is "}]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3_vl")


@pytest.fixture(scope="module")
def results(model: Path) -> list[Any]:
    with LLM(model, platform="cpu", max_model_len=512, kv_cache_bytes=1 << 26, allowed_media_dir="/") as llm:
        chosen = llm.classify(["a red circle", MESSAGES, [5, 6, 7]], labels=LABELS)
        return [*chosen, *llm.classify("a red circle", PoolingParams(use_activation=False), labels=LABELS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("labels")


@pytest.fixture(scope="module")
def answers(model: Path, folder: Path, results: list[Any]) -> dict[str, dict[str, Any]]:
    rows = [
        classify_row("text", input="a red circle", labels=LABELS, metadata={"expected": results[0].label}),
        classify_row("image", messages=MESSAGES, labels=LABELS, metadata={"expected": "none of them"}),
        classify_row("several", input=["a red circle", "b"], labels=LABELS),
        classify_row("sums", input="a red circle", labels=LABELS, use_activation=False),
        classify_row("behind", messages=MESSAGES, labels=LABELS, add_generation_prompt=False),
        classify_row("none", input="a red circle"),
        classify_row("one", input="a red circle", labels=["red"]),
        classify_row("twice", input="a red circle", labels=["red", "red"]),
        classify_row("empty", input="a red circle", labels=["red", ""]),
        classify_row("continued", messages=BEGUN, labels=LABELS, continue_final_message=True),
        classify_row("behind it", messages=BEGUN, labels=LABELS),
        completion_row("text beside", max_tokens=2),
    ]
    return job(folder, model, rows, "--summary", str(folder / "summary.json"))


def test_rows_have_the_labels_of_llm_classify(answers: dict[str, dict[str, Any]], results: list[Any]) -> None:
    text, image, _, raw = (result.probs for result in results)
    np.testing.assert_allclose(probs(answers["text"]), [text], atol=1e-5)
    np.testing.assert_allclose(probs(answers["image"]), [image], atol=1e-5)
    np.testing.assert_allclose(probs(answers["several"])[0], text, atol=1e-5)
    np.testing.assert_allclose(probs(answers["sums"]), [raw], atol=1e-4)
    assert np.abs(probs(answers["behind"]) - probs(answers["image"])).max() > 1e-4
    for name in ("text", "image", "several", "sums", "behind"):
        for item in response(answers[name]).data:
            assert item.num_classes == len(LABELS)
            assert item.label == LABELS[int(np.argmax(item.probs))]


def test_labels_follow_the_begun_answer(answers: dict[str, dict[str, Any]], model: Path) -> None:
    with LLM(model, platform="cpu", max_model_len=512, kv_cache_bytes=1 << 26) as llm:
        (result,) = llm.classify(BEGUN, labels=LABELS, continue_final_message=True)
        (behind,) = llm.classify(BEGUN, PoolingParams(labels=LABELS))
    np.testing.assert_allclose(probs(answers["continued"]), [result.probs], atol=1e-5)
    np.testing.assert_allclose(probs(answers["behind it"]), [behind.probs], atol=1e-5)
    assert result.num_prompt_tokens < behind.num_prompt_tokens


def test_tokens_of_the_prompt_count_once(answers: dict[str, dict[str, Any]], results: list[Any]) -> None:
    usage = response(answers["text"]).usage
    assert usage.prompt_tokens == usage.total_tokens == results[0].num_prompt_tokens


def test_labels_are_compared_with_what_was_expected(answers: dict[str, dict[str, Any]], folder: Path) -> None:
    found = json.loads((folder / "summary.json").read_text())["this_run"]["expected_answers"]
    assert found == {"rows": 2, "as_expected": 1, "accuracy": 0.5}


def test_labels_that_are_none_fail_by_name(answers: dict[str, dict[str, Any]]) -> None:
    found = {name: answers[name]["error"]["param"] for name in ("none", "one", "twice", "empty")}
    assert found == {"none": "labels", "one": "labels", "twice": "labels[1]", "empty": "labels[1]"}
    assert answers["none"]["error"]["code"] == "missing_required_parameter"
    assert answers["text beside"]["error"] is None


def test_models_that_choose_from_no_labels(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    classifier = make_classifier(checkpoint("qwen3_5"), tmp_path / "classifier")
    error = job(tmp_path, classifier, [classify_row("labels", input="a", labels=LABELS)])["labels"]["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "labels")
    other = tmp_path / "vectors"
    other.mkdir()
    rows = [classify_row("labels", input="a", labels=LABELS), embedding_row("vector", input="a")]
    found = job(other, checkpoint("qwen3"), rows, "--runner", "pooling")
    assert found["labels"]["error"]["code"] == "wrong_endpoint"
    assert found["vector"]["error"] is None


def test_a_model_without_an_end_and_labels_that_are_alike_to_it(checkpoint: Callable[..., Path],
                                                                tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({key: value for key, value in values.items() if "eos" not in key}))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps({**tokenizer, "normalizer": {"type": "NFC"}}))
    found = job(tmp_path, model, [classify_row("end", input="a", labels=LABELS),
                                  classify_row("alike", input="a", labels=["a", "\u00e9", "e\u0301"])])
    end, alike = (found[name]["error"] for name in ("end", "alike"))
    assert (end["code"], end["param"]) == ("unsupported_parameter", "labels")
    assert "eos_token_id" in end["message"]
    assert (alike["code"], alike["param"]) == ("invalid_value", "labels[2]")
    assert "same tokens as labels[1]" in alike["message"]


def test_a_prompt_that_leaves_reasoning_open_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = make_thinking(checkpoint, tmp_path / "model")
    ask = [{"role": "user", "content": "which colour?"}]
    rows = [classify_row("open", messages=ask, labels=LABELS),
            classify_row("closed", messages=ask, labels=LABELS, chat_template_kwargs={"enable_thinking": False})]
    found = job(tmp_path, model, rows)
    assert found["open"]["error"]["code"] == "reasoning_open"
    assert "enable_thinking" in found["open"]["error"]["message"]
    assert found["closed"]["error"] is None


def test_a_table_has_a_column_for_each_label(answers: dict[str, dict[str, Any]], folder: Path, tmp_path: Path,
                                             model: Path) -> None:
    same = [classify_row(name, input=name, labels=LABELS) for name in ("a", "b")]
    found = job(tmp_path, model, same)
    paths = [str(tmp_path / name) for name in ("answers.jsonl", "rows.jsonl", "table.parquet")]
    assert cli.main(["table", paths[0], "-i", paths[1], "-o", paths[2]]) == 0
    table = pq.read_table(paths[2])
    assert "probs" not in table.column_names
    for name, cells in zip(table["custom_id"].to_pylist(), table.to_pylist(), strict=True):
        np.testing.assert_allclose([cells[f"prob.{label}"] for label in LABELS], probs(found[name])[0], atol=1e-7)
    other = [*same, classify_row("c", input="c", labels=["x", "y"])]
    write_rows(tmp_path / "rows.jsonl", other)
    (tmp_path / "answers.jsonl").unlink()
    found = job(tmp_path, model, other)
    assert cli.main(["table", paths[0], "-i", paths[1], "-o", str(tmp_path / "table.csv")]) == 0
    with (tmp_path / "table.csv").open() as file:
        lines = {line["custom_id"]: line for line in csv.DictReader(file)}
    assert json.loads(lines["c"]["probs"]) == dict(zip(["x", "y"], response(found["c"]).data[0].probs, strict=True))
    assert list(json.loads(lines["a"]["probs"])) == LABELS
    assert cli.main(["table", paths[0], "-o", str(tmp_path / "alone.csv")]) == 0
