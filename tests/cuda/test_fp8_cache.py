"""Models whose keys and values are kept in e4m3: transformers with a cache that rounds them, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM
from tests.cuda.paged_work import need_fp8
from tests.oracle import reference
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, greedy

TEXTS = ["a b a b a", "which " * 60, "the picture of a circle " * 7]


def rounding_cache() -> Any:
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *arguments: Any, **more: Any) -> Any:
            keys, values = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key_states, value_states))
            return super().update(keys, values, *arguments, **more)

    return Rounded()


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
