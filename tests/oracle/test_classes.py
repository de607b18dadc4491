"""Classes are those of transformers' *ForSequenceClassification, however steps are cut, mixed or shared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_runner import LLM, PoolingParams
from npu_runner.errors import ConfigError, ModelError, RequestError, WeightsError
from npu_runner.request.pooling_params import IDENTITY, SIGMOID, SOFTMAX, Classes
from tests.oracle import reference
from tests.oracle.classifiers import LABELS, edit_config, expected_logits, load_classifier, make_classifier
from tests.oracle.embedding_checkpoints import expected_vector
from tests.oracle.foreign_checkpoints import make_foreign_checkpoint
from tests.oracle.running import SMALL, need_devices

Make = Callable[..., Path]
LENGTHS = (5, 1, 90, 33, 64, 17, 140, 48)
PAD = 0
FAST, OTHERS = ("qwen2",), ("llama", "mistral", "olmo2", "qwen3_moe", "qwen3_next", "qwen3_5_text")
"""Families that transformers has the class for, beside qwen3 and qwen3_5, which have tests of their own."""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(PAD + 1, 290, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def path(checkpoint: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(checkpoint("qwen3"), tmp_path_factory.mktemp("classes"), pad_token_id=PAD)


@pytest.fixture(scope="module")
def llm(path: Path, platform_name: str) -> Iterator[LLM]:
    """Prompts are cut into chunks of 48 tokens."""
    with LLM(path, platform=platform_name, max_num_batched_tokens=48, **SMALL) as llm:
        yield llm


def assert_classes(llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    for result, prompt in zip(llm.classify(prompts), prompts, strict=True):
        assert_logits(result.outputs and result.outputs.logits, expected_logits(path, prompt))


def assert_logits(ours: np.ndarray | None, expected: np.ndarray) -> None:
    assert ours is not None
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4 * max(1.0, np.abs(expected).max()))


def test_logits_probabilities_and_labels_are_transformers(llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    for result, prompt in zip(llm.classify(prompts), prompts, strict=True):
        logits = expected_logits(path, prompt)
        outputs = result.outputs
        assert outputs is not None
        assert_logits(outputs.logits, logits)
        np.testing.assert_allclose(outputs.probs, torch.tensor(logits).softmax(-1), atol=1e-4)
        assert outputs.num_classes == len(outputs.probs) == len(LABELS)
        assert result.label == outputs.label == load_classifier(path).config.id2label[int(logits.argmax())]
        assert result.num_prompt_tokens == len(prompt)
    assert {result.label for result in llm.classify(prompts)} == set(LABELS), "the prompts are of all classes"


def test_nothing_is_decoded_compiled_or_kept(llm: LLM, prompts: list[list[int]]) -> None:
    llm.classify(prompts)
    stats = llm.stats()
    assert stats.num_decode_steps == 0
    assert stats.kv_blocks_used == 0
    assert llm.engine.info.graphs == "eager"


def test_a_warm_prefix_cache_changes_nothing(llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    longest = max(prompts, key=len)
    again = [longest, [*longest[:100], 3, 4], longest]
    llm.classify([longest])
    for result, prompt in zip(llm.classify(again), again, strict=True):
        assert result.num_cached_tokens > 0
        assert_logits(result.outputs and result.outputs.logits, expected_logits(path, prompt))


def test_the_last_token_that_is_no_padding_is_read(llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    """As transformers finds it; and nothing but padding is read at its first token."""
    padded = [[*prompts[0], PAD, PAD], [PAD, *prompts[1]], [*prompts[2][:30], PAD, 5, *[PAD] * 60], [5, PAD, PAD],
              [PAD] * 4, [PAD]]
    for result, prompt in zip(llm.classify(padded), padded, strict=True):
        assert_logits(result.outputs and result.outputs.logits, expected_logits(path, prompt))
        assert result.num_prompt_tokens == len(prompt)


def test_encode_gives_probabilities_and_states(llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    classes, tokens = (llm.encode(prompts, pooling_task=task) for task in ("classify", "token_embed"))
    for result, expected, states, prompt in zip(classes, llm.classify(prompts), tokens, prompts, strict=True):
        np.testing.assert_allclose(result.data, expected.probs, atol=1e-5)
        with torch.inference_mode():
            last_hidden = load_classifier(path).model(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(states.data, last_hidden, atol=1e-4)


def test_without_activation_the_logits_are_given(llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    raw, plain = PoolingParams(use_activation=False), PoolingParams(use_activation=True)
    logits = [expected_logits(path, prompt) for prompt in prompts]
    for result, expected, prompt in zip(llm.classify(prompts, raw), logits, prompts, strict=True):
        assert_logits(np.float32(result.probs), expected)
        assert result.label == load_classifier(path).config.id2label[int(expected.argmax())]
        assert (result.prompt, result.prompt_token_ids, result.finished) == (None, prompt, True)
    for result, expected in zip(llm.encode(prompts, raw, pooling_task="classify"), logits, strict=True):
        assert_logits(result.data, expected)
    mixed = [raw if index % 2 else plain for index in range(len(prompts))]
    streamed = dict(llm.classify(iter(prompts), iter(mixed), stream_results=True))
    for index, result in enumerate(llm.classify(prompts, mixed)):
        expected = logits[index] if index % 2 else torch.tensor(logits[index]).softmax(-1).numpy()
        assert_logits(np.float32(result.probs), expected)
        assert_logits(np.float32(streamed[index].probs), expected)


@pytest.mark.full("starts two ranks, each of which has the whole head; states of tokens from two are in the fast set")
@pytest.mark.ranks
def test_two_ranks_classify_as_one(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    need_devices(platform_name)
    with LLM(path, platform=platform_name, tensor_parallel_size=2, **SMALL) as llm:
        assert_classes(llm, path, prompts)


@pytest.mark.parametrize("family", FAST)
def test_a_family_classifies_as_transformers(
        family: str, checkpoint: Make, prompts: list[list[int]], tmp_path: Path, platform_name: str) -> None:
    assert_family(family, checkpoint, prompts, tmp_path, platform_name)


@pytest.mark.full("a head on families whose bodies are compared elsewhere")
@pytest.mark.parametrize("family", OTHERS)
def test_every_other_family_classifies_as_transformers(
        family: str, checkpoint: Make, prompts: list[list[int]], tmp_path: Path, platform_name: str) -> None:
    assert_family(family, checkpoint, prompts, tmp_path, platform_name)


def assert_family(family: str, checkpoint: Make, prompts: list[list[int]], tmp_path: Path, platform_name: str) -> None:
    path = make_classifier(checkpoint(family), tmp_path, labels=["no", "yes"])
    with LLM(path, platform=platform_name, max_num_batched_tokens=128, **SMALL) as llm:
        assert_classes(llm, path, prompts[:5])


def test_images_are_classified(checkpoint: Make, tmp_path: Path, platform_name: str) -> None:
    """A chunk ends within an image; layers have states beside the cache."""
    path = make_classifier(checkpoint("qwen3_5"), tmp_path)
    rng = np.random.default_rng(1)
    with LLM(path, platform=platform_name, max_num_batched_tokens=64, **SMALL) as llm:
        images = [reference.random_image(rng, *size) for size in ((200, 160), (160, 64))]
        prompts = [llm.processor([{"role": "user", "content": [{"type": "image", "image": image},
                                                               {"type": "text", "text": "which?"}]}])
                   for image in images]
        for _ in ("cold", "warm"):
            for result, prompt, image in zip(llm.classify(prompts), prompts, images, strict=True):
                expected = expected_logits(path, prompt.token_ids, [image])
                assert_logits(result.outputs and result.outputs.logits, expected)


def test_a_family_without_a_class_in_transformers_is_named_and_classified_alike(
        checkpoint: Make, tmp_path: Path, platform_name: str) -> None:
    """Its body's state of the last token, times score.weight."""
    base = checkpoint("qwen3_vl")
    tensors = {name: value for name, value in load_file(base / "model.safetensors").items() if "lm_head" not in name}
    score = tensors["score.weight"] = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    for file in base.iterdir():
        shutil.copy(file, tmp_path / file.name)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, architectures=["Qwen3VLForSequenceClassification"], num_labels=3)
    image = reference.random_image(np.random.default_rng(1), 64, 96)
    with LLM(tmp_path, platform=platform_name, **SMALL) as llm:
        prompt = llm.processor([{"role": "user", "content": [{"type": "image", "image": image}]}])
        (result,) = llm.classify(prompt)
    state = expected_vector(base, prompt.token_ids, [image], is_normalised=False)
    assert_logits(result.outputs and result.outputs.logits, score.double().numpy() @ state)


