"""Scores are those of sentence-transformers' CrossEncoder and of transformers' logits, however prompts are shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM, PoolingParams
from npu_runner.errors import ConfigError, ModelError, RequestError
from npu_runner.request.prompt_inputs import PromptInputs
from tests.oracle import reference
from tests.oracle.reranker_checkpoints import (
    FLAT,
    PARTS,
    PilProcessor,
    cross_encoder,
    expected_difference,
    make_reranker,
    published,
    with_score,
)
from tests.oracle.running import SMALL, need_devices

Make = Callable[..., Path]
QUERY = "which of the two shows a circle?"
DOCUMENTS = ["a picture of a red circle", "two squares, one above the other; yes or no", "the colour is blue", "",
             "x" * 90]
INSTRUCTION = "find the shape that is asked for"
RAW = PoolingParams(use_activation=False)
TOLERANCE = 1e-5


def image_of(size: tuple[int, int], seed: int) -> Any:
    return reference.random_image(np.random.default_rng(seed), *size)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A reranker as sentence-transformers saves it, and itself."""
    path = make_reranker(tmp_path_factory.mktemp("reranker"), "qwen3", template=FLAT)
    return path, cross_encoder(path, "text-generation", template_kwargs={"add_generation_prompt": True},
                               instruction=INSTRUCTION)


@pytest.fixture(scope="module")
def llm(text_model: tuple[Path, Any], platform_name: str) -> Iterator[LLM]:
    """Prompts are cut into chunks of 48 tokens."""
    with LLM(text_model[0], platform=platform_name, max_num_batched_tokens=48, **SMALL) as llm:
        yield llm


def test_a_saved_reranker_scores_as_its_cross_encoder(llm: LLM, text_model: tuple[Path, Any]) -> None:
    pairs = [(QUERY, document) for document in DOCUMENTS]
    results = llm.score(QUERY, DOCUMENTS)
    np.testing.assert_allclose([result.score for result in results], text_model[1].predict(pairs), atol=TOLERANCE)
    ids = [list(map(int, text_model[1][0].preprocess([pair], prompt=INSTRUCTION)["input_ids"][0])) for pair in pairs]
    assert [result.prompt_token_ids for result in results] == ids
    assert [result.num_prompt_tokens for result in results] == list(map(len, ids))
    for result, pair in zip(results, pairs, strict=True):
        assert result.prompt is not None
        assert all(text in result.prompt for text in pair)
        assert result.finished
        assert result.metrics is not None
    assert len({result.score for result in results}) == len(DOCUMENTS), "documents differ"


