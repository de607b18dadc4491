"""A classifier of one label scores pairs of texts as sentence-transformers' CrossEncoder, or says why it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, processors

from npu_runner import LLM, PoolingParams
from npu_runner.checkpoint.pooling_files import read_classes
from npu_runner.cli.models import as_line, explain
from npu_runner.errors import RequestError
from npu_runner.prompts.processor import ChatProcessor, ProcessorSettings
from tests.batch.pooled_jobs import classify_row, job
from tests.oracle.classifiers import edit_config, make_classifier
from tests.oracle.running import SMALL

QUERY = "which of the two shows a circle?"
DOCUMENTS = ["a picture of a red circle", "two squares, one above the other", "the colour is blue", "", "x" * 90]
PAIRS = [(QUERY, document) for document in DOCUMENTS]
RAW = PoolingParams(use_activation=False)


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer puts tokens around the texts, and it has no chat template."""
    path = make_classifier(checkpoint("qwen3"), tmp_path_factory.mktemp("cross"), labels=["fits"])
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>")}
    start, end = ids
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {end} $B:1", special_tokens=list(ids.items()))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return edit_config(path, pad_token_id=tokenizer.token_to_id("<|endoftext|>"))


@pytest.fixture(scope="module")
def encoder(path: Path) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(path), device="cpu")


@pytest.fixture(scope="module")
def llm(path: Path, platform_name: str) -> Iterator[LLM]:
    """Prompts are cut into chunks of 16 tokens."""
    with LLM(path, platform=platform_name, max_num_batched_tokens=16, **SMALL) as llm:
        yield llm


def test_scores_and_prompts_are_those_of_the_cross_encoder(llm: LLM, encoder: Any) -> None:
    from torch import nn

    results = llm.score(QUERY, DOCUMENTS)
    np.testing.assert_allclose([one.score for one in results], encoder.predict(PAIRS), atol=1e-5)
    assert len({one.score for one in results}) == len(DOCUMENTS), "documents differ"
    ids = encoder.tokenizer([QUERY] * len(DOCUMENTS), DOCUMENTS)["input_ids"]
    assert [one.prompt_token_ids for one in results] == ids
    raw = [one.score for one in llm.score(QUERY, DOCUMENTS, pooling_params=RAW)]
    np.testing.assert_allclose(raw, encoder.predict(PAIRS, activation_fn=nn.Identity()), atol=1e-4)
    np.testing.assert_allclose(raw, [one.probs[0] for one in llm.classify(ids, RAW)], atol=1e-4)


def test_the_end_of_a_longer_document_is_left_out(llm: LLM, encoder: Any) -> None:
    ids = encoder.tokenizer(*PAIRS[0])["input_ids"]
    (cut,) = llm.score(*PAIRS[0], pooling_params=PoolingParams(truncate_prompt_tokens=len(ids) - 3))
    expected = encoder.tokenizer(*PAIRS[0], truncation="only_second", max_length=len(ids) - 3)["input_ids"]
    assert cut.prompt_token_ids == expected
    with pytest.raises(RequestError, match="tokens without its document"):
        llm.score(*PAIRS[0], pooling_params=PoolingParams(truncate_prompt_tokens=4))


def test_rows_are_scored_and_ranked(llm: LLM, path: Path, tmp_path: Path) -> None:
    expected = [one.score for one in llm.score(QUERY, DOCUMENTS)]
    rows: list[dict[str, Any]] = [
        {"custom_id": "score", "method": "POST", "url": "/v1/score",
         "body": {"text_1": QUERY, "text_2": DOCUMENTS}},
        {"custom_id": "rank", "method": "POST", "url": "/v1/rerank",
         "body": {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}},
        {"custom_id": "told", "method": "POST", "url": "/v1/score",
         "body": {"text_1": QUERY, "text_2": "a", "instruction": "find"}},
        classify_row("class", input="a red circle"),
    ]
    answers = job(tmp_path, path, rows)
    scores = [item["score"] for item in answers["score"]["response"]["body"]["data"]]
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    ranked = [item["index"] for item in answers["rank"]["response"]["body"]["results"]]
    assert ranked == np.argsort(expected)[::-1][:2].tolist()
    assert answers["class"]["response"]["body"]["data"][0]["num_classes"] == 1
    assert answers["told"]["error"]["param"] == "instruction"


@pytest.mark.parametrize(("config", "why"), [
    ({"problem_type": "regression"}, "problem_type is regression"),
    ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "asks for the activation"),
    ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "asks for the activation"),
    ({"id2label": {"0": "no", "1": "yes"}}, "this one has 2"),
    (None, "it has a chat template"),
])  # fmt: skip
def test_why_a_classifier_gives_no_scores(config: Any, why: str, path: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    if config is None:
        (copy / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    else:
        edit_config(copy, **config)
    processor = ChatProcessor(str(copy), ProcessorSettings(pooling=read_classes(copy)))
    with pytest.raises(RequestError, match=why) as caught:
        processor.check_task("score")
    assert caught.value.code == "wrong_endpoint"
    processor.check_task("classify")


def test_it_may_be_asked_for_by_task(path: Path, tmp_path: Path, platform_name: str) -> None:
    sigmoid = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    copy = edit_config(Path(shutil.copytree(path, tmp_path / "copy")), sentence_transformers=sigmoid)
    with LLM(copy, platform=platform_name, task="score", **SMALL) as llm:
        assert 0 < llm.score("a", "b")[0].score < 1


def test_the_command_says_that_it_scores(path: Path, tmp_path: Path) -> None:
    line = as_line(explain({"model": str(path)}))
    assert line.endswith("text in, classes (/v1/classify) and scores (/v1/score, /v1/rerank) out")
    copy = edit_config(Path(shutil.copytree(path, tmp_path / "copy")), problem_type="regression")
    assert as_line(explain({"model": str(copy)})).endswith("text in, classes (/v1/classify) out")


@pytest.mark.parametrize(("pair", "options", "code"), [
    (("", " "), {}, "empty_prompt"), (("a", "b"), {"instruction": "x"}, "unsupported_parameter"),
    (("a", "b"), {"mm_processor_kwargs": {"fps": 1}}, "unsupported_parameter"),
    (("a", {"content": [{"type": "image", "image": Image.new("RGB", (9, 9))}]}), {}, "model_has_no_vision"),
])  # fmt: skip
def test_what_such_a_prompt_cannot_have_is_named(pair: Any, options: Any, code: str, llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.score(*pair, **options)
    assert caught.value.code == code
