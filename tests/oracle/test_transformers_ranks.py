"""Two ranks of a network of transformers give what transformers gives, token for token and in all rows of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM, SamplingParams
from tests.full_set import only_full
from tests.oracle import reference
from tests.oracle.foreign_checkpoints import SERVED, make_foreign_checkpoint, small_config
from tests.oracle.running import FEW_TOKENS, SMALL, greedy, need_devices

TEXTS = ["which", "which of the two pictures shows a circle?", "a b c d e f g " * 20, "colour " * 90]
PROMPT = list(range(203, 3, -1))
"""Two chunks."""
TOLERANCE = 1e-4
"""Of a log probability."""
# One family for each mechanism.
MECHANISMS = {
    "phi3": "q, k and v in one linear, in a row; gate and up in one",
    "olmo3": "norms over all heads",
    "mixtral": "experts, renamed",
    "gpt_neox": "q, k and v in one linear, by heads; a renamed head",
    "gpt2": "linears that lie as (inputs, outputs), and an embedding that is the head",
}
FEW = ("phi3", "mixtral")
REFUSED: dict[str, str] = {}


pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _two_devices(platform_name: str) -> None:
    need_devices(platform_name)


@torch.inference_mode()
def assert_ranks_equal_transformers(path: Path, platform_name: str, num_ranks: int = 2, *, oracle: Path | None = None,
                                    **settings: Any) -> None:
    """`oracle`: the folder that transformers loads, where it is another one."""
    oracle = oracle or path
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20, ignore_eos=True)
    with LLM(path, platform=platform_name, max_num_batched_tokens=128, tensor_parallel_size=num_ranks,
             **{**SMALL, **settings}) as llm:
        (output,) = llm.generate([PROMPT], scored)
        prompts = [llm.engine.processor.from_text(text) for text in TEXTS]
        answers = [each.token_ids for each in llm.generate(prompts, greedy(FEW_TOKENS))]
    model = reference.load_model(oracle)
    expected_TV = model(torch.tensor([PROMPT])).logits[0, :-1].float().log_softmax(-1)
    assert output.prompt_logprobs is not None
    for place, expected_V in enumerate(expected_TV, start=1):
        position = output.prompt_logprobs[place]
        assert position is not None
        for each in (position.token, *position.top):
            assert abs(each.logprob - expected_V[each.token_id].item()) < TOLERANCE, f"row {place}"
    assert answers == [reference.generate(oracle, prompt.token_ids, [], max_new_tokens=FEW_TOKENS)[0]
                       for prompt in prompts]


@pytest.mark.full("starts two processes; the cut of a vocabulary that is even stays")
def test_a_vocabulary_that_the_ranks_do_not_divide(tmp_path: Path, platform_name: str) -> None:
    reference.load_model.cache_clear()
    path = make_foreign_checkpoint(tmp_path, "phi3", **{**small_config("phi3"), "vocab_size": 513})
    assert_ranks_equal_transformers(path, platform_name)


@pytest.mark.parametrize("model_type", [*FEW, *only_full(
    "each family starts two processes and takes most of a minute; packed linears and experts stay",
    *sorted((SERVED | set(MECHANISMS)) - set(FEW)))])
def test_two_ranks_equal_transformers(model_type: str, tmp_path: Path, platform_name: str) -> None:
    reference.load_model.cache_clear()
    path = make_foreign_checkpoint(tmp_path, model_type, **small_config(model_type))
    if model_type in REFUSED:
        with pytest.raises(Exception, match=REFUSED[model_type]):
            LLM(path, platform=platform_name, tensor_parallel_size=2, **SMALL)
    else:
        assert_ranks_equal_transformers(path, platform_name)
