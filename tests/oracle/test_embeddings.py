"""Vectors are transformers' last hidden state, pooled and normalised, however steps are cut, mixed or shared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM, PoolingParams
from npu_runner.errors import ConfigError, ModelError, RequestError
from npu_runner.request.prompt_inputs import PromptInputs
from tests.full_set import only_full
from tests.oracle import reference
from tests.oracle.embedding_checkpoints import POOLING, assert_same, expected_vector, save_bare, write_modules
from tests.oracle.foreign_checkpoints import make_foreign_checkpoint
from tests.oracle.running import SMALL, need_devices
from tests.videos import moving_frames, video_of

Make = Callable[..., Path]
LENGTHS = (5, 1, 90, 33, 64, 17, 140, 2, 48)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 290, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def embedding_model(checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the whole checkpoint, which transformers is asked about; the same as embedding models are published)."""
    whole = checkpoint("qwen3", tie_word_embeddings=False)
    return whole, write_modules(save_bare(whole, tmp_path_factory.mktemp("embedding")))


@pytest.fixture(scope="module")
def llm(embedding_model: tuple[Path, Path], platform_name: str) -> Iterator[LLM]:
    """Prompts are cut into chunks of 48 tokens."""
    with LLM(embedding_model[1], platform=platform_name, max_num_batched_tokens=48, **SMALL) as llm:
        yield llm


def test_a_published_checkpoint_gives_transformers_vectors(
        llm: LLM, embedding_model: tuple[Path, Path], prompts: list[list[int]]) -> None:
    for result, prompt in zip(llm.embed(prompts), prompts, strict=True):
        assert_same(result.embedding, expected_vector(embedding_model[0], prompt))
        assert result.num_prompt_tokens == len(prompt)
        assert result.outputs is not None
        assert result.outputs.hidden_size == 64


def test_nothing_is_decoded_compiled_or_kept(llm: LLM, prompts: list[list[int]]) -> None:
    llm.embed(prompts)
    stats = llm.stats()
    assert stats.num_decode_steps == 0
    assert stats.kv_blocks_used == 0
    assert llm.engine.info.graphs in ("eager", "none; prefills of 16, 32 tokens")
    assert llm.engine.model_config.pooling is not None


def test_a_warm_prefix_cache_changes_nothing(
        llm: LLM, embedding_model: tuple[Path, Path], prompts: list[list[int]]) -> None:
    longest = max(prompts, key=len)
    again = [longest, [*longest[:100], 3, 4], longest]
    llm.embed([longest])
    for result, prompt in zip(llm.embed(again), again, strict=True):
        assert result.num_cached_tokens > 0
        assert_same(result.embedding, expected_vector(embedding_model[0], prompt))


def test_dimensions_cut_before_they_normalise(
        llm: LLM, embedding_model: tuple[Path, Path], prompts: list[list[int]]) -> None:
    asked = [None, 1, 7, 64, 32, None, 5, 63, 2]
    params = [PoolingParams(dimensions=dimensions) for dimensions in asked]
    for result, prompt, dimensions in zip(llm.embed(prompts, params), prompts, asked, strict=True):
        assert_same(result.embedding, expected_vector(embedding_model[0], prompt, dimensions=dimensions))
    with pytest.raises(RequestError, match="65 is more than the vector has, which is 64"):
        llm.embed(prompts[:1], PoolingParams(dimensions=65))


def test_steps_under_way_change_nothing(
        embedding_model: tuple[Path, Path], prompts: list[list[int]], platform_name: str) -> None:
    settings: dict[str, Any] = {**SMALL, "max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": None}
    with LLM(embedding_model[1], platform=platform_name, async_scheduling=True, **settings) as llm:
        results = dict(llm.embed(iter(prompts * 3), stream_results=True))
    for index, prompt in enumerate(prompts * 3):
        assert_same(results[index].embedding, expected_vector(embedding_model[0], prompt))


@pytest.mark.full("starts two ranks, each of which pools whole states; states from two stay (test_token_states.py)")
@pytest.mark.ranks
def test_two_ranks_pool_as_one(
        embedding_model: tuple[Path, Path], prompts: list[list[int]], platform_name: str) -> None:
    need_devices(platform_name)
    with LLM(embedding_model[1], platform=platform_name, tensor_parallel_size=2, **SMALL) as llm:
        results = llm.embed(prompts, PoolingParams(dimensions=40))
    for result, prompt in zip(results, prompts, strict=True):
        assert_same(result.embedding, expected_vector(embedding_model[0], prompt, dimensions=40))


