"""The vision cache under a running model: its counters are what happened, and its size changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM
from tests.full_set import only_full
from tests.oracle.reference import random_image
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, assert_equals_reference, greedy

SIDE = 128
# Tokens of an image, hidden size, float32, main and two deepstack levels.
BYTES_PER_IMAGE = (SIDE // 32) ** 2 * 64 * 4 * 3


def image(name: str) -> Any:
    return random_image(np.random.default_rng(ord(name)), SIDE, SIDE)


def prompts_of(llm: LLM, order: str) -> list[Any]:
    text = {"type": "text", "text": "which"}
    return [llm.engine.processor([{"role": "user", "content": [{"type": "image", "image": image(name)}, text]}])
            for name in order]  # fmt: skip


# Room for two images and a half; one prompt at a time. Upper case: a hit.
@pytest.mark.parametrize(("order", "expected"), [("abAcb", "abAcb"), ("abAcA", "abAcA"), ("aAAbBA", "aAAbBA")])
def test_hits_misses_evictions_and_bytes_are_counted(order: str, expected: str, checkpoint: Any,
                                                     platform_name: str) -> None:
    with LLM(checkpoint("qwen3_vl"), platform=platform_name, enable_prefix_caching=False,
             vision_cache_bytes=BYTES_PER_IMAGE * 5 // 2, **{**SMALL, "max_num_seqs": 1}) as llm:  # fmt: skip
        llm.generate(prompts_of(llm, order.lower()), greedy(2))
        stats = llm.stats()
    num_misses = sum(name.islower() for name in expected)
    assert (stats.vision_cache_hits, stats.vision_cache_misses) == (len(order) - num_misses, num_misses)
    assert stats.num_images_encoded == num_misses
    assert stats.vision_cache_evictions == max(0, num_misses - 2)
    assert stats.vision_cache_bytes == min(2, num_misses) * BYTES_PER_IMAGE


@pytest.mark.parametrize(("device_images", "host_images"), [(2, 8), (0, 8), (1, 2)])
def test_what_the_device_has_no_room_for_comes_back_from_the_host(device_images: int, host_images: int, checkpoint: Any,
                                                                 platform_name: str) -> None:
    """In the dtype of the model, which numpy does not know. With eight places no image is encoded again."""
    path = checkpoint("qwen3_vl")
    size = BYTES_PER_IMAGE // 2
    settings: dict[str, Any] = {**SMALL, "max_num_seqs": 1, "dtype": "bfloat16", "enable_prefix_caching": False}
    order = "abcdefghabcdefghhgfe"
    with LLM(path, platform=platform_name, **settings) as llm:
        expected = [output.token_ids for output in llm.generate(prompts_of(llm, order), greedy(4))]
    with LLM(path, platform=platform_name, vision_cache_bytes=device_images * size,
             vision_cache_host_bytes=host_images * size, **settings) as llm:
        found = llm.generate(prompts_of(llm, order), greedy(4))
        stats = llm.stats()
    assert [output.token_ids for output in found] == expected
    assert stats.vision_cache_host_bytes <= host_images * size
    assert stats.vision_cache_bytes <= device_images * size
    if host_images == 8:
        assert stats.num_images_encoded == stats.vision_cache_misses == 8
        assert stats.vision_cache_hits == len(order) - 8
        assert stats.vision_cache_host_hits >= len(order) - 8 - device_images * 2
    else:
        assert stats.num_images_encoded == stats.vision_cache_misses > 8
        assert stats.vision_cache_host_hits > 0


def test_the_tower_runs_once_for_each_distinct_image(checkpoint: Any, platform_name: str) -> None:
    with LLM(checkpoint("qwen3_vl"), platform=platform_name, enable_prefix_caching=False, **SMALL) as llm:
        together = llm.generate(prompts_of(llm, "aabbcab"), greedy())
        assert llm.stats().num_images_encoded == 3
        again = llm.generate(prompts_of(llm, "cba"), greedy())
        assert llm.stats().num_images_encoded == 3
        assert llm.stats().vision_cache_bytes == 3 * BYTES_PER_IMAGE
        assert [output.token_ids for output in again] == [together[i].token_ids for i in (4, 2, 0)]


@pytest.mark.parametrize(("cache_bytes", "chunk"), [
    (0, 24), *only_full("whole prompts, and a cache of one image; no cache and chunks stay", (0, 2048),
                        (BYTES_PER_IMAGE, 2048))])
def test_a_preempted_sequence_still_has_its_image_when_the_cache_is_tiny(
    cache_bytes: int, chunk: int, checkpoint: Any, platform_name: str
) -> None:
    path: Path = checkpoint("qwen3_vl")
    per_block = 2 * 3 * 4 * 2 * 16 * 4  # k and v, layers, block_size, kv heads, head_dim, bytes
    with LLM(path, platform=platform_name, block_size=4, kv_cache_bytes=24 * per_block, max_num_seqs=8,
             max_model_len=64, max_num_batched_tokens=chunk, dtype="float32", enable_prefix_caching=False,
             vision_cache_bytes=cache_bytes) as llm:  # fmt: skip
        prompts = prompts_of(llm, "abcdef")
        assert_equals_reference(path, llm, prompts, [[image(name)] for name in "abcdef"], num_tokens=MAX_NEW_TOKENS)
        assert llm.stats().num_preemptions > 0, "the test must force preemption"
        assert llm.stats().vision_cache_bytes <= cache_bytes
        if (cache_bytes, chunk) == (0, 2048):
            # Each once, the last prompt's again when it ran alone; the rest are those that were preempted.
            assert llm.stats().num_images_encoded > 6 + 1