def test_raw_scores_and_instructions(llm: LLM, text_model: tuple[Path, Any]) -> None:
    from torch import nn

    queries = [f"{QUERY} {number}" for number in range(len(DOCUMENTS))]
    results = llm.score(queries, DOCUMENTS, pooling_params=RAW, instruction="find squares")
    expected = text_model[1].predict(list(zip(queries, DOCUMENTS, strict=True)), prompt="find squares",
                                     activation_fn=nn.Identity())
    np.testing.assert_allclose([result.score for result in results], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_too_long_a_document_is_cut_as_sentence_transformers_cuts_it(llm: LLM, text_model: tuple[Path, Any]) -> None:
    (whole,) = llm.score(QUERY, DOCUMENTS[1])
    most = whole.num_prompt_tokens - 6
    (cut,) = llm.score(QUERY, DOCUMENTS[1], pooling_params=PoolingParams(truncate_prompt_tokens=most))
    expected = text_model[1].predict(
        [(QUERY, DOCUMENTS[1])], processing_kwargs={"text": {"truncation": True, "max_length": most}})
    assert cut.num_prompt_tokens == most
    assert cut.score == pytest.approx(float(expected[0]), abs=TOLERANCE)
    assert abs(cut.score - whole.score) > TOLERANCE, "something was cut"
    with pytest.raises(RequestError, match=r"prompt 0: truncate_prompt_tokens: .* 30 are to be kept, but it has \d+"):
        llm.score(QUERY, DOCUMENTS[1], pooling_params=PoolingParams(truncate_prompt_tokens=30))


def test_documents_of_a_query_share_what_stands_before_them(llm: LLM) -> None:
    """In the step that computes them all, and in a later one."""
    query, documents = "what " * 60, [f"document {number}" for number in range(7)]
    before = llm.stats()
    results = llm.score(query, documents)
    after = llm.stats()
    total = sum(result.num_prompt_tokens for result in results)
    computed = after.num_prefill_tokens - before.num_prefill_tokens
    cached = sum(result.num_cached_tokens for result in results)
    assert computed == total - cached
    block = llm.engine.info.block_size
    prefix = len(llm.processor.tokenizer.encode(query, add_special_tokens=False).ids)
    assert prefix > 100
    assert computed <= results[0].num_prompt_tokens + 6 * (total // 7 + 1 - prefix + block)
    (again,) = llm.score(query, ["document 8"])
    assert again.num_cached_tokens >= prefix


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """As Qwen3-VL-Reranker is published: its template for pairs stands beside the one for chats."""
    path = make_reranker(tmp_path_factory.mktemp("vision"), "qwen3_vl", template=PARTS, name="reranker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sentence_transformers.base.modules.transformer.AutoProcessor", PilProcessor)
        kwargs = {"chat_template": "reranker", "add_generation_prompt": True}
        return path, cross_encoder(path, "any-to-any", template_kwargs=kwargs)


def test_images_score_as_their_cross_encoder(vision_model: tuple[Path, Any], platform_name: str) -> None:
    small, wide = image_of((64, 96), 1), image_of((160, 64), 2)
    sides: list[tuple[Any, Any]] = [(QUERY, small), (small, "a red circle"), (wide, small), (QUERY, "text alone"),
                                    ({"image": wide, "text": "which?"}, {"image": small, "text": "this"})]
    expected = [float(vision_model[1].predict([pair])[0]) for pair in sides]
    with LLM(vision_model[0], platform=platform_name, max_num_batched_tokens=64, **SMALL) as llm:
        for _ in ("cold", "warm"):
            results = llm.score([_side(query) for query, _ in sides], [_side(document) for _, document in sides])
            # Sums of a tower in another order, as a GPU has them, were 2e-5 apart.
            most = TOLERANCE if platform_name == "cpu" else 5 * TOLERANCE
            np.testing.assert_allclose([result.score for result in results], expected, atol=most)


def _side(given: Any) -> Any:
    if isinstance(given, str):
        return given
    parts = given if isinstance(given, dict) else {"image": given}
    return {"content": [{"type": kind, kind: value} for kind, value in parts.items()]}


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_vl"])
def test_without_a_template_for_pairs_prompts_are_the_published_text(
        model_type: str, tmp_path: Path, platform_name: str) -> None:
    """By the setting: the checkpoint says nothing of scores."""
    path, is_vision = make_reranker(tmp_path, model_type), model_type == "qwen3_vl"
    with LLM(path, task="score", platform=platform_name, **SMALL) as llm:
        results = llm.score(QUERY, DOCUMENTS, pooling_params=RAW)
        (told,) = llm.score(QUERY, DOCUMENTS[0], instruction="find red", pooling_params=RAW)
        tokenizer = llm.processor.tokenizer
        texts = [published(QUERY, document, is_vision=is_vision) for document in DOCUMENTS]
        texts.append(published(QUERY, DOCUMENTS[0], "find red", is_vision=is_vision))
        for result, text in zip([*results, told], texts, strict=True):
            token_ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert result.score == pytest.approx(expected_difference(path, token_ids), abs=TOLERANCE)
        if is_vision:
            image = image_of((64, 96), 3)
            (seen,) = llm.score(_side(image), "circle", pooling_params=RAW)
            shown = f"<|vision_start|>{'<|image_pad|>' * 6}<|vision_end|>"
            token_ids = tokenizer.encode(published(shown, "circle", is_vision=True), add_special_tokens=False).ids
            assert seen.score == pytest.approx(expected_difference(path, token_ids, [image]), abs=TOLERANCE)


@pytest.mark.full("starts two ranks, each of which has the whole head; states from two stay (test_token_states.py)")
@pytest.mark.ranks
def test_two_ranks_score_as_one(text_model: tuple[Path, Any], platform_name: str) -> None:
    need_devices(platform_name)
    with LLM(text_model[0], platform=platform_name, tensor_parallel_size=2, **SMALL) as llm:
        results = llm.score(QUERY, DOCUMENTS)
    expected = text_model[1].predict([(QUERY, document) for document in DOCUMENTS])
    np.testing.assert_allclose([result.score for result in results], expected, atol=TOLERANCE)


@pytest.mark.parametrize(("tied", "has_no"), [(True, True), (False, True), (False, False)])
def test_the_head_is_a_difference_of_two_logits_or_one(
        checkpoint: Make, tied: bool, has_no: bool, tmp_path: Path, platform_name: str) -> None:
    """Of one request with several prompts, in chunks."""
    import torch

    yes, no = 7, 300
    whole = checkpoint("qwen3", tie_word_embeddings=tied)
    path = with_score(whole, tmp_path, true_token_id=yes, false_token_id=no if has_no else None)
    (path / "chat_template.jinja").write_text(FLAT)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 290, length).tolist() for length in (5, 90, 33)]
    with LLM(path, platform=platform_name, max_num_batched_tokens=48, **SMALL) as llm:
        llm.engine.add_request("many", [PromptInputs(prompt) for prompt in prompts], PoolingParams())
        outputs = []
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
    (output,) = outputs
    for completion, prompt in zip(output.completions, prompts, strict=True):
        with torch.inference_mode():
            logits_V = reference.load_model(whole)(**reference.model_inputs(whole, prompt)).logits[0, -1].double()
        assert completion.pooled is not None
        assert completion.pooled.shape == (1,)
        assert completion.pooled[0] == pytest.approx(float(logits_V[yes] - has_no * logits_V[no]), abs=TOLERANCE)


def test_what_cannot_be_scored_is_named(llm: LLM, checkpoint: Make, tmp_path: Path) -> None:
    whole = checkpoint("qwen3")
    with pytest.raises(ModelError, match=r"has no token 'yes'; a modules\.json with a LogitScore names"):
        LLM(whole, task="score", platform="cpu", **SMALL)
    with pytest.raises(ConfigError, match="task score: runner generate answers with text"):
        LLM(whole, task="score", runner="generate", platform="cpu", **SMALL)
    for config, message in (({"true_token_id": 320}, r"made of the tokens \(320,\), the model has tokens 0 to 319"),
                            ({"true_token_id": True}, "true_token_id True is no token id"),
                            ({"true_token_id": 1, "module_input_name": "x"}, "module_input_name 'x' is not served")):
        path = with_score(whole, tmp_path, **config)
        with pytest.raises(ModelError, match=message):
            LLM(path, platform="cpu", **SMALL)
    with pytest.raises(ModelError, match="its modules are for task score, not embed"):
        LLM(with_score(whole, tmp_path, true_token_id=1), task="embed", platform="cpu", **SMALL)
    with pytest.raises(RequestError, match=r"loaded for scores .* generates no text"):
        llm.generate("a")
    with pytest.raises(RequestError, match="dimensions: they are for vectors"):
        llm.score("a", "b", pooling_params=PoolingParams(dimensions=3))
