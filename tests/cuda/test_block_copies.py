"""The kernel that copies blocks of the KV cache: its bytes beside torch's, blocks far apart, one launch; and an engine
whose FP8 cache copies partly shared blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.profiler import device_profile
from npu_runner import LLM, SamplingParams
from npu_runner.request.prompt_inputs import PromptInputs
from tests.cuda.conftest import INTERPRETED
from tests.cuda.paged_work import need_fp8
from tests.oracle.block_copies import assert_copies
from tests.oracle.running import SMALL, runner_of


def make_attention(block_size: int = 16) -> Any:
    from npu_runner.platforms.cuda.attention.backend import TritonAttention

    return TritonAttention(num_heads=2, num_kv_heads=2, head_dim=64, block_size=block_size, dtype=torch.bfloat16)


# Blocks that a program copies whole, and blocks of several programs, the last one with a rest.
@pytest.mark.parametrize(("block_size", "head_dim"), [(1, 16), (16, 64), (48, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_bytes_are_those_that_torch_copies(device: torch.device, dtype: torch.dtype, block_size: int,
                                           head_dim: int) -> None:
    for seed in range(2 if INTERPRETED else 30):
        assert_copies(make_attention(block_size), device, dtype, seed, block_size=block_size, head_dim=head_dim)


def test_blocks_lie_more_than_two_to_the_31st_words_apart(device: torch.device) -> None:
    """Memory of the CPU that is not written takes none."""
    words = torch.empty(3, 20_000, 64, 2, 1024, dtype=torch.bfloat16, device=device)
    assert words.view(torch.int32).stride(0) * 2 > 2**31
    words[:, :2] = torch.arange(3, device=device).view(3, 1, 1, 1, 1)
    far = words.shape[1] - 1
    make_attention(64).copy_blocks(words, words, np.array([(1, far), (0, far - 1)], dtype=np.int32))
    for layer in range(3):
        assert bool((words[layer, far - 1 :] == layer).all())
        assert bool((words[layer, :2] == layer).all())


@pytest.mark.skipif(INTERPRETED, reason="nothing is launched")
def test_a_step_copies_with_one_launch(device: torch.device) -> None:
    cache = torch.zeros(5, 9, 16, 2, 64, dtype=torch.bfloat16, device=device)
    pairs = np.array([(1, 2), (3, 4), (3, 5)], dtype=np.int32)
    make_attention().copy_blocks(cache, cache, pairs)  # the first one compiles
    with device_profile("cuda") as profile:
        make_attention().copy_blocks(cache, cache, pairs)
    assert {name: count for name, count in profile.calls.items() if "Memcpy" not in name} == {"copy_blocks": 1}


@pytest.mark.parametrize("mode", ["eager", "reduce-overhead"])
@pytest.mark.parametrize("model_type", ["qwen3", "mistral"])
def test_answers_over_an_fp8_cache_that_copies_blocks_are_those_of_prompts_computed_apart(
    model_type: str, mode: str, checkpoint: Any, platform_name: str, device: torch.device
) -> None:
    """Four answers in the step of their prompt, then prompts that part from it within a block, or end there. Nothing is
    compiled for the first copy."""
    need_fp8(device)
    path: Path = checkpoint(model_type)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, n=4)
    found, num_copies = [], []
    for is_shared in (False, True):
        with LLM(path, platform=platform_name, block_size=16, kv_cache_dtype="fp8", enable_prefix_caching=is_shared,
                 graph_mode=mode, kv_cache_bytes=1 << 22, max_num_batched_tokens=1024, **SMALL) as llm:
            assert llm.engine.info.description["kv_cache_dtype"] == "float8_e4m3fn"
            steps, runner = runner_of(llm).steps, runner_of(llm)
            copy, seen = steps.copy_blocks, []
            assert copy is not None
            steps.copy_blocks = lambda pairs, copy=copy, seen=seen: (seen.append(len(pairs)), copy(pairs))
            ids = llm.engine.processor.from_text("which of the pictures shows a circle " * 3).token_ids
            outputs = llm.generate([PromptInputs(ids)], params)
            for cut in (1, 3, 9):
                outputs += llm.generate([PromptInputs([*ids[:-cut], *range(20, 20 + more)]) for more in (0, 2)], params)
            found.append([[completion.token_ids for completion in output.completions] for output in outputs])
            num_copies.append(sum(seen))
            assert not [name for name in runner._compiled_late() if "copy_blocks" in name]
    assert found[0] == found[1]
    assert num_copies[0] == 0
    assert num_copies[1] >= 3, "the further answers of the first prompt, at least"
