"""Videos of GLM's families against transformers: alone, several, with images, cut, preempted; their text and positions.

Where a prompt has images and videos, transformers 5.23 cannot tell their tokens apart; the reference hands pairs over
as images then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM
from tests.full_set import only_full
from tests.oracle.reference import load_model, model_inputs
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, assert_equals_reference
from tests.oracle.video_prompts import make_prompts
from tests.oracle.videos_reference import glm_video_text, video_inputs
from tests.videos import moving_frames, video_of

# Digits: the video of that number. p: an image. t: text.
LAYOUTS = ["0t", "t1t", "2t", "t01", "pt0", "0tp1p", "00t", "3t"]


@pytest.fixture(scope="module")
def videos() -> list[bytes]:
    """Of whole seconds, of a part of one, of unequal steps, and of one frame."""
    return [
        video_of(moving_frames(20)),
        video_of(moving_frames(25, 48, 90, seed=1)),
        video_of(moving_frames(7, 130, 40, seed=2), times=[0, 1, 2, 10, 11, 30, 31]),
        video_of(moving_frames(1, seed=3)),
    ]


@pytest.mark.parametrize("family", ["glm_ocr", *only_full("another tower; its images stay, and its videos in chunks",
                                                          "glm4v")])
def test_greedy_tokens_and_logits_equal_transformers(family: str, videos: list[bytes], checkpoint: Any,
                                                     platform_name: str) -> None:
    path: Path = checkpoint(family)
    with LLM(path, platform=platform_name, **SMALL) as llm:
        prompts, seen = make_prompts(llm, LAYOUTS, videos)
        assert_equals_reference(path, llm, prompts, seen)
        distinct = {image.content_hash for prompt in prompts for image in prompt.images}
        assert llm.stats().num_images_encoded == len(distinct), "the tower runs once for each distinct pair"


@pytest.mark.full("glm_ocr's network and videos with glm4v's tower; both stay")
def test_glm46v(videos: list[bytes], checkpoint: Any, platform_name: str) -> None:
    test_greedy_tokens_and_logits_equal_transformers("glm46v", videos, checkpoint, platform_name)


@pytest.mark.parametrize(("family", "first"), [
    ("glm_ocr", "0.0 seconds"), ("glm4v", "0"), *only_full("glm_ocr's text", ("glm46v", "0.0 seconds"))])
def test_prompts_are_the_text_and_the_positions_of_transformers(family: str, first: str, videos: list[bytes],
                                                                checkpoint: Any) -> None:
    path: Path = checkpoint(family)
    with LLM(path, platform="cpu", **SMALL) as llm:
        processor = llm.engine.processor
        prompts, seen = make_prompts(llm, ["0t", "t1t", "2t", "t01", "3t"], videos)
    for prompt, shown in zip(prompts, seen, strict=True):
        inputs = model_inputs(path, prompt.token_ids, shown)
        assert 1 not in inputs["mm_token_type_ids"], "its own processor takes all of them for videos"
        positions, delta = load_model(path).model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], None, inputs["video_grid_thw"])
        assert prompt.positions_3T.tolist() == positions[:, 0].tolist()
        assert prompt.position_delta == int(delta)
        text = processor.decode(prompt.token_ids)
        for data in shown:
            written = glm_video_text(path, data, video_inputs(path, [data])["video_grid_thw"][0].tolist())
            assert f"<|end_of_image|>{first}<|" in f"{written}<|"
            assert f"<|begin_of_video|>{written}<|end_of_video|>" in text
        assert processor.tokenizer.encode(text, add_special_tokens=False).ids == prompt.token_ids


@pytest.mark.parametrize(("family", "num_tokens"), [("glm4v", 7), *only_full("larger chunks", ("glm_ocr", 37))])
def test_chunks_may_cut_a_video(family: str, num_tokens: int, videos: list[bytes], checkpoint: Any,
                                platform_name: str) -> None:
    path: Path = checkpoint(family)
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens, block_size=4, **SMALL) as llm:
        prompts, seen = make_prompts(llm, ["2t", "0tp1p"], videos)
        assert_equals_reference(path, llm, prompts, seen)
        hits = llm.stats().prefix_cache_hits
        assert_equals_reference(path, llm, prompts, seen)  # again, now that blocks are there
        assert llm.stats().prefix_cache_hits > hits


@pytest.mark.full("pairs are images to the scheduler, which stay (test_scheduling_changes_nothing.py)")
def test_a_preempted_video_is_gone_on_with(videos: list[bytes], checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("glm4v")
    per_block = 2 * 3 * 4 * 2 * 16 * 4  # k and v, layers, block_size, kv heads, head_dim, bytes
    with LLM(path, platform=platform_name, block_size=4, kv_cache_bytes=32 * per_block, max_num_seqs=8,
             max_model_len=110, dtype="float32", enable_prefix_caching=False, vision_cache_bytes=0) as llm:
        prompts, seen = make_prompts(llm, ["2t", "3t", "t3"], videos)
        assert_equals_reference(path, llm, prompts, seen, num_tokens=MAX_NEW_TOKENS)
        assert llm.stats().num_preemptions > 0, "the test must force preemption"
