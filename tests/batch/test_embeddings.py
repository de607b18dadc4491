"""Rows of /v1/embeddings: OpenAI's bodies and answers, vLLM's messages, through real jobs with the embedded model."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.embedding_create_params import EmbeddingCreateParams

from npu_runner import LLM
from npu_runner.assets import SHAPES_VL
from npu_runner.batch.rows.openai_format import parse_row
from npu_runner.batch.rows.pooled import EmbeddingBody
from npu_runner.cli import main as cli
from npu_runner.errors import RequestError
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.facts import AttentionFacts
from npu_runner.platforms.graphs import Recorder
from npu_runner.request.limits import LIMITS
from tests.batch.pooled_jobs import MESSAGES, SMALL, embedding_row
from tests.batch.scripted import completion_row, read_rows, row, write_rows
from tests.oracle.running import UncompiledGraphs
from tests.oracle.tiled_attention import TiledAttention

EXTRAS = {"messages", "metadata", "truncate_prompt_tokens", "add_generation_prompt", "continue_final_message",
          "chat_template_kwargs", "mm_processor_kwargs"}  # fmt: skip


def job(folder: Path, rows: list[dict[str, Any]], *options: str) -> dict[str, dict[str, Any]]:
    """A real job's answers by name."""
    write_rows(folder / "rows.jsonl", rows)
    files = ["-i", str(folder / "rows.jsonl"), "-o", str(folder / "answers.jsonl")]
    assert cli.main(["batch", *files, *SMALL, *options]) in (0, 3)
    return {item["custom_id"]: item for item in read_rows(folder / "answers.jsonl")}


def vectors(answer: dict[str, Any]) -> np.ndarray:
    return np.array([item["embedding"] for item in answer["response"]["body"]["data"]], dtype=np.float32)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("embeddings")
    rows = [
        embedding_row("text", input="a red circle", model="mine"),
        embedding_row("ids", input=[5, 6, 7]),
        embedding_row("texts", input=["a red circle", "two squares", "a red circle"]),
        embedding_row("lists", input=[[5, 6, 7], [8]]),
        embedding_row("base64", input=["a red circle", "two squares"], encoding_format="base64"),
        embedding_row("short", input="a red circle", dimensions=16),
        embedding_row("cut", input=[1, 2, 3, 5, 6, 7], truncate_prompt_tokens=3),
        embedding_row("image", messages=MESSAGES, add_generation_prompt=True, metadata={"expected": "a"}),
        embedding_row("too long", input=["fine", "x" * 4000]),
        embedding_row("too many dimensions", input="a", dimensions=100_000),
        row("chat", "What is this?"),
        completion_row("completion"),
    ]  # fmt: skip
    report = str(folder / "report.html")
    found = job(folder, rows, "--runner", "pooling", "--report", report, "--cached-tokens")
    assert "16 numbers: " in Path(report).read_text()
    return found


def test_every_answer_is_one_of_openais(answers: dict[str, dict[str, Any]]) -> None:
    served = {name: answer for name, answer in answers.items() if answer["error"] is None}
    assert set(served) == {"text", "ids", "texts", "lists", "base64", "short", "cut", "image"}
    for name, answer in served.items():
        body = answer["response"]["body"]
        if name != "base64":  # OpenAI's type is what its client has made of it
            parsed = CreateEmbeddingResponse.model_validate_json(json.dumps(body), strict=True)
            assert parsed.model_extra == {}
        assert [item["index"] for item in body["data"]] == list(range(len(body["data"])))
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"]
        assert "completion_tokens" not in body["usage"], "nothing was completed"
    assert served["text"]["response"]["body"]["model"] == "mine"
    assert served["lists"]["response"]["body"]["usage"]["prompt_tokens"] == 4


def test_rows_have_the_vectors_of_llm_embed(answers: dict[str, dict[str, Any]]) -> None:
    with LLM(SHAPES_VL, runner="pooling", platform="cpu", max_model_len=512, kv_cache_bytes=1 << 26) as llm:
        circle, squares, ids = (result.embedding for result in llm.embed(["a red circle", "two squares", [5, 6, 7]]))
    np.testing.assert_allclose(vectors(answers["text"]), [circle], atol=1e-5)
    np.testing.assert_allclose(vectors(answers["texts"]), [circle, squares, circle], atol=1e-5)
    np.testing.assert_allclose(vectors(answers["ids"]), [ids], atol=1e-5)
    np.testing.assert_allclose(vectors(answers["cut"]), [ids], atol=1e-5)
    np.testing.assert_allclose(vectors(answers["lists"])[0], ids, atol=1e-5)
    short = circle[:16] / np.linalg.norm(circle[:16])
    np.testing.assert_allclose(vectors(answers["short"]), [short], atol=1e-5)
    assert vectors(answers["image"]).shape == (1, len(circle))


