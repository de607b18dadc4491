"""Videos in every form that families have against transformers: anywhere, several, with images, cut, cached,
preempted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM
from npu_runner.errors import ConfigError, RequestError
from tests.full_set import only_full
from tests.oracle.changed_checkpoints import spoiled
from tests.oracle.reference import load_model, model_inputs, random_image
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, assert_equals_reference, greedy, need_devices
from tests.oracle.tiny_checkpoints import make_checkpoint
from tests.oracle.video_prompts import conversation, make_prompts
from tests.oracle.videos_reference import video_inputs, video_text
from tests.videos import as_url, moving_frames, video_of

# Digits: the video of that number. p: an image. t: text.
LAYOUTS = ["0t", "t1t", "2t", "t01", "pt0", "0tp1p", "00t", "3t"]


@pytest.fixture(scope="module")
def videos() -> list[bytes]:
    return [
        video_of(moving_frames(30)),
        video_of(moving_frames(45, 48, 90, seed=1), has_sound=True),
        video_of(moving_frames(7, 130, 40, seed=2), times=[0, 1, 2, 10, 11, 30, 31]),
        video_of(moving_frames(1, seed=3)),
    ]


@pytest.mark.full("experts with videos; the families without experts stay, as do experts with images")
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_families_with_experts(family: str, videos: list[bytes], checkpoint: Any, platform_name: str) -> None:
    test_greedy_tokens_and_logits_equal_transformers(family, videos, checkpoint, platform_name)


@pytest.mark.parametrize("family", [
    "qwen3_vl", "qwen2_5_vl", *only_full("towers and prompts of the two that stay; states with images stay",
                                         "qwen2_vl", "qwen3_5")])
def test_greedy_tokens_and_logits_equal_transformers(
    family: str, videos: list[bytes], checkpoint: Any, platform_name: str
) -> None:
    path: Path = checkpoint(family)
    with LLM(path, platform=platform_name, **SMALL) as llm:
        prompts, seen = make_prompts(llm, LAYOUTS, videos)
        assert_equals_reference(path, llm, prompts, seen)
        distinct = {image.content_hash for prompt in prompts for image in prompt.images}
        assert llm.stats().num_images_encoded == len(distinct), "the tower runs once for each distinct pair"
        # Again, now that blocks and pairs are there.
        assert_equals_reference(path, llm, prompts[-2:], seen[-2:])
        assert llm.stats().num_images_encoded == len(distinct)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_are_the_text_and_the_positions_of_transformers(
    layout: str, videos: list[bytes], checkpoint: Any
) -> None:
    path: Path = checkpoint("qwen3_vl")
    with LLM(path, platform="cpu", **SMALL) as llm:
        processor = llm.engine.processor
        (prompt,), (seen,) = make_prompts(llm, [layout], videos)
    inputs = model_inputs(path, prompt.token_ids, seen)
    model = load_model(path).model
    positions, delta = model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw"), inputs["video_grid_thw"]
    )
    assert prompt.positions_3T.tolist() == positions[:, 0].tolist()
    assert prompt.position_delta == int(delta)
    text = processor.decode(prompt.token_ids)
    for data in (item for item in seen if isinstance(item, bytes)):
        written = video_text(data, video_inputs(path, [data])["video_grid_thw"][0].tolist())
        assert written in text
        assert f"<|vision_start|>{written}" not in text, "the release's processor replaced the outer tokens, too"
        assert processor.tokenizer.encode(text, add_special_tokens=False).ids == prompt.token_ids


# Chunks of the second begin at multiples of 64.
@pytest.mark.parametrize(("family", "num_tokens"), [
    ("qwen3_vl", 7), *only_full("larger chunks; small ones cut a video everywhere", ("qwen2_5_vl", 37),
                                ("qwen3_vl", 64), ("qwen3_5", 64))])
def test_chunks_may_cut_a_video(
    family: str, num_tokens: int, videos: list[bytes], checkpoint: Any, platform_name: str
) -> None:
    path: Path = checkpoint(family)
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens, **SMALL) as llm:
        prompts, seen = make_prompts(llm, ["0t", "t01", "0tp1p"], videos)
        assert_equals_reference(path, llm, prompts, seen)


@pytest.mark.full("pairs are images to the scheduler, which stay (test_scheduling_changes_nothing.py)")
def test_a_preempted_video_is_gone_on_with(videos: list[bytes], checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_vl")
    per_block = 2 * 3 * 4 * 2 * 16 * 4  # k and v, layers, block_size, kv heads, head_dim, bytes
    with LLM(path, platform=platform_name, block_size=4, kv_cache_bytes=28 * per_block, max_num_seqs=8,
             max_model_len=106, dtype="float32", enable_prefix_caching=False, vision_cache_bytes=0) as llm:  # fmt: skip
        prompts, seen = make_prompts(llm, ["0t", "3t", "t3"], videos)
        assert_equals_reference(path, llm, prompts, seen, num_tokens=MAX_NEW_TOKENS)
        assert llm.stats().num_preemptions > 0, "the test must force preemption"


@pytest.mark.full("two ranks on two cores; ranks know no videos, and stay with images")
@pytest.mark.ranks
def test_two_ranks_answer_as_one(videos: list[bytes], checkpoint: Any, platform_name: str) -> None:
    need_devices(platform_name)
    path: Path = checkpoint("qwen3_vl")
    answers = []
    for size in (1, 2):
        with LLM(path, platform=platform_name, tensor_parallel_size=size, **SMALL) as llm:
            prompts, _ = make_prompts(llm, ["0t", "0tp1p"], videos)
            answers.append([output.token_ids for output in llm.generate(prompts, greedy())])
    assert answers[0] == answers[1]


def test_videos_that_overlap_share_their_pairs(checkpoint: Any) -> None:
    still = moving_frames(1)[0]
    frames = [frame for frame in moving_frames(4, seed=5) for _ in range(10)]
    # Each second another image; the second video goes on where the first one ends, and is as long.
    lossless = {"options": {"qp": "0", "preset": "ultrafast"}}
    first, second = video_of(frames, **lossless), video_of(frames[10:] + [still] * 10, **lossless)
    with LLM(checkpoint("qwen3_vl"), platform="cpu", enable_prefix_caching=False, **SMALL) as llm:
        prompts, _ = make_prompts(llm, ["0t", "1t"], [first, second])
        hashes = [[image.content_hash for image in prompt.images] for prompt in prompts]
        assert len(set(hashes[0]) & set(hashes[1])) >= 2, "the videos must overlap in whole pairs"
        llm.generate(prompts, greedy(1))
        assert llm.stats().num_images_encoded == len({*hashes[0], *hashes[1]})
        llm.generate(prompts[:1], greedy(1))
        assert llm.stats().num_images_encoded == len({*hashes[0], *hashes[1]}), "shown again it costs nothing"


def test_chats_take_addresses_and_bytes(videos: list[bytes], checkpoint: Any, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(videos[0])
    text = {"type": "text", "text": "which?"}
    parts = [{"type": "video", "video": videos[0]}, {"type": "video_url", "video_url": {"url": as_url(videos[0])}},
             {"type": "video_url", "video_url": {"url": "a.mp4"}}]  # fmt: skip
    with LLM(checkpoint("qwen3_vl"), platform="cpu", **SMALL) as llm:
        outputs = llm.chat([[{"role": "user", "content": [part, text]}] for part in parts], greedy(),
                           allowed_media_dir=tmp_path)  # fmt: skip
        assert llm.stats().num_images_encoded == 3, "the three pairs of one video, from wherever it comes"
    assert len({tuple(output.token_ids) for output in outputs}) == 1


def test_raw_prompts_take_videos(videos: list[bytes], checkpoint: Any, platform_name: str) -> None:
    """In each shape, behind and before images, against transformers, which is given the prompt as it came out."""
    path: Path = checkpoint("qwen3_vl")
    still = random_image(np.random.default_rng(7), 70, 45)
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    with LLM(path, platform=platform_name, **SMALL) as llm:
        tokenizer = llm.processor.tokenizer
        texts = [f"{video} which?", f"{image}a circle{video}{video} which?"]
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        shapes: list[dict[str, Any]] = [
            {"prompt": texts[0], "videos": [videos[0]]},
            {"prompt": texts[0], "multi_modal_data": {"video": videos[0]}},
            {"prompt_token_ids": ids[0], "multi_modal_data": {"video": [bytearray(videos[0])], "image": None}},
            {"prompt": texts[1], "videos": videos[:2], "images": [still]},
            {"prompt_token_ids": ids[1], "multi_modal_data": {"video": videos[:2], "image": still}},
        ]
        prompts = [llm.processor.from_text(texts[0], videos=videos[:1]),
                   llm.processor.from_text(ids[1], [still], videos[:2])]
        seen: list[list[Any]] = [[videos[0]], [still, videos[0], videos[1]]]
        assert_equals_reference(path, llm, prompts, seen)
        expected = [output.token_ids for output in llm.generate(prompts, greedy())]
        num_encoded = llm.stats().num_images_encoded
        found = [output.token_ids for output in llm.generate(shapes, greedy())]
        assert found == [expected[0]] * 3 + [expected[1]] * 2
        assert llm.stats().num_images_encoded == num_encoded, "the same pairs, from wherever they come"


def test_a_raw_prompt_chooses_its_frames(videos: list[bytes], checkpoint: Any, tmp_path: Path) -> None:
    shape = {"prompt": "<|vision_start|><|video_pad|><|vision_end|>which?", "videos": videos[:1]}
    with LLM(checkpoint("qwen3_vl"), platform="cpu", **SMALL) as llm:
        llm.generate([{**shape, "mm_processor_kwargs": {"num_frames": 2}}], greedy(1))
        assert llm.stats().num_images_encoded == 1
    with LLM(without_videos(checkpoint, tmp_path), platform="cpu", **SMALL) as llm:
        for item in (shape, {**shape, "videos": [], "mm_processor_kwargs": {"fps": 1}}):
            with pytest.raises(RequestError, match="takes no") as caught:
                llm.generate([item])
            assert caught.value.code == "model_has_no_video"
    with LLM(checkpoint("llama"), platform="cpu", **SMALL) as llm:
        with pytest.raises(RequestError, match="remove the videos") as caught:
            llm.generate([shape])
        assert caught.value.code == "model_has_no_vision"


def test_a_call_chooses_the_frames(videos: list[bytes], checkpoint: Any) -> None:
    messages, _ = conversation("0t", videos)
    with LLM(checkpoint("qwen3_vl"), platform="cpu", **SMALL) as llm:
        llm.chat(messages, greedy(1), mm_processor_kwargs={"num_frames": 2})
        assert llm.stats().num_images_encoded == 1
        with pytest.raises(RequestError, match=r"mm_processor_kwargs.size: not supported"):
            llm.chat(messages, greedy(1), mm_processor_kwargs={"size": 1})


def test_settings_choose_the_frames(videos: list[bytes], checkpoint: Any) -> None:
    seconds = []
    for settings in ({}, {"video_fps": 4.0}, {"video_max_frames": 2}):
        with LLM(checkpoint("qwen3_vl"), platform="cpu", **SMALL, **settings) as llm:
            (prompt,), _ = make_prompts(llm, ["0t"], videos)
            seconds.append(len(prompt.images))
    assert seconds == [3, 6, 1]


def test_videos_may_be_prepared_otherwise_than_images(videos: list[bytes], tmp_path: Path, platform_name: str) -> None:
    path = make_checkpoint(tmp_path / "own", "qwen3_vl")
    own = {"size": {"shortest_edge": 4096, "longest_edge": 5 * 128 * 160}, "image_mean": [0.1, 0.5, 0.7],
           "image_std": [0.3, 0.2, 0.9]}  # fmt: skip
    (path / "video_preprocessor_config.json").write_text(json.dumps(own))
    with LLM(path, platform=platform_name, **SMALL) as llm:
        prompts, seen = make_prompts(llm, ["0tp1p", "pt2"], videos)
        assert_equals_reference(path, llm, prompts, seen)


def test_equal_frames_at_other_times_share_no_blocks(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen2_5_vl")
    # Without loss, so that the pace changes no pixel.
    shown = [video_of(moving_frames(4, seed=5), times=[pace * index for index in range(4)],
                      options={"qp": "0"}) for pace in (1, 9)]
    with LLM(path, platform=platform_name, block_size=4, **SMALL) as llm:
        prompts, seen = make_prompts(llm, ["0t", "1t"], shown)
        assert prompts[0].token_ids == prompts[1].token_ids
        assert [image.content_hash for image in prompts[0].images] == [
            image.content_hash for image in prompts[1].images], "the pixels are equal: only the times differ"
        for prompt, item in zip(prompts, seen, strict=True):
            assert_equals_reference(path, llm, [prompt], [item])
            (again,) = llm.generate([prompt], greedy(1))
            assert again.num_cached_tokens > prompt.spans[1].start, "what is equal is shared"
        assert llm.stats().num_images_encoded == 2, "the tower saw each pair once"


def without_videos(checkpoint: Any, folder: Path) -> Path:
    """One whose files do not say how a video is shown."""
    return spoiled(checkpoint, folder, base="qwen2_vl", video_token_id=None)


def test_models_without_videos_say_so(videos: list[bytes], checkpoint: Any, tmp_path: Path) -> None:
    messages, _ = conversation("0t", videos)
    path = without_videos(checkpoint, tmp_path)
    with LLM(path, platform="cpu", **SMALL) as llm:
        with pytest.raises(RequestError, match=r"takes no videos.*video_token_id None is no token") as caught:
            llm.chat(messages)
        assert caught.value.code == "model_has_no_video"
    with pytest.raises(ConfigError, match=r"video_fps 2.0: this model takes no videos"):
        LLM(path, platform="cpu", video_fps=2.0, **SMALL)
    with LLM(checkpoint("llama"), platform="cpu", **SMALL) as llm:
        with pytest.raises(RequestError) as caught:
            llm.chat(messages)
        assert caught.value.code == "model_has_no_vision"
