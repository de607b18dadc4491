"""Qwen3-VL against transformers: images at any place, of any size, several times, and none at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM
from tests.full_set import is_fast, only_full
from tests.oracle.reference import random_image
from tests.oracle.running import SMALL, assert_equals_reference

SIZES = [(70, 45), (200, 33), (31, 190), (128, 128), (250, 251), (8, 8)]
# t: a stretch of text; digits: the image of that number
LAYOUTS = ["t", "0t", "t1", "t2t", "t01t", "3t4", "0t1t2t3", "t44t4", "5t", "012t345"]
FEW_LAYOUTS = LAYOUTS[::3] if is_fast else LAYOUTS
"""Where what is shown does not matter beyond that."""


def conversation(layout: str, images: list[Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    parts: list[dict[str, Any]] = []
    used = []
    for mark in layout:
        if mark == "t":
            parts.append({"type": "text", "text": "which picture shows a circle " * len(parts or "x")})
        else:
            parts.append({"type": "image", "image": images[int(mark)]})
            used.append(images[int(mark)])
    return [{"role": "user", "content": parts}], used


def make_prompts(llm: LLM, layouts: list[str]) -> tuple[list[Any], list[list[Any]]]:
    rng = np.random.default_rng(7)
    images = [random_image(rng, *size) for size in SIZES]
    built = [conversation(layout, images) for layout in layouts]
    return [llm.engine.processor(messages) for messages, _ in built], [used for _, used in built]


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
