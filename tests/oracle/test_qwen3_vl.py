"""Qwen3-VL against transformers: images at any place, of any size, several times, and none at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM
from tests.full_set import only_full
from tests.oracle.image_prompts import LAYOUTS, SIZES, make_prompts
from tests.oracle.running import SMALL, assert_equals_reference


@pytest.mark.parametrize("num_tokens", [5, *only_full("larger chunks; the smallest cuts at every place", 16, 37)])
def test_chunks_may_cut_an_image(num_tokens: int, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_vl")
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens, **SMALL) as llm:
        prompts, images = make_prompts(llm, LAYOUTS)
        assert_equals_reference(path, llm, prompts, images)
        assert llm.stats().num_images_encoded == len(SIZES)


def test_without_a_vision_cache_a_cut_image_is_still_encoded_once(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_vl")
    with LLM(path, platform=platform_name, max_num_batched_tokens=16, vision_cache_bytes=0,
             enable_prefix_caching=False, **SMALL) as llm:
        prompts, images = make_prompts(llm, ["t4t"])
        assert_equals_reference(path, llm, prompts, images)
        assert llm.stats().num_images_encoded == 2, "once for each of the two runs of the prompt"