def test_base64_holds_the_same_numbers(answers: dict[str, dict[str, Any]]) -> None:
    items = answers["base64"]["response"]["body"]["data"]
    found = [np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4") for item in items]
    np.testing.assert_allclose(found, vectors(answers["texts"])[:2], atol=1e-5)


def test_rows_that_are_for_something_else_fail_by_name(answers: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    for name in ("chat", "completion"):
        assert answers[name]["error"]["code"] == "wrong_endpoint"
        assert "/v1/embeddings" in answers[name]["error"]["message"]
    assert answers["too long"]["error"]["param"] == "input[1]"
    assert answers["too many dimensions"]["error"]["param"] == "dimensions"
    generating = job(tmp_path, [embedding_row("vector", input="a"), row("chat", "What is this?", max_tokens=2)])
    assert generating["vector"]["error"]["code"] == "wrong_endpoint"
    assert "--runner pooling" in generating["vector"]["error"]["message"]
    assert generating["chat"]["error"] is None


def test_another_runner_is_another_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, [completion_row("a", max_tokens=2)])
    write_rows(tmp_path / "rows.jsonl", [completion_row("a", max_tokens=2), embedding_row("b", input="b")])
    files = ["-i", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "answers.jsonl")]
    assert cli.main(["batch", *files, *SMALL, "--runner", "pooling"]) == 2
    assert 'pooling: was "(not there)", is "last token, normalised"' in capsys.readouterr().err


@pytest.mark.parametrize("body", [
    {"input": "a"}, {"input": ["a", "b"]}, {"input": [1, 2]}, {"input": [[1], [2, 3]], "dimensions": 3},
    {"input": "a", "encoding_format": "base64", "user": "me", "model": "m"},
], ids=str)  # fmt: skip
def test_openais_bodies_are_taken(body: dict[str, Any]) -> None:
    parsed = parse_row(embedding_row("a", **body))
    assert {name: getattr(parsed, name) for name in body} == body


def test_every_field_is_openais_or_a_named_extra() -> None:
    assert set(EmbeddingBody.model_fields) == set(EmbeddingCreateParams.__annotations__) | EXTRAS


@pytest.mark.parametrize(("body", "code", "param"), [
    ({}, "missing_required_parameter", "input"),
    ({"input": "a", "messages": MESSAGES}, "invalid_value", "input"),
    ({"input": []}, "invalid_type", "input"),
    ({"input": ["a", 1]}, "invalid_type", "input"),
    ({"input": "a", "add_generation_prompt": True}, "invalid_value", "add_generation_prompt"),
    ({"input": "a", "dimensions": 0}, "invalid_pooling_parameter", "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
    ({"input": "a", "temperature": 0}, "unknown_parameter", "temperature"),
    ({"input": "a", "normalize": False}, "unsupported_parameter", "normalize"),
    ({"input": ["a"] * (LIMITS.max_embedding_inputs + 1)}, "limit_exceeded", "input"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_what_cannot_be_served_is_named(body: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_row(embedding_row("a", **body)).to_params({}, 0)
    assert (refused.value.code, refused.value.param) == (code, param)


class Repeating(UncompiledGraphs):
    """Runs what a graph would replay."""

    def __init__(self) -> None:
        self.num_replays = 0

    def recorder(self) -> Recorder:
        return lambda run: lambda: self._replay(run)

    def _replay(self, run: Callable[[], None]) -> None:
        self.num_replays += 1
        run()


def test_an_output_begun_eagerly_goes_on_with_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is made again, and the others are those of eager prefills."""
    rows, compiler = [embedding_row(str(number), input=f"{number} circles") for number in range(4)], Repeating()
    first = job(tmp_path, rows, "--runner", "pooling", "--enforce-eager")
    lines = (tmp_path / "answers.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "answers.jsonl").write_bytes(b"".join(lines[:2]))
    monkeypatch.setattr(CpuPlatform, "attention_backends", {"torch": AttentionFacts(records_prefills=True)})
    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: compiler)
    monkeypatch.setattr("npu_runner.platforms.cpu.attention.CpuAttention", TiledAttention)
    graphs = "--graph-mode", "reduce-overhead", "--graph-prefill-sizes", "64"
    again = job(tmp_path, rows, "--runner", "pooling", *graphs)
    assert compiler.num_replays > 1
    assert (tmp_path / "answers.jsonl").read_bytes().splitlines(keepends=True)[:2] == lines[:2]
    assert again.keys() == first.keys()
    for name, answer in again.items():
        np.testing.assert_allclose(vectors(answer), vectors(first[name]), atol=1e-5)