def test_16_bit_weights_are_pooled_in_float32(
        embedding_model: tuple[Path, Path], prompts: list[list[int]], platform_name: str) -> None:
    with LLM(embedding_model[1], platform=platform_name, **{**SMALL, "dtype": "bfloat16"}) as llm:
        for result, prompt in zip(llm.embed(prompts), prompts, strict=True):
            expected = expected_vector(embedding_model[0], prompt)
            # A length that was computed in bfloat16 would be off by a thousandth.
            assert np.linalg.norm(result.embedding.astype(np.float64)) == pytest.approx(1, abs=1e-6)
            assert result.embedding @ expected > 0.99


def test_vectors_stay_as_long_as_they_are_without_a_normalize_module(
        checkpoint: Make, prompts: list[list[int]], tmp_path: Path, platform_name: str) -> None:
    whole = checkpoint("qwen3", tie_word_embeddings=True)
    path = write_modules(save_bare(whole, tmp_path), is_normalised=False, pooling_mode="lasttoken")
    with LLM(path, platform=platform_name, **SMALL) as llm:
        (result,) = llm.embed(prompts[:1])
        assert_same(result.embedding, expected_vector(whole, prompts[0], is_normalised=False))


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_images_and_states(model_type: str, checkpoint: Make, platform_name: str) -> None:
    """Loaded by the setting: neither checkpoint has a modules.json. Qwen3.5 has states beside its cache."""
    path = checkpoint(model_type)
    rng = np.random.default_rng(1)
    with LLM(path, platform=platform_name, runner="pooling", max_num_batched_tokens=64, **SMALL) as llm:
        prompts, all_images = [], []
        for size in ((64, 96), (160, 64), None):
            images = [] if size is None else [reference.random_image(rng, *size)]
            parts = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": "which?"}]
            prompts.append(llm.engine.processor([{"role": "user", "content": parts}]))
            all_images.append(images)
        for _ in ("cold", "warm"):
            for result, prompt, images in zip(llm.embed(prompts), prompts, all_images, strict=True):
                assert_same(result.embedding, expected_vector(path, prompt.token_ids, images))


def test_an_image_alone_has_a_vector(checkpoint: Make, platform_name: str) -> None:
    path = checkpoint("qwen3_vl")
    image = reference.random_image(np.random.default_rng(2), 64, 64)
    with LLM(path, platform=platform_name, runner="pooling", **SMALL) as llm:
        prompt = llm.engine.processor([{"role": "user", "content": [{"type": "image", "image": image}]}])
        (result,) = llm.embed(prompt)
        assert_same(result.embedding, expected_vector(path, prompt.token_ids, [image]))


def test_videos_of_raw_prompts_and_of_chats_have_vectors(checkpoint: Make, platform_name: str) -> None:
    path, data = checkpoint("qwen3_vl"), video_of(moving_frames(30))
    shape = {"prompt": "<|vision_start|><|video_pad|><|vision_end|>which?", "multi_modal_data": {"video": data}}
    with LLM(path, platform=platform_name, runner="pooling", **SMALL) as llm:
        prompt = llm.processor.from_text(shape["prompt"], videos=[data])
        chat = llm.processor([{"role": "user", "content": [{"type": "video", "video": data}]}])
        for result, expected in zip(llm.embed([shape, chat]), [prompt, chat], strict=True):
            assert_same(result.embedding, expected_vector(path, expected.token_ids, [data]))


def test_several_prompts_of_one_request_are_answered_in_order(
        llm: LLM, embedding_model: tuple[Path, Path], prompts: list[list[int]]) -> None:
    llm.engine.add_request("many", [PromptInputs(prompt) for prompt in prompts], PoolingParams())
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    (output,) = outputs
    assert output.num_prompt_tokens == sum(map(len, prompts))
    for completion, prompt in zip(output.completions, prompts, strict=True):
        assert completion.pooled is not None
        assert_same(completion.pooled, expected_vector(embedding_model[0], prompt))


def test_what_a_model_was_not_loaded_for_is_refused_before_any_work(
        llm: LLM, checkpoint: Make, embedding_model: tuple[Path, Path], platform_name: str) -> None:
    steps = llm.stats().num_prefill_steps
    with pytest.raises(RequestError, match=r"loaded for vectors .* generates no text"):
        llm.generate("hello")
    with pytest.raises(RequestError, match="loaded for vectors"):
        llm.chat([{"role": "user", "content": "hello"}])
    assert llm.stats().num_prefill_steps == steps
    with LLM(checkpoint("qwen3"), platform=platform_name, **SMALL) as generating:
        with pytest.raises(RequestError, match=r"generates text .*--runner pooling") as refused:
            generating.embed("hello")
        assert refused.value.code == "wrong_endpoint"
    if platform_name == "cuda":
        return  # its prefills are recorded
    with pytest.raises(ConfigError, match="no graph has a use"):
        LLM(embedding_model[1], platform=platform_name, graph_mode="reduce-overhead", **SMALL)


