"""Image families without code here, through the generic strategy: tokens and logits are transformers' own.

The oracle is the same checkpoint in transformers, with its own processor, attention and masks. One family stands for
each mechanism; every type is in test_every_transformers_family.py.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM, strategies
from npu_runner.engine import bounds
from npu_runner.errors import ModelError, RequestError
from npu_runner.models import transformers_check
from npu_runner.models.transformers_images import TowerOfTransformers
from npu_runner.ray_data import ERROR_COLUMN, LLMPredictor
from npu_runner.strategies import pick_strategy, transformers_model
from tests.full_set import only_full
from tests.oracle.foreign_image_prompts import (
    Part,
    ask,
    assert_all_rows_equal,
    assert_equals_transformers,
    messages_of,
)
from tests.oracle.image_checkpoints import ImageCheckpoint, make_image_checkpoint, picture
from tests.oracle.running import greedy, need_devices, runner_of

CONFIG_MAPPING: Any = pytest.importorskip("transformers").CONFIG_MAPPING

SMALL: dict[str, Any] = {"max_num_seqs": 8, "dtype": "float32"}
ODD = [picture(230, 140, 1), picture(150, 420, 2), picture(61, 97, 3)]
TWO: list[Part] = ["which of ", ODD[0], " and ", ODD[1], " is it?"]
FAMILIES = [
    "llava",  # one run of placeholders, one tensor
    *only_full("families of other forms of results; one with several runs stays in the tests of chunks",
               "llava_onevision",  # tiles of any resolution, newlines of the tower's own
               "internvl",  # tiles
               "idefics3"),  # several runs, with tokens for rows and columns between
]


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ImageCheckpoint]:
    made: dict[str, ImageCheckpoint] = {}

    def make(model_type: str) -> ImageCheckpoint:
        if model_type not in made:
            made[model_type] = make_image_checkpoint(tmp_path_factory.mktemp(model_type), model_type)
        return made[model_type]

    return make


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tokens_and_logits_of_all_rows_equal_transformers(model_type: str, foreign: Any) -> None:
    checkpoint: ImageCheckpoint = foreign(model_type)
    assert isinstance(pick_strategy(checkpoint.path), transformers_model.TransformersStrategy)
    with LLM(checkpoint.path, platform="cpu", **SMALL) as llm:
        two = ask(checkpoint, llm, TWO)
        assert_all_rows_equal(checkpoint.path, llm, two)
        asked = [ask(checkpoint, llm, parts) for parts in (
            ["which", ODD[2]], ["no picture at all"], [ODD[1], "it is"], ["the same ", ODD[0], ODD[0], " twice"])]
        assert_equals_transformers(checkpoint.path, llm, [*asked, two])


@pytest.mark.parametrize("model_type", ["llava", *only_full("several runs, and positions of three axes", "idefics3",
                                                           "glm4v_moe")])
def test_two_ranks_equal_transformers(model_type: str, foreign: Any, platform_name: str) -> None:
    need_devices(platform_name)
    checkpoint: ImageCheckpoint = foreign(model_type)
    with LLM(checkpoint.path, platform=platform_name, tensor_parallel_size=2, **SMALL) as llm:
        asked = [ask(checkpoint, llm, parts) for parts in (["which", ODD[2]], ["no picture at all"], TWO)]
        assert_equals_transformers(checkpoint.path, llm, asked)


@pytest.mark.parametrize("model_type", ["idefics3", *only_full("one run of placeholders", "llava")])
def test_chunks_through_an_image_equal_whole(model_type: str, foreign: Any) -> None:
    checkpoint: ImageCheckpoint = foreign(model_type)
    with LLM(checkpoint.path, platform="cpu", max_num_batched_tokens=61, **SMALL) as llm:
        small = ask(checkpoint, llm, ["which ", ODD[2], " is it?"])
        assert len(small.prompt.token_ids) > 61
        assert_all_rows_equal(checkpoint.path, llm, small)
        assert runner_of(llm).steps.image_encoder.num_encoded == 1


def test_warm_caches_equal_cold_ones(foreign: Any) -> None:
    checkpoint: ImageCheckpoint = foreign("llava")
    with LLM(checkpoint.path, platform="cpu", **SMALL) as llm:
        asked = [ask(checkpoint, llm, parts) for parts in (TWO, ["what is ", ODD[0], "?"])]
        cold = [llm.generate([each.prompt], greedy(6))[0].token_ids for each in asked]
        encoder = runner_of(llm).steps.image_encoder
        assert encoder.num_encoded == 2, "each distinct image goes through the tower once"
        assert encoder.cache.counters.hits > 0
        before = llm.stats().prefix_cache_hits
        warm = [llm.generate([each.prompt], greedy(6))[0].token_ids for each in asked]
        assert warm == cold
        assert llm.stats().prefix_cache_hits > before
        assert_equals_transformers(checkpoint.path, llm, asked)


def test_other_pictures_of_one_size_share_nothing(foreign: Any) -> None:
    checkpoint: ImageCheckpoint = foreign("llava")
    with LLM(checkpoint.path, platform="cpu", **SMALL) as llm:
        asked = [ask(checkpoint, llm, ["what is ", picture(80, 80, seed), "?"]) for seed in range(4)]
        assert_equals_transformers(checkpoint.path, llm, asked)
        assert len({tuple(output.token_ids) for output in llm.generate([a.prompt for a in asked], greedy(6))}) > 1


def test_preempted_sequences_end_as_if_undisturbed(foreign: Any) -> None:
    checkpoint: ImageCheckpoint = foreign("llava")
    config = pick_strategy(checkpoint.path).read_config()
    block_bytes = 2 * len(config.layers) * 4 * config.num_kv_heads * config.head_dim * 4
    with LLM(checkpoint.path, platform="cpu", block_size=4, kv_cache_bytes=54 * block_bytes, max_num_seqs=8,
             max_model_len=200, dtype="float32", enable_prefix_caching=False) as llm:
        asked = [ask(checkpoint, llm, ["which " * count, ODD[count % 3], "?"]) for count in range(1, 5)]
        assert_equals_transformers(checkpoint.path, llm, asked, num_tokens=16)
        assert llm.stats().num_preemptions > 0, "the test must force preemption"


@pytest.mark.full("starts workers and replicas, which do not know families")
def test_replicas_and_workers_give_the_same_answers(foreign: Any) -> None:
    checkpoint: ImageCheckpoint = foreign("llava")
    conversations = [messages_of(["which ", shown, " is it?"]) for shown in ODD]
    answers = []
    for num_replicas in (1, 2):
        with LLM(checkpoint.path, platform="cpu", data_parallel_size=num_replicas, **SMALL) as llm:
            answers.append([output.token_ids for output in llm.chat(conversations, greedy(6))])
    assert answers[0] == answers[1]


@pytest.mark.full("starts workers, which do not know families; Ray itself is not needed")
def test_rows_of_ray_data_answer_as_chat_does(foreign: Any) -> None:
    checkpoint: ImageCheckpoint = foreign("llava")
    files = [io.BytesIO() for _ in ODD]
    for image, file in zip(ODD, files, strict=True):
        image.save(file, "PNG")
    messages = np.empty(len(ODD), dtype=object)
    messages[:] = [[{"role": "user", "content": [{"type": "text", "text": "which "}, {
        "type": "image", "image": file.getvalue()}]}] for file in files]
    predictor = LLMPredictor(str(checkpoint.path), platform="cpu",
                             sampling_params={"temperature": 0, "max_tokens": 6, "ignore_eos": True}, **SMALL)
    out = predictor({"messages": messages})
    predictor._llm.close()
    assert out[ERROR_COLUMN] == [""] * len(ODD)
    with LLM(checkpoint.path, platform="cpu", **SMALL) as llm:
        right = llm.chat([messages_of(["which ", image]) for image in ODD], greedy(6))
    assert out["generated_tokens"] == [output.token_ids for output in right]


# -- images of one size go through the tower together -----------------------------------------------------------------


def test_images_of_one_size_go_through_the_tower_together(foreign: Any, monkeypatch: Any) -> None:
    checkpoint: ImageCheckpoint = foreign("llava")
    with LLM(checkpoint.path, platform="cpu", **SMALL) as llm:
        model: Any = runner_of(llm).model
        images = [llm.engine.processor(messages_of(["a", picture(80, 80, seed)])).images[0] for seed in range(3)]
        calls: list[int] = []
        rows = TowerOfTransformers._rows
        monkeypatch.setattr(TowerOfTransformers, "_rows", lambda self, given: (
            calls.append(len(given["pixel_values"])), rows(self, given))[1])
        together = model.encode(images)
        assert calls == [3]
        for image, main_MD in zip(images, together, strict=True):
            assert np.allclose(model.encode([image])[0], main_MD, atol=1e-5)


def test_a_tower_that_mixes_images_of_a_batch_gets_one_at_a_time(foreign: Any, monkeypatch: Any) -> None:
    rows = TowerOfTransformers._rows
    monkeypatch.setattr(TowerOfTransformers, "_rows",
                        lambda self, given: rows(self, given) * len(given["pixel_values"]))
    checkpoint: ImageCheckpoint = foreign("llava")
    with LLM(checkpoint.path, platform="cpu", **SMALL) as llm:
        assert not runner_of(llm).model.tower.has_batches
        assert_equals_transformers(checkpoint.path, llm, [ask(checkpoint, llm, TWO)])


# -- an image that is larger than those of the start ------------------------------------------------------------------


def test_an_image_that_is_larger_than_those_of_the_start_is_refused(foreign: Any) -> None:
    """It comes of a processor that has other settings than the start saw, as an untried shape may do."""
    checkpoint: ImageCheckpoint = foreign("llava")
    with LLM(checkpoint.path, platform="cpu", max_num_batched_tokens=64, **SMALL) as llm:
        info, right = llm.engine.info, ask(checkpoint, llm, ["what is ", ODD[0], "?"])
        assert (info.max_image_tokens, info.max_tower_values) == (64, 3 * 112 * 112)
        (image,) = right.prompt.images
        pixels = np.repeat(image.tower_inputs["pixel_values"], 2, axis=-1)
        large = replace(right.prompt, images=[replace(image, tower_inputs={"pixel_values": pixels})])
        with pytest.raises(RequestError, match=r"makes 75264 numbers of it, .* memory for 37632; send it") as raised:
            llm.generate([large], greedy(1))
        assert raised.value.code == "image_not_measured"
        many = replace(right.prompt, images=[replace(image, num_tokens=73)])
        with pytest.raises(RequestError, match="makes 73 tokens of it, and the start measured memory for 64"):
            llm.generate([many], greedy(1))
        bounds.check_images(replace(right.prompt, images=[replace(image, num_tokens=72)]), info)
        assert_equals_transformers(checkpoint.path, llm, [right])


def test_images_go_through_the_tower_with_no_more_numbers_than_at_the_start(foreign: Any) -> None:
    checkpoint: ImageCheckpoint = foreign("llava")
    with LLM(checkpoint.path, platform="cpu", **SMALL) as llm:
        images = [llm.engine.processor(messages_of(["a", picture(80, 80, seed)])).images[0] for seed in range(3)]
        encoder = runner_of(llm).steps.image_encoder
        assert encoder.max_values == llm.engine.info.max_tower_values > 0
        assert [len(group) for group in encoder.stage(images).groups] == [3]
        encoder.max_values = 2 * images[0].num_tower_values
        encoder.max_tokens = 1 << 20
        assert [len(group) for group in encoder.stage(images).groups] == [2, 1]


# -- what is not served, by name --------------------------------------------------------------------------------------


def test_a_part_for_sound_is_refused_by_its_config(tmp_path: Path) -> None:
    CONFIG_MAPPING["qwen2_5_omni_thinker"]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"more than a text and image model \(audio_config\); take a checkpoint"):
        transformers_model.TransformersStrategy(tmp_path).read_config()
    config = CONFIG_MAPPING["gemma4"]()
    assert config.audio_config is None
    assert not [reason for reason in transformers_model._reasons(config, type, is_multimodal=True) if "audio" in reason]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mask_over_images_does_not_start(dtype: str, foreign: Any) -> None:
    """Greedy tokens of this tiny network are the same without its mask."""
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn: attention differs from transformers' own by"):
        LLM(foreign("gemma3").path, platform="cpu", **{**SMALL, "dtype": dtype})


REFUSED = {
    "paligemma": "it attends in both directions",
    "qwen3_vl": "gives its Qwen3VLTextModel deepstack_visual_embeds",
}


@pytest.mark.parametrize("model_type", ["qwen3_vl", *only_full("refused by its masks, as gemma3", "paligemma")])
def test_what_is_not_served_does_not_start(model_type: str, foreign: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(strategies, "find_strategy", lambda model_type: None)
    with pytest.raises(ModelError, match=REFUSED[model_type]):
        LLM(foreign(model_type).path, platform="cpu", **SMALL)


def test_another_number_of_rows_than_placeholders_does_not_start(foreign: Any, monkeypatch: Any) -> None:
    rows = TowerOfTransformers._rows
    monkeypatch.setattr(TowerOfTransformers, "_rows", lambda self, given: rows(self, given)[1:])
    with pytest.raises(ModelError, match=r"the tower makes 63 rows for the 64 tokens \d+ of 1 images"):
        LLM(foreign("llava").path, platform="cpu", **SMALL)


def test_a_tower_that_fails_does_not_start(foreign: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(TowerOfTransformers, "_rows", lambda self, given: given["pixel_mask"])
    with pytest.raises(ModelError, match=r"the comparison at the start does not run .KeyError: 'pixel_mask'"):
        LLM(foreign("llava").path, platform="cpu", **SMALL)


@pytest.mark.parametrize(("words", "kind"), [("shape '[7, 0]' is invalid", ModelError),
                                             ("CUDA out of memory", RuntimeError)])
def test_a_tower_whose_operators_fail_is_named_and_a_want_of_memory_is_not(words: str, kind: type[Exception],
                                                                          foreign: Any, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(TowerOfTransformers, "_rows", fail)
    with pytest.raises(kind, match=re.escape(words)) as raised:
        LLM(foreign("llava").path, platform="cpu", **SMALL)
    assert ("the comparison at the start does not run" in str(raised.value)) == (kind is ModelError)


def test_a_config_that_says_nothing_of_tied_embeddings_has_none(tmp_path: Path) -> None:
    """As transformers reads it."""
    CONFIG_MAPPING["muse_glimmer"](text_config={
        "num_hidden_layers": 1, "layer_types": ["full_attention"], "hidden_size": 256, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1}, vision_config={"num_hidden_layers": 1},
        ).save_pretrained(tmp_path)
    assert not transformers_model.TransformersStrategy(tmp_path).read_config().tie_word_embeddings


def test_rows_in_a_wrong_place_do_not_start(foreign: Any, monkeypatch: Any) -> None:
    rows = TowerOfTransformers._rows
    monkeypatch.setattr(TowerOfTransformers, "_rows", lambda self, given: rows(self, given).roll(1, dims=0))
    with pytest.raises(ModelError, match="a token changes by"):
        LLM(foreign("llava").path, platform="cpu", **SMALL)


# -- positions of three axes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["qwen2_vl", *only_full("positions by the same rule", "glm4v_moe", "glmga")])
def test_positions_of_three_axes_equal_transformers(model_type: str, foreign: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(strategies, "find_strategy", lambda model_type: None)
    checkpoint: ImageCheckpoint = foreign(model_type)
    with LLM(checkpoint.path, platform="cpu", max_num_batched_tokens=97, **SMALL) as llm:
        two = ask(checkpoint, llm, TWO)
        assert two.prompt.positions_3T is not None
        assert two.prompt.position_delta < 0
        assert_all_rows_equal(checkpoint.path, llm, two)
        assert_equals_transformers(checkpoint.path, llm, [ask(checkpoint, llm, ["no picture at all"]), two])


def test_positions_by_another_rule_do_not_start(foreign: Any, monkeypatch: Any) -> None:
    positions = transformers_check.mrope_positions
    monkeypatch.setattr(strategies, "find_strategy", lambda model_type: None)
    monkeypatch.setattr(transformers_check, "mrope_positions",
                        lambda num_tokens, *more: (positions(num_tokens, *more)[0][[0, 2, 1]], 0))
    with pytest.raises(ModelError, match="a token changes by"):
        LLM(foreign("qwen2_vl").path, platform="cpu", **SMALL)
