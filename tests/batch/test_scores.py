"""Rows of /v1/score and /v1/rerank: vLLM's bodies and answers, through real jobs with the embedded model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM, PoolingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.batch.rows.endpoint import RowBody
from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.batch.rows.openai_response import placed, why_unanswered
from npu_runner.batch.rows.scores import RerankBody, RerankForm, ScoreBody, ScoreForm
from npu_runner.cli import main as cli
from npu_runner.errors import RequestError, ServerError
from npu_runner.request.limits import LIMITS
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from tests.batch.scripted import read_rows, row, write_rows

SMALL = ["--platform", "cpu", "--max-model-len", "256", "--kv-cache-bytes", "64M", "--progress", "off"]
IMAGE = ("data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAFElEQVR4nGO8IyfHgA0wYRUdtBIA4FYBKCgC"
         "g6AAAAAASUVORK5CYII=")
PICTURE = {"content": [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "a red circle"}]}
DOCUMENTS = ["a blue square", "a red circle", PICTURE, "two squares"]
LONG = "red circle " * 60


def pair_row(custom_id: str, url: str = "/v1/score", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def rerank_row(custom_id: str, **body: Any) -> dict[str, Any]:
    return pair_row(custom_id, "/v1/rerank", **body)


def run(folder: Path, rows: list[dict[str, Any]], *options: str, name: str = "answers") -> Path:
    write_rows(folder / "rows.jsonl", rows)
    files = ["-i", str(folder / "rows.jsonl"), "-o", str(folder / f"{name}.jsonl")]
    assert cli.main(["batch", *files, *SMALL, "--task", "score", *options]) in (0, 3)
    return folder / f"{name}.jsonl"


def job(folder: Path, rows: list[dict[str, Any]], *options: str) -> dict[str, dict[str, Any]]:
    """A real job's answers by name."""
    return {item["custom_id"]: item for item in read_rows(run(folder, rows, *options))}


def scores(answer: dict[str, Any]) -> list[float]:
    return [item["score"] for item in answer["response"]["body"]["data"]]


