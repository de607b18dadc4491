"""Models whose keys and values are kept in e4m3: transformers with a cache that rounds them, token for token; with a
checkpoint's scales, in float64.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npu_runner import LLM
from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.request.prompt_inputs import PromptInputs
from tests.cuda.paged_work import need_fp8, need_hopper
from tests.cuda.small_model import COUNT, LIMIT, PROMPT, SIZES
from tests.oracle import reference
from tests.oracle.fp8_reference import LARGEST, nearest_fp8
from tests.oracle.rounded_models import rounded_models
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, greedy, recorded_logits
from tests.oracle.scaled_caches import enlarge, scaled_checkpoint, scales_of

TEXTS = ["a b a b a", "which " * 60, "the picture of a circle " * 7]


def rounding_cache(scales_of: Callable[[int], tuple[float, float]] = lambda layer: (1.0, 1.0),
                   seen: list[float] | None = None) -> Any:
    """`scales_of` keys and values of a layer; `seen`: takes the least of their largest magnitudes in a call."""
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *arguments: Any, **more: Any) -> Any:
            states = (key_states, value_states)
            if seen is not None:
                seen.append(min(float(x.abs().max()) for x in states))
            keys, values = (rounded(x, scale) for x, scale in zip(states, scales_of(layer_idx), strict=True))
            return super().update(keys, values, layer_idx, *arguments, **more)

    return Rounded()


def rounded(x: Tensor, scale: float) -> Tensor:
    if x.dtype == torch.float64:
        return nearest_fp8(x / scale) * scale
    whole = (x.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (whole.float() * scale).to(x.dtype)


@pytest.mark.parametrize("mode", ["eager", "reduce-overhead"])
@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "qwen3_moe"])
def test_tokens_are_those_of_a_cache_that_rounds(model_type: str, mode: str, checkpoint: Any, platform_name: str,
                                                 device: torch.device) -> None:
    need_fp8(device)
    path: Path = checkpoint(model_type)
    settings: dict[str, Any] = {"platform": platform_name, "kv_cache_dtype": "fp8", "graph_mode": mode,
                                "kv_cache_bytes": 1 << 20, **SMALL}
    with LLM(path, **settings) as llm, LLM(path, **settings | {"kv_cache_dtype": "auto"}) as wide:
        assert llm.engine.info.num_blocks >= 2 * (wide.engine.info.num_blocks - 1)
        assert llm.engine.info.description["kv_cache_dtype"] == "float8_e4m3fn"
        prompts = [llm.engine.processor.from_text(text) for text in TEXTS]
        for prompt, output in zip(prompts, llm.generate(prompts, greedy()), strict=True):
            expected = reference.load_model(path).generate(
                **reference.model_inputs(path, prompt.token_ids, ()), max_new_tokens=MAX_NEW_TOKENS, do_sample=False,
                min_new_tokens=MAX_NEW_TOKENS, eos_token_id=None, pad_token_id=0, past_key_values=rounding_cache())
            assert output.token_ids == expected[0, len(prompt.token_ids):].tolist()


@torch.inference_mode()
def logits(model: nn.Module, tokens: list[int], seen: list[float] | None = None) -> Tensor:
    """(count, V), of each token that was chosen, over a cache with `scales_of`."""
    whole = model(torch.tensor([PROMPT + tokens[:-1]]), use_cache=True, past_key_values=rounding_cache(scales_of, seen))
    return whole.logits[0, len(PROMPT) - 1:]


@pytest.mark.parametrize("mode", ["eager", "reduce-overhead"])
def test_scales_of_the_checkpoint_are_used(mode: str, checkpoint: Any, device: torch.device, tmp_path: Path) -> None:
    """FP8 weights, and keys and values that saturate without scales: no further from float64 than twice what plain
    bfloat16 is. With the scales of keys and values exchanged it is further."""
    need_hopper(device)  # there FP8 is multiplied
    plain = shutil.copytree(checkpoint("qwen3", **SIZES), tmp_path / "plain")
    enlarge(plain)
    right = scaled_checkpoint(plain, tmp_path / "right", num_layers=SIZES["num_hidden_layers"])
    swapped = scaled_checkpoint(plain, tmp_path / "swapped", num_layers=SIZES["num_hidden_layers"], is_swapped=True)
    with open_weights(right, read_quantization(right)) as reader:
        exact, in_bfloat16 = rounded_models(plain, reader)
    distances = []
    for folder in (right, swapped):
        with LLM(folder, platform="cuda", dtype="bfloat16", max_num_seqs=4, max_model_len=256, graph_mode=mode,
                 kv_cache_bytes=1 << 26) as llm, recorded_logits(llm) as steps:
            (output,) = llm.generate([PromptInputs(PROMPT)], greedy(COUNT))
            ours = torch.cat([step[:1] for step in steps if len(step)][:COUNT])
            assert llm.engine.describe()["kv_cache_dtype"] == "float8_e4m3fn", "auto takes the scheme"
        seen: list[float] = []
        expected = logits(exact, output.token_ids, seen)
        assert min(seen) > 2 * LARGEST
        distances.append([float((each.double() - expected).abs().max())
                          for each in (ours, logits(in_bfloat16, output.token_ids))])
    assert distances[0][0] <= LIMIT * distances[0][1], distances
    assert distances[1][0] > LIMIT * distances[1][1], distances