def test_16_bit_weights_are_classified_in_float32(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    with LLM(path, platform=platform_name, **{**SMALL, "dtype": "bfloat16"}) as llm:
        for result, prompt in zip(llm.classify(prompts), prompts, strict=True):
            assert sum(result.probs) == pytest.approx(1, abs=1e-6)
            np.testing.assert_allclose(result.probs, torch.tensor(expected_logits(path, prompt)).softmax(-1), atol=0.1)


@pytest.mark.parametrize(("config", "labels", "activation"), [
    ({"problem_type": "multi_label_classification"}, LABELS, SIGMOID),
    ({"problem_type": "single_label_classification"}, LABELS, SOFTMAX),
    ({"problem_type": "regression"}, ["stars"], IDENTITY),
    ({"problem_type": "regression"}, LABELS, IDENTITY),
    ({}, ["yes"], SIGMOID),
    ({}, LABELS, SOFTMAX),
], ids=str)  # fmt: skip
def test_what_is_made_of_logits_is_what_transformers_pipeline_makes(
        config: dict[str, str], labels: list[str], activation: str, checkpoint: Make, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, pipeline

    path = make_classifier(checkpoint("qwen3"), tmp_path, labels=labels, **config)
    texts = ["which of the two shows a circle?", "a picture"]
    pipe = pipeline("text-classification", load_classifier(path), tokenizer=AutoTokenizer.from_pretrained(path),
                    device="cpu")
    with LLM(path, platform="cpu", **SMALL) as llm:
        assert llm.processor.classes == Classes(labels=tuple(labels), activation=activation)
        for result, expected in zip(llm.classify(texts), pipe(texts, top_k=None), strict=True):
            found = {item["label"]: item["score"] for item in expected}
            np.testing.assert_allclose(result.probs, [found[label] for label in labels], rtol=1e-4, atol=1e-5)
            assert result.label == max(found, key=found.__getitem__)


def test_probabilities_of_large_logits_are_numbers() -> None:
    logits = np.array([-1e4, 0, 1e4], dtype=np.float32)
    for activation, function in ((SOFTMAX, lambda x: x.softmax(-1)), (SIGMOID, torch.sigmoid), (IDENTITY, lambda x: x)):
        found = Classes(labels=LABELS, activation=activation).probabilities(logits)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, function(torch.tensor(logits)), atol=1e-7)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_classifier_does_nothing_else_and_nothing_else_classifies(
        llm: LLM, path: Path, checkpoint: Make, platform_name: str) -> None:
    steps = llm.stats().num_prefill_steps
    for ask in (lambda: llm.generate("hello"), lambda: llm.embed("hello"),
                lambda: llm.encode("hello", pooling_task="embed")):
        with pytest.raises(RequestError, match=r"loaded for classes .* take the checkpoint that it was made of") as no:
            ask()
        assert no.value.code == "wrong_endpoint"
    with pytest.raises(RequestError, match="dimensions: they are for vectors"):
        llm.classify("hello", PoolingParams(dimensions=2))
    with pytest.raises(RequestError, match=r"a score needs a classifier of one label, and this one has 3"):
        llm.score("a", "b")
    assert llm.stats().num_prefill_steps == steps
    for settings in ({"runner": "generate"}, {"task": "embed"}, {"task": "score"}):
        with pytest.raises(ModelError, match=r"Qwen3ForSequenceClassification, a classifier, .* leave runner and task"):
            LLM(path, platform=platform_name, **settings, **SMALL)
    with pytest.raises(ModelError, match="architectures names no"):
        LLM(checkpoint("qwen3"), platform=platform_name, task="classify", **SMALL)
    with LLM(checkpoint("qwen3"), platform=platform_name, runner="pooling", **SMALL) as vectors:
        with pytest.raises(RequestError, match=r"loaded for vectors .* architectures name a"):
            vectors.classify("hello")
        with pytest.raises(RequestError, match="loaded for vectors"):
            vectors.encode("hello", pooling_task="classify")


def test_the_settings_that_say_the_same_are_taken(path: Path, platform_name: str) -> None:
    for settings in ({"runner": "pooling"}, {"task": "classify"}, {"runner": "pooling", "task": "classify"}):
        with LLM(path, platform=platform_name, **settings, **SMALL) as llm:
            assert llm.processor.task == "classify"


@pytest.mark.parametrize(("config", "message"), [
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification, which is not model_type"),
    ({"id2label": {"0": "a", "2": "b"}}, "id2label .* has no label for each class"),
    ({"id2label": {}}, "id2label .* has no label for each class"),
    ({"id2label": None, "num_labels": 0}, "num_labels 0 is no number of classes"),
    ({"problem_type": "ranking"}, "problem_type 'ranking' is not one of regression, single_label"),
    ({"id2label": {"0": "a"}, "problem_type": "single_label_classification"}, "with one label, whose probability"),
    ({"pad_token_id": "x"}, "pad_token_id 'x' is no token id"),
], ids=str)  # fmt: skip
def test_a_config_that_cannot_be_served_is_named(
        config: dict[str, object], message: str, checkpoint: Make, tmp_path: Path) -> None:
    path = edit_config(make_classifier(checkpoint("qwen3"), tmp_path), **config)
    with pytest.raises(ModelError, match=message):
        LLM(path, platform="cpu", **SMALL)


def test_a_head_that_is_missing_or_of_another_size_is_named(checkpoint: Make, tmp_path: Path) -> None:
    path = make_classifier(checkpoint("qwen3"), tmp_path / "classes")
    edit_config(path, id2label={"0": "a", "1": "b"})
    with pytest.raises(WeightsError, match=r"misshapen: score.weight is \[3, 64\], config.json makes it \[2, 64\]"):
        LLM(path, platform="cpu", **SMALL)
    edit_config(path, id2label=None, num_labels=3)
    with LLM(path, platform="cpu", **SMALL) as llm:
        assert llm.classify("a")[0].label.startswith("LABEL_")
    generating = tmp_path / "generating"
    generating.mkdir()
    for file in checkpoint("qwen3").iterdir():
        (generating / file.name).write_bytes(file.read_bytes())
    edit_config(generating, architectures=["Qwen3ForSequenceClassification"])
    with pytest.raises(WeightsError, match=r"missing: score.weight \[2, 64\]"):
        LLM(generating, platform="cpu", **SMALL)
    edit_config(path, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(WeightsError, match=r"left over: score.weight \[3, 64\]"):
        LLM(path, platform="cpu", **SMALL)


def test_a_family_that_only_transformers_knows_does_not_classify(tmp_path: Path) -> None:
    path = edit_config(make_foreign_checkpoint(tmp_path, "gemma"), architectures=["GemmaForSequenceClassification"])
    with pytest.raises(ConfigError, match=r"through transformers, .* and the checkpoint is a classifier"):
        LLM(path, platform="cpu", **SMALL)
