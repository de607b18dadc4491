"""Rows of /v1/classify: vLLM's bodies and answers, through real jobs with a tiny classifier that sees images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM
from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.batch.rows.pooled import ClassifyBody, EmbeddingBody
from npu_runner.cli import main as cli
from npu_runner.errors import RequestError
from npu_runner.request.limits import LIMITS
from tests.batch.pooled_jobs import MESSAGES, SMALL, classify_row, embedding_row, job, probs, response
from tests.batch.scripted import completion_row, row
from tests.oracle.classifiers import LABELS, edit_config, expected_logits, make_classifier


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(checkpoint("qwen3_5"), tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def llm_results(model: Path) -> list[Any]:
    with LLM(model, platform="cpu", max_model_len=512, kv_cache_bytes=1 << 26) as llm:
        return llm.classify(["a red circle", "two squares", [5, 6, 7]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classes")


@pytest.fixture(scope="module")
def answers(model: Path, folder: Path, llm_results: list[Any]) -> dict[str, dict[str, Any]]:
    circle, squares, _ = (result.label for result in llm_results)
    rows = [
        classify_row("text", input="a red circle", model="mine", metadata={"expected": circle}),
        classify_row("ids", input=[5, 6, 7]),
        classify_row("texts", input=["a red circle", "two squares", "a red circle"]),
        classify_row("lists", input=[[5, 6, 7], [8]]),
        classify_row("logits", input=["a red circle", "two squares"], use_activation=False,
                     metadata={"expected": f"not {squares}"}),
        classify_row("cut", input=[1, 2, 3, 5, 6, 7], truncate_prompt_tokens=3),
        classify_row("image", messages=MESSAGES, add_generation_prompt=True),
        classify_row("too long", input=["fine", "x" * 4000]),
        classify_row("no activation", input="a", softmax=False),
        embedding_row("vector", input="a"),
        row("chat", "What is this?"),
        completion_row("completion"),
    ]
    pages = ["--report", str(folder / "report.html"), "--summary", str(folder / "summary.json")]
    return job(folder, model, rows, *pages, "--cached-tokens")


def test_every_answer_is_one_of_vllms(answers: dict[str, dict[str, Any]]) -> None:
    served = {name: answer for name, answer in answers.items() if answer["error"] is None}
    assert set(served) == {"text", "ids", "texts", "lists", "logits", "cut", "image"}
    for answer in served.values():
        parsed = response(answer)
        assert parsed.object == "list"
        assert parsed.id.startswith("classify-")
        assert parsed.usage.total_tokens == parsed.usage.prompt_tokens > 0
        assert [item.index for item in parsed.data] == list(range(len(parsed.data)))
        for item in parsed.data:
            assert item.num_classes == len(item.probs) == len(LABELS)
            assert item.label == LABELS[int(np.argmax(item.probs))]
    assert response(served["text"]).model == "mine"
    assert response(served["lists"]).usage.prompt_tokens == 4


def test_rows_have_the_classes_of_llm_classify(answers: dict[str, dict[str, Any]], llm_results: list[Any]) -> None:
    circle, squares, ids = (result.probs for result in llm_results)
    np.testing.assert_allclose(probs(answers["text"]), [circle], atol=1e-5)
    np.testing.assert_allclose(probs(answers["texts"]), [circle, squares, circle], atol=1e-5)
    np.testing.assert_allclose(probs(answers["ids"]), [ids], atol=1e-5)
    np.testing.assert_allclose(probs(answers["cut"]), [ids], atol=1e-5)
    np.testing.assert_allclose(probs(answers["lists"])[0], ids, atol=1e-5)
    logits = [result.outputs.logits for result in llm_results[:2]]
    np.testing.assert_allclose(probs(answers["logits"]), logits, atol=1e-4)
    assert probs(answers["image"]).sum() == pytest.approx(1, abs=1e-5)


def test_ids_have_the_logits_of_transformers(model: Path, llm_results: list[Any]) -> None:
    np.testing.assert_allclose(llm_results[2].outputs.logits, expected_logits(model, [5, 6, 7]), atol=1e-4)


def test_labels_are_compared_with_what_was_expected(answers: dict[str, dict[str, Any]], folder: Path) -> None:
    """By the job as by its page."""
    found = json.loads((folder / "summary.json").read_text())["this_run"]["expected_answers"]
    assert found == {"rows": 2, "as_expected": 1, "accuracy": 0.5}
    report = (folder / "report.html").read_text()
    assert response(answers["text"]).data[0].label in report
    assert '<dt>as expected</dt><dd class="">1 of 2<' in report


def test_rows_that_are_for_something_else_fail_by_name(answers: dict[str, dict[str, Any]], tmp_path: Path,
                                                       checkpoint: Callable[..., Path]) -> None:
    for name in ("chat", "completion", "vector"):
        assert answers[name]["error"]["code"] == "wrong_endpoint"
        assert "/v1/classify" in answers[name]["error"]["message"]
        assert "the checkpoint that it was made of" in answers[name]["error"]["message"]
    assert answers["too long"]["error"]["param"] == "input[1]"
    assert answers["no activation"]["error"]["param"] == "softmax"
    rows = [classify_row("classes", input="a"), completion_row("text", max_tokens=2)]
    generating = job(tmp_path, checkpoint("qwen3"), rows)
    assert generating["classes"]["error"]["code"] == "missing_required_parameter"
    assert generating["classes"]["error"]["param"] == "labels"
    assert "architectures name a *ForSequenceClassification" in generating["classes"]["error"]["message"]
    assert generating["text"]["error"] is None


def test_a_resumed_job_goes_on_and_another_head_is_another_output(
        model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer that is there is not made again."""
    rows = [classify_row(str(number), input=f"{number} circles") for number in range(3)]
    first = job(tmp_path, model, rows)
    lines = (tmp_path / "answers.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "answers.jsonl").write_bytes(b"".join(lines[:2]))
    again = job(tmp_path, model, rows)
    assert (tmp_path / "answers.jsonl").read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    assert again.keys() == first.keys()
    for name, answer in again.items():
        assert answer["id"] == first[name]["id"]
        np.testing.assert_allclose(probs(answer), probs(first[name]), atol=1e-5)
    capsys.readouterr()
    other = make_other(model, tmp_path / "other")
    (tmp_path / "answers.jsonl").write_bytes(b"".join(lines[:2]))
    files = ["-i", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "answers.jsonl"), "--model", str(other)]
    assert cli.main(["batch", *files, *SMALL]) == 2
    assert "config.json" in capsys.readouterr().err


