"""Whatever the scheduler, the cache or the graphs do, the tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM
from npu_runner.runner.buckets import bucket_sizes
from tests.families import sees_images
from tests.full_set import only_full
from tests.oracle.image_prompts import FEW_LAYOUTS, LAYOUTS, make_prompts
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, UncompiledGraphs, assert_equals_reference, greedy, runner_of
from tests.oracle.scheduled_prompts import NUM_BLOCKS, text_prompts


@pytest.mark.parametrize(("num_tokens", "model_type"), [
    (7, "qwen3_moe"), *only_full("more sizes; one with experts stays, and the smallest with images (test_qwen3_vl.py)",
                                 (1, "qwen3"), (7, "qwen3"), (33, "qwen3"))])
def test_chunked_prefill_equals_whole(num_tokens: int, model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type)
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens, **SMALL) as llm:
        assert_equals_reference(path, llm, text_prompts(llm))


@pytest.mark.parametrize("block_size", [1, *only_full("larger ones; others stay in most tests of this folder", 4, 128)])
def test_any_block_size(block_size: int, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_vl")
    with LLM(path, platform=platform_name, block_size=block_size, **SMALL) as llm:
        assert_equals_reference(path, llm, *make_prompts(llm, LAYOUTS[:6]))


@pytest.mark.parametrize("model_type", ["qwen3_vl", *only_full(
    "experts, and another tower; schedulers do not know them", "qwen3_vl_moe", "qwen2_5_vl")])
def test_a_warm_prefix_cache_equals_a_cold_one(model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type)
    with LLM(path, platform=platform_name, block_size=4, **SMALL) as llm:
        prompts, images = make_prompts(llm, FEW_LAYOUTS)
        cold = llm.generate(prompts, greedy())
        hits = llm.stats().prefix_cache_hits
        warm = llm.generate(prompts, greedy())
        assert [o.token_ids for o in warm] == [o.token_ids for o in cold]
        assert llm.stats().prefix_cache_hits - hits > 0.7 * sum(len(p.token_ids) for p in prompts)
        assert all(o.num_cached_tokens > 0 for o in warm)
        assert_equals_reference(path, llm, prompts, images)


def test_images_that_differ_never_share_blocks(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_vl")
    with LLM(path, platform=platform_name, block_size=4, **SMALL) as llm:
        prompts, _ = make_prompts(llm, ["3t"])
        inverted = [part for part in make_prompts(llm, ["3t"])[1][0]]
        other = llm.engine.processor([{"role": "user", "content": [
            {"type": "image", "image": inverted[0].point(lambda value: 255 - value)},
            {"type": "text", "text": "which picture shows a circle "}]}])
        assert other.token_ids == prompts[0].token_ids, "the same tokens: only the pixels differ"
        llm.generate(prompts, greedy())
        (output,) = llm.generate([other], greedy())
        span = other.spans[0]
        assert output.num_cached_tokens <= span.start


# Enough for the longest sequence, too few for all of them together.
LONGEST = {"qwen3": 72, "qwen3_moe": 72, "qwen3_vl": 140, "qwen2_vl": 160, "qwen2_5_vl": 160, "paddleocr_vl": 160}
OTHER_TOWERS = ["qwen2_vl", "paddleocr_vl"]


@pytest.mark.parametrize("model_type", ["qwen3_vl", *only_full(
    "texts, experts, and another tower; schedulers do not know them", "qwen3", "qwen3_moe", "qwen2_5_vl")])
def test_preempted_sequences_end_as_if_undisturbed(model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type)
    per_block = 2 * 3 * 4 * 2 * 16 * 4  # k and v, layers, block_size, kv heads, head_dim, bytes
    with LLM(path, platform=platform_name, block_size=4, kv_cache_bytes=NUM_BLOCKS[model_type] * per_block,
             max_num_seqs=8, max_model_len=LONGEST[model_type], dtype="float32", enable_prefix_caching=False) as llm:
        prompts, images = make_prompts(llm, LAYOUTS[:7]) if sees_images(model_type) else (text_prompts(llm), None)
        assert_equals_reference(path, llm, prompts, images, num_tokens=MAX_NEW_TOKENS)
        assert llm.stats().num_preemptions > 0, "the test must force preemption"
        assert llm.stats().kv_blocks_used == 0


@pytest.mark.full("schedulers do not know which tower an image goes through; qwen2_5_vl stays")
@pytest.mark.parametrize("model_type", OTHER_TOWERS)
def test_another_tower_changes_nothing(model_type: str, checkpoint: Any, platform_name: str) -> None:
    test_a_warm_prefix_cache_equals_a_cold_one(model_type, checkpoint, platform_name)
    test_preempted_sequences_end_as_if_undisturbed(model_type, checkpoint, platform_name)


def test_padded_decode_equals_unpadded(checkpoint: Any, platform_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform_name != "cpu":
        pytest.skip("elsewhere the graphs themselves are compared")
    from npu_runner.platforms.cpu.platform import CpuPlatform

    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: UncompiledGraphs())
    path: Path = checkpoint("qwen3_vl")
    with LLM(path, platform=platform_name, graph_mode="reduce-overhead", graph_batch_sizes=(2, 5), **SMALL) as llm:
        prompts, images = make_prompts(llm, FEW_LAYOUTS)
        with torch.inference_mode():
            for cache in (runner_of(llm).k_cache, runner_of(llm).v_cache):
                cache[:, 0] = 1e4  # whoever lets the null block count shows
        assert_equals_reference(path, llm, prompts, images)


@pytest.mark.slow
@pytest.mark.full("inductor compiles for a minute a mode; test_attention_backends compiles attention alone in both")
@pytest.mark.parametrize(("graph_mode", "model_type"), [
    ("reduce-overhead", "qwen3_vl"), ("max-autotune", "qwen3_vl"), ("reduce-overhead", "qwen3_vl_moe")])
def test_compiled_equals_eager(graph_mode: str, model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type, num_hidden_layers=1, vision={"depth": 1, "deepstack_visual_indexes": [0]})
    with LLM(path, platform=platform_name, graph_mode=graph_mode, graph_batch_sizes=(4,), **SMALL) as llm:
        prompts, images = make_prompts(llm, LAYOUTS[:4])
        import torch._dynamo

        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert_equals_reference(path, llm, prompts, images)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "nothing compiles after warm-up"


def test_bucket_sizes_follow_the_rule() -> None:
    assert bucket_sizes(64) == (1, 2, 4, 8, 16, 32, 48, 64)
    assert bucket_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(8, most_tokens=40) == (1, 2, 4, 8, 16, 32, 40)
    assert bucket_sizes(64, most_tokens=576)[8:] == (80, 96, 112, 128, 192, 256, 320, 384, 448, 512, 576)
    assert bucket_sizes(8, (4, 24, 48), most_tokens=40) == (4, 24)