def test_a_family_that_only_transformers_knows_gives_no_vectors(tmp_path: Path) -> None:
    path = make_foreign_checkpoint(tmp_path, "gemma")
    with pytest.raises(ConfigError, match="served through transformers, which generates text only; set runner to gen"):
        LLM(path, platform="cpu", runner="pooling", **SMALL)
    write_modules(path)
    with pytest.raises(ConfigError, match=r"runner 'auto': .* generates text only"):
        LLM(path, platform="cpu", **SMALL)


def test_lengths_that_a_checkpoint_names_are_the_only_ones(checkpoint: Make, tmp_path: Path) -> None:
    path = write_modules(save_bare(checkpoint("qwen3"), tmp_path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [16, 32]}))
    with LLM(path, platform="cpu", **SMALL) as llm:
        assert len(llm.embed("a", PoolingParams(dimensions=32))[0].embedding) == 32
        with pytest.raises(RequestError, match="33 is none of those the checkpoint names, 16, 32"):
            llm.embed("a", PoolingParams(dimensions=33))


def test_a_prompt_that_the_checkpoint_would_put_before_every_text_is_named(
    checkpoint: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_modules(save_bare(checkpoint("qwen3"), tmp_path))
    library = {"prompts": {"query": "Query: "}, "default_prompt_name": None}
    for name in (None, "query"):
        (path / "config_sentence_transformers.json").write_text(json.dumps({**library, "default_prompt_name": name}))
        with LLM(path, platform="cpu", **SMALL):
            pass
        assert ("puts its prompt 'query' before every text" in caplog.text) == (name is not None)


def test_modules_that_are_not_served_are_named(checkpoint: Make, tmp_path: Path) -> None:
    path = save_bare(checkpoint("qwen3"), tmp_path)
    write_modules(path, pooling_mode_mean_tokens=True, pooling_mode_lasttoken=False)
    with pytest.raises(ModelError, match=r"pooling by mean_tokens is not served; .* runner generate"):
        LLM(path, platform="cpu", **SMALL)
    write_modules(path)
    modules = (path / "modules.json").read_text()
    (path / "modules.json").write_text(modules.replace(POOLING, "sentence_transformers.models.Dense"))
    with pytest.raises(ModelError, match="its modules are Transformer, Dense, Normalize"):
        LLM(path, platform="cpu", **SMALL)
    (path / "modules.json").write_text("{}")
    with pytest.raises(ModelError, match="is no list of modules"):
        LLM(path, platform="cpu", **SMALL)


@pytest.mark.parametrize("changes", [{}, *only_full(
    "other settings of sentence-transformers; the usual ones stay",
    {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}, {"modality_config": None})], ids=str)
def test_texts_are_what_sentence_transformers_encodes(changes: dict[str, Any], checkpoint: Make, tmp_path: Path
                                                      ) -> None:
    """As saved they go through the chat template; without `message` among the modalities they do not."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    parts = [modules.Transformer(str(checkpoint("qwen3"))), modules.Pooling(64, pooling_mode="lasttoken"),
             modules.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path))
    path = tmp_path / "sentence_bert_config.json"
    settings = json.loads(path.read_text())
    assert "message" in settings["modality_config"]
    if "modality_config" in changes:
        text = {"text": settings["modality_config"]["text"]}
        changes = {"modality_config": text, "module_output_name": settings["module_output_name"]}
    path.write_text(json.dumps({**settings, **changes}))
    texts = ["a circle", "which of them is red?", "two\nlines"]
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(texts)
    with LLM(tmp_path, platform="cpu", **SMALL) as llm:
        for output, right in zip(llm.embed(texts), expected, strict=True):
            assert_same(np.array(output.embedding, dtype=np.float32), right)


@pytest.mark.parametrize("lie", [[], "x", {"message": 1}, {"message": []}], ids=str)
def test_modalities_that_are_none_are_named(lie: Any, checkpoint: Make, tmp_path: Path) -> None:
    path = write_modules(save_bare(checkpoint("qwen3"), tmp_path))
    (path / "sentence_bert_config.json").write_text(json.dumps({"modality_config": lie or [1]}))
    with pytest.raises(ModelError, match=r"modality_config .* is not an object of objects"):
        LLM(path, platform="cpu", **SMALL)