def make_other(model: Path, target: Path) -> Path:
    """The same weights, whose logits mean something else."""
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return edit_config(target, problem_type="multi_label_classification")


@pytest.mark.parametrize("body", [
    {"input": "a"}, {"input": ["a", "b"]}, {"input": [1, 2]}, {"input": [[1], [2, 3]]},
    {"input": "a", "use_activation": True, "user": "me", "model": "m"},
], ids=str)  # fmt: skip
def test_vllms_bodies_are_taken(body: dict[str, Any]) -> None:
    parsed = parse_row(classify_row("a", **body))
    assert {name: getattr(parsed, name) for name in body} == body


def test_every_field_is_one_of_vectors_or_a_named_extra() -> None:
    of_vectors = set(EmbeddingBody.model_fields) - {"dimensions", "encoding_format"}
    assert set(ClassifyBody.model_fields) == of_vectors | {"use_activation", "labels"}


@pytest.mark.parametrize(("body", "code", "param"), [
    ({}, "missing_required_parameter", "input"),
    ({"input": "a", "messages": MESSAGES}, "invalid_value", "input"),
    ({"input": ["a", 1]}, "invalid_type", "input"),
    ({"input": "a", "add_generation_prompt": True}, "invalid_value", "add_generation_prompt"),
    ({"input": "a", "dimensions": 3}, "unknown_parameter", "dimensions"),
    ({"input": "a", "use_activation": "no"}, "invalid_type", "use_activation"),
    ({"input": "a", "activation": False}, "unsupported_parameter", "activation"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "invalid_pooling_parameter", "truncate_prompt_tokens"),
    ({"input": ["a"] * (LIMITS.max_embedding_inputs + 1)}, "limit_exceeded", "input"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_what_cannot_be_served_is_named(body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_row(classify_row("a", **body)).to_params({}, 0)
    assert (refused.value.code, refused.value.param) == (code, param)
