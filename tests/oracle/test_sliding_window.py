"""Sliding windows against transformers: families whose layers all slide, or some, whatever scheduler and cache do."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM
from npu_runner.core.block_manager import first_needed_block
from npu_runner.platforms import pick_platform
from npu_runner.strategies import pick_strategy
from tests.full_set import only_full
from tests.oracle.changed_checkpoints import spoiled
from tests.oracle.running import (
    MAX_NEW_TOKENS,
    SMALL,
    UncompiledGraphs,
    assert_equals_reference,
    greedy,
    need_devices,
    runner_of,
)
from tests.oracle.sliding_configs import ALL_SLIDE, SLIDING, SOME_SLIDE

# Shorter than a window of 10, of about one, and many; tokens are a word or two each.
TEXTS = ["which", "which of the two", "which of the two pictures shows a circle? " * 2, "a b c d e f g " * 12,
         "colour " * 30]


FAMILIES = ("mistral", "qwen2", "qwen3", "qwen3_moe")
WINDOWS = (2, 10, 16, 37)
EACH = sorted(itertools.product(FAMILIES, WINDOWS), key=lambda each: each not in (
    ("mistral", 10), ("mistral", 16), ("qwen3", 10)))


def prompts_of(llm: LLM) -> list[Any]:
    return [llm.engine.processor.from_text(text) for text in TEXTS]


def default_block_size(platform_name: str, wanted: int) -> int:
    allowed = next(iter(pick_platform(platform_name).attention_backends.values())).block_sizes
    return wanted if allowed is None else allowed[0]


@pytest.mark.parametrize(("model_type", "window"), [  # transformers' own cache of 1 keeps all
    *EACH[:3], *only_full("each family with each window; a family of each kind of config stays", *EACH[3:])])
def test_every_layer_slides(model_type: str, window: int, checkpoint: Any, platform_name: str) -> None:
    """Windows that are no multiple of the block size, whole blocks, and the least that transformers honours."""
    path: Path = checkpoint(model_type, sliding_window=window, **ALL_SLIDE[model_type])
    with LLM(path, platform=platform_name, max_num_batched_tokens=64, **SMALL) as llm:
        assert_equals_reference(path, llm, prompts_of(llm))
        assert f"sliding window of {window} tokens in every layer: blocks behind it are freed" in llm.engine.info.ledger
        assert llm.stats().kv_blocks_used == 0


@pytest.mark.parametrize("model_type", ["qwen3", *only_full(
    "layers that are counted; which ones slide stays (test_which_layers_slide_is_what_transformers_says)", "qwen2")])
def test_some_layers_slide(model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type, sliding_window=10, **SOME_SLIDE[model_type])
    with LLM(path, platform=platform_name, max_num_batched_tokens=64, **SMALL) as llm:
        assert_equals_reference(path, llm, prompts_of(llm))
        assert "sliding window of 10 tokens in 2 of 3 layers: masked only" in llm.engine.info.ledger
        assert llm.engine.block_manager.sliding_window is None


def test_a_window_that_the_file_does_not_ask_for_is_none(checkpoint: Any, platform_name: str) -> None:
    """mistral's null, qwen3's use_sliding_window: as most checkpoints have it."""
    for path in (checkpoint("mistral", sliding_window=None), checkpoint("qwen3", sliding_window=10)):
        with LLM(path, platform=platform_name, **SMALL) as llm:
            assert_equals_reference(path, llm, prompts_of(llm))
            assert "sliding" not in llm.engine.info.ledger


@pytest.mark.parametrize("num_tokens", [7, *only_full("other sizes of chunks", 1, 33)])
def test_chunks(num_tokens: int, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("mistral", sliding_window=10)
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens,
             block_size=default_block_size(platform_name, 4), **SMALL) as llm:
        assert_equals_reference(path, llm, prompts_of(llm))


@pytest.mark.parametrize("block_size", [3, *only_full("other sizes of blocks", 1, 16)])
def test_block_sizes(block_size: int, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("mistral", sliding_window=10)
    with LLM(path, platform=platform_name, block_size=default_block_size(platform_name, block_size), **SMALL) as llm:
        assert_equals_reference(path, llm, prompts_of(llm))


def test_a_window_longer_than_a_sequence_may_be_is_none(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("mistral", sliding_window=1024)
    with LLM(path, platform=platform_name, **SMALL) as llm:
        assert runner_of(llm).attention.windows == (None,)
        assert_equals_reference(path, llm, prompts_of(llm))


def test_a_warm_prefix_cache_equals_a_cold_one(checkpoint: Any, platform_name: str) -> None:
    """The blocks behind the window are gone, or others' by then, and prompts are found all the same."""
    path: Path = checkpoint("mistral", sliding_window=10)
    with LLM(path, platform=platform_name, block_size=default_block_size(platform_name, 4), **SMALL) as llm:
        prompts = [llm.engine.processor.from_text(text * 3) for text in TEXTS]
        cold = llm.generate(prompts, greedy())
        hits = llm.stats().prefix_cache_hits
        warm = llm.generate(prompts, greedy())
        assert [o.token_ids for o in warm] == [o.token_ids for o in cold]
        if platform_name != "npu":
            assert llm.stats().prefix_cache_hits - hits > 0.8 * sum(len(p.token_ids) for p in prompts)
        assert_equals_reference(path, llm, prompts)