GOOD = [
    pair_row("score", queries="a red circle", documents=DOCUMENTS, model="mine"),
    pair_row("text_1", text_1="a red circle", text_2="a blue square"),
    pair_row("each its own", data_1=["a red circle", "two squares"], data_2=["a blue square", "a red circle"]),
    pair_row("items", queries=PICTURE, items=["a red circle"], metadata={"expected": "a"}),
    pair_row("raw", text_1="a red circle", text_2=["a blue square", "a red circle"], raw=True),
    pair_row("use_activation", text_1="a red circle", text_2="a blue square", use_activation=False),
    pair_row("instruction", text_1="a red circle", text_2="a blue square", instruction="find blue"),
    pair_row("cut", text_1="a red circle", text_2=[LONG, "a blue square"], truncate_prompt_tokens=-1),
    rerank_row("rerank", query="a red circle", documents=DOCUMENTS),
    rerank_row("top", query="a red circle", documents=DOCUMENTS, top_n=2, return_documents=False),
    rerank_row("one", query="a red circle", documents="a blue square", top_n=0),
]
BAD = [
    pair_row("seventh", text_1="a", text_2=["b"] * 6 + [LONG, "c"]),
    rerank_row("no image", query="a", documents=["b", {"content": [{"type": "image_url",
                                                                    "image_url": {"url": "x.png"}}]}]),
    pair_row("three for two", text_1=["a", "b", "c"], text_2=["a", "b"]),
    row("chat", "What is this?"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("scores")
    report = folder / "report.html"
    found = job(folder, GOOD + BAD, "--report", str(report), "--cached-tokens", "--allowed-media-dir", str(folder))
    shown = report.read_text()
    assert "document 1: 0." in shown
    assert "a blue square" in shown
    return found


def test_answers_have_vllms_form(answers: dict[str, dict[str, Any]]) -> None:
    assert {name for name, answer in answers.items() if answer["error"] is None} == {row["custom_id"] for row in GOOD}
    body = answers["score"]["response"]["body"]
    assert list(body) == ["id", "object", "created", "model", "data", "usage"]
    assert (body["object"], body["model"]) == ("list", "mine")
    assert [(item["index"], item["object"]) for item in body["data"]] == [(n, "score") for n in range(4)]
    assert all(0 < score < 1 for score in scores(answers["score"]))
    usage = body["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] > usage["prompt_tokens_details"]["cached_tokens"] > 0
    ranked = answers["rerank"]["response"]["body"]
    assert list(ranked) == ["id", "model", "results", "usage"]
    ranking = [item["relevance_score"] for item in ranked["results"]]
    assert ranking == sorted(ranking, reverse=True)
    assert sorted(item["index"] for item in ranked["results"]) == [0, 1, 2, 3]
    for item in ranked["results"]:  # last digits depend on what else is in a step
        assert item["relevance_score"] == pytest.approx(scores(answers["score"])[item["index"]], abs=1e-5)
        given = DOCUMENTS[item["index"]]
        is_text = isinstance(given, str)
        assert item["document"]["text"] == (given if is_text else None)
        assert (item["document"]["multi_modal"] is None) == is_text
    assert IMAGE not in json.dumps(ranked), "bytes of images are not repeated"
    top = answers["top"]["response"]["body"]["results"]
    assert [item["index"] for item in top] == [item["index"] for item in ranked["results"][:2]]
    assert [item["relevance_score"] for item in top] == pytest.approx(ranking[:2], abs=1e-5)
    assert all(list(item) == ["index", "relevance_score"] for item in top)


def test_rows_have_the_scores_of_llm_score(answers: dict[str, dict[str, Any]]) -> None:
    with LLM(SHAPES_VL, task="score", platform="cpu", max_model_len=256, kv_cache_bytes=1 << 26) as llm:
        expected = [result.score for result in llm.score("a red circle", DOCUMENTS)]
        (own,) = llm.score(PICTURE, "a red circle")
        (told,) = llm.score("a red circle", "a blue square", instruction="find blue")
        most = PoolingParams(truncate_prompt_tokens=-1)
        cut = llm.score("a red circle", [LONG, "a blue square"], pooling_params=most)
        other = llm.score(["a red circle", "two squares"], ["a blue square", "a red circle"])
        with pytest.raises(RequestError) as refused:
            llm.engine.add_request("row", [PromptInputs([5]), PromptInputs([10**6])], PoolingParams())
    assert refused.value.prompt_index == 1, "what the engine refuses has its place, too"
    assert scores(answers["score"]) == pytest.approx(expected, abs=1e-5)
    assert scores(answers["text_1"]) == pytest.approx(expected[:1], abs=1e-5)
    assert scores(answers["each its own"]) == pytest.approx([result.score for result in other], abs=1e-5)
    assert scores(answers["items"]) == pytest.approx([own.score], abs=1e-5)
    assert scores(answers["instruction"]) == pytest.approx([told.score], abs=1e-5)
    assert scores(answers["cut"]) == pytest.approx([result.score for result in cut], abs=1e-5)
    assert cut[0].num_prompt_tokens == 255
    for name in ("raw", "use_activation"):
        sigmoids = [1 / (1 + math.exp(-value)) for value in scores(answers[name])]
        assert sigmoids == pytest.approx(expected[: len(sigmoids)], abs=1e-5)


def test_a_row_fails_whole_and_names_its_document(answers: dict[str, dict[str, Any]]) -> None:
    failures = {name: answers[name]["error"] for name in (row["custom_id"] for row in BAD)}
    assert (failures["seventh"]["code"], failures["seventh"]["param"]) == ("prompt_too_long", "text_2[6]")
    assert "text_2[6]: the prompt has" in failures["seventh"]["message"]
    assert "the model takes 256" in failures["seventh"]["message"]
    assert failures["no image"]["code"] == "media_missing"
    assert failures["no image"]["param"] == "documents[1].content[0].image_url"
    assert failures["three for two"]["message"] == "text_1: 3 for 2 text_2; give one, or one for each"
    assert failures["chat"]["code"] == "wrong_endpoint"
    assert "/v1/rerank" in failures["chat"]["message"]


def test_a_document_that_fails_behind_its_preparation_is_named_too() -> None:
    """By what the engine refuses, or gives up: a length that memory allows, a NaN."""
    form = ScoreForm(places=("documents[0]", "documents[1]"))
    good = CompletionOutput(0, "", [], "stop", pooled=np.zeros(1, dtype=np.float32))
    lost = CompletionOutput(1, "", [], "error", error="not a number")
    error = why_unanswered(RequestOutput("a", [good, lost]), form)
    assert isinstance(error, ServerError)
    assert (error.code, error.message, error.param) == (
        "generation_failed", "documents[1]: not a number", "documents[1]")
    refused = placed(RequestError(code="prompt_too_long", message="too long"), form, 1)
    assert (refused.message, refused.param) == ("documents[1]: too long", "documents[1]")
    assert placed(error, ScoreForm(), 0) == error, "a single document needs no name"


@pytest.mark.full("four starts of the model; a resumed job stays in test_classes.py, and replicas with a script")
def test_replicas_and_a_resumed_job_write_what_one_run_writes(tmp_path: Path) -> None:
    rows = [rerank_row(str(number), query=f"a red circle {number}", documents=DOCUMENTS[:2] + [LONG] * (number == 3))
            for number in range(6)]
    whole = read_rows(run(tmp_path, rows, "--ordered", "--data-parallel-size", "2", name="replicas"))
    assert [item["custom_id"] for item in whole] == [row["custom_id"] for row in rows]
    run(tmp_path, rows[:2], name="resumed")
    resumed = read_rows(run(tmp_path, rows, "--ordered", name="resumed"))
    for one, other in zip(whole, resumed, strict=True):
        assert one["custom_id"] == other["custom_id"]
        assert (one["error"] or {}).get("param") == (other["error"] or {}).get("param")
        assert _results(one) == pytest.approx(_results(other), abs=1e-5)
    assert whole[3]["error"]["param"] == "documents[2]"


def _results(answer: dict[str, Any]) -> dict[int, float]:
    found = answer["response"]["body"].get("results", [])
    return {item["index"]: item["relevance_score"] for item in found}


@pytest.mark.full("another start of the model; another head stays (test_classes.py), and another runner")
def test_another_task_is_another_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run(tmp_path, GOOD[1:2])
    write_rows(tmp_path / "rows.jsonl", GOOD[1:3])
    files = ["-i", str(tmp_path / "rows.jsonl"), "-o", str(output)]
    assert cli.main(["batch", *files, *SMALL, "--task", "embed"]) == 2
    assert 'pooling: was "score: logit of token 396 less token 392, last token", is "last' in capsys.readouterr().err


def test_the_best_are_found_where_sigmoids_are_alike() -> None:
    """Differences of 30 and 40 are both 1.0 as float32."""
    differences = np.array([[30.0], [40.0], [-1.0], [40.0]], dtype=np.float32)
    completions = [CompletionOutput(index, "", [], "stop", pooled=value) for index, value in enumerate(differences)]
    form = RerankForm(top_n=3)
    assert [completion.index for completion in form.in_order(completions)] == [1, 3, 0]


@pytest.mark.parametrize(("body", "code", "param"), [
    ({}, "missing_required_parameter", "queries"),
    ({"text_1": "a"}, "missing_required_parameter", "text_2"),
    ({"text_1": "a", "documents": "b"}, "invalid_value", "text_1"),
    ({"queries": "a", "documents": []}, "invalid_type", "documents"),
    ({"queries": "a", "documents": ["b", 1]}, "invalid_type", "documents[1]"),
    ({"queries": "a", "documents": {"content": []}}, "invalid_value", "documents.content"),
    ({"queries": "a", "documents": {"content": [{"type": "audio"}]}}, "unknown_part", "documents.content[0]"),
    ({"queries": "a", "documents": "b", "temperature": 0}, "unknown_parameter", "temperature"),
    ({"queries": "a", "documents": "b", "max_tokens_per_doc": 5}, "unsupported_parameter", "max_tokens_per_doc"),
    ({"queries": "a", "documents": "b", "raw": True, "use_activation": True}, "invalid_value", "use_activation"),
    ({"queries": "a", "documents": "b", "truncate_prompt_tokens": 0}, "invalid_pooling_parameter",
     "truncate_prompt_tokens"),
    ({"queries": "a", "documents": ["b"] * (LIMITS.max_documents + 1)}, "limit_exceeded", "documents"),
    ({"queries": "a", "documents": {"content": [{"type": "text", "text": "a"}] * (LIMITS.max_parts + 1)}},
     "limit_exceeded", "documents"),
], ids=lambda value: str(value)[:50])  # fmt: skip
def test_what_cannot_be_served_is_named(body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_row(pair_row("a", **body)).to_params({}, 0)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize(("body", "param"), [
    ({"documents": "a"}, "query"), ({"query": ["a"], "documents": "a"}, "query"),
    ({"query": "a", "documents": "a", "top_n": -1}, "top_n"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_a_wrong_rerank_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_row(rerank_row("a", **body))
    assert refused.value.param == param


def test_what_documents_take_once_they_are_prepared_is_bounded(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that several documents show counts once, each token of each."""
    from npu_runner.checkpoint.model_config import ScorePooling
    from npu_runner.prompts.media.media import MediaRules
    from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings

    settings = ProcessorSettings(pooling=ScorePooling(true_token_id=396, false_token_id=392))
    processor = ChatProcessor(str(SHAPES_VL), settings)
    body: RowBody = parse_row(pair_row("a", text_1=PICTURE, text_2=["a", PICTURE, "b", "c"]))
    prompts, _ = body.prepare(processor, MediaRules(), PoolingParams())
    assert isinstance(prompts, tuple)
    pixels = prompts[0].images[0].pixels_HWC.nbytes
    assert prompts[1].images[0] is prompts[1].images[1] is prompts[0].images[0]
    total = pixels + 8 * sum(len(prompt.token_ids) for prompt in prompts)
    for room, fits in ((total, True), (total - 1, False)):
        monkeypatch.setattr("npu_runner.batch.rows.scores.LIMITS", type(LIMITS)(max_pairs_bytes=room))
        if fits:
            body.prepare(processor, MediaRules(), PoolingParams())
            continue
        with pytest.raises(RequestError, match=rf"text_2\[3\]: {total} bytes .* at most {room} are allowed") as refused:
            body.prepare(processor, MediaRules(), PoolingParams())
        assert (refused.value.code, refused.value.param) == ("limit_exceeded", "text_2[3]")


def test_every_field_is_vllms_or_a_named_extra() -> None:
    both = {"model", "user", "metadata", "truncate_prompt_tokens", "instruction", "use_activation",
            "chat_template_kwargs", "mm_processor_kwargs", "raw"}
    sides = {"text_1", "text_2", "queries", "documents", "data_1", "data_2", "items"}
    assert set(ScoreBody.model_fields) == both | sides
    assert set(RerankBody.model_fields) == both | {"query", "documents", "top_n", "return_documents"}