def test_preempted_sequences_end_as_if_undisturbed(checkpoint: Any, platform_name: str) -> None:
    if platform_name == "npu":
        pytest.skip("blocks of 128 tokens: tiny prompts never preempt each other")
    path: Path = checkpoint("mistral", sliding_window=20)
    per_block = 2 * 3 * 4 * 2 * 16 * 4  # k and v, layers, block_size, kv heads, head_dim, bytes
    with LLM(path, platform=platform_name, block_size=4, kv_cache_bytes=16 * per_block, max_num_batched_tokens=32,
             max_num_seqs=8, max_model_len=300, dtype="float32", enable_prefix_caching=False) as llm:
        # Short ones that grow, then all: some are longer than the window when they begin anew.
        growing = [llm.engine.processor.from_text(f"{letter} which of the two") for letter in "abcdefgh"]
        assert_equals_reference(path, llm, [*growing, *prompts_of(llm)], num_tokens=MAX_NEW_TOKENS)
        assert llm.stats().num_preemptions > 0, "the test must force preemption"
        assert llm.stats().kv_blocks_used == 0


def test_a_sequence_longer_than_the_cache_is_served(checkpoint: Any, platform_name: str) -> None:
    """15 blocks of 4 hold 60 tokens, or a window and a chunk of a sequence of any length."""
    if platform_name == "npu":
        pytest.skip("blocks of 128 tokens hold these prompts whole")
    path: Path = checkpoint("mistral", sliding_window=20)
    per_block = 2 * 3 * 4 * 2 * 16 * 4
    with LLM(path, platform=platform_name, block_size=4, kv_cache_bytes=16 * per_block, max_num_batched_tokens=32,
             max_num_seqs=2, max_model_len=1000, dtype="float32") as llm:
        prompt = llm.engine.processor.from_text("which of the two pictures shows a circle? " * 20)
        assert len(prompt.token_ids) > 3 * 60
        assert_equals_reference(path, llm, [prompt])


def test_what_was_freed_is_not_read(checkpoint: Any, platform_name: str) -> None:
    """Every block that nobody holds is NaN before each step: answers stay those of transformers."""
    path: Path = checkpoint("mistral", sliding_window=10)
    with LLM(path, platform=platform_name, block_size=default_block_size(platform_name, 4),
             enable_prefix_caching=False, max_num_batched_tokens=24, **SMALL) as llm:
        runner, manager = runner_of(llm), llm.engine.block_manager
        submit = runner.steps.submit
        num_spoiled = 0

        def spoil_and_submit(batch: Any) -> Any:
            nonlocal num_spoiled
            step = submit(batch)
            # The next step may have these blocks; this one read them before.
            free = torch.tensor([block for block in range(1, manager.num_blocks) if not manager._ref_counts[block]],
                                device=runner.device)
            for cache in (runner.k_cache, runner.v_cache):
                cache[:, free] = torch.nan
            for row, length in enumerate(batch.context_lens_B - batch.query_lens_B):
                needed = first_needed_block(int(length), 10, manager.block_size)
                num_spoiled += needed
                assert not runner.steps.tables.on_host_SW[batch.slots_B[row], :needed].any(), "behind the window"
            return step

        runner.steps.submit = spoil_and_submit  # type: ignore[method-assign]
        with torch.inference_mode():
            assert_equals_reference(path, llm, prompts_of(llm))
        assert num_spoiled > 0 or platform_name == "npu"


@pytest.mark.full("padding knows no windows; it stays without (test_scheduling_changes_nothing.py), and on npu with")
def test_padded_decode_equals_unpadded(checkpoint: Any, platform_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform_name != "cpu":
        pytest.skip("elsewhere the graphs themselves are compared")
    from npu_runner.platforms.cpu.platform import CpuPlatform

    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: UncompiledGraphs())
    path: Path = checkpoint("qwen3", sliding_window=10, **SOME_SLIDE["qwen3"])
    with LLM(path, platform=platform_name, graph_mode="reduce-overhead", graph_batch_sizes=(2, 5), **SMALL) as llm:
        assert_equals_reference(path, llm, prompts_of(llm))


@pytest.mark.full("two ranks start; ranks know no windows, and stay without")
@pytest.mark.ranks
def test_two_ranks_equal_one(checkpoint: Any, platform_name: str) -> None:
    """Of layers that differ; mistral is in test_tensor_parallel.py."""
    need_devices(platform_name)
    path: Path = checkpoint("qwen3", sliding_window=10, **SOME_SLIDE["qwen3"])

    def run(ranks: int) -> list[list[int]]:
        with LLM(path, platform=platform_name, tensor_parallel_size=ranks, max_num_batched_tokens=24,
                 block_size=default_block_size(platform_name, 4), **SMALL) as llm:
            return [output.token_ids for output in llm.generate(prompts_of(llm), greedy())]

    assert run(2) == run(1)


@pytest.mark.parametrize("boundary", range(5))
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_which_layers_slide_is_what_transformers_says(model_type: str, boundary: int, checkpoint: Any,
                                                      tmp_path: Path) -> None:
    from transformers import AutoConfig

    source: Path = checkpoint(model_type)
    path = spoiled(lambda base: source, tmp_path, use_sliding_window=True, sliding_window=8, max_window_layers=boundary,
                   layer_types=None)
    types = AutoConfig.from_pretrained(path).layer_types
    windows = [layer.sliding_window for layer in pick_strategy(path).read_config().attention_layers]
    assert windows == [8 if kind == SLIDING else None for kind in types]
