"""bfloat16 and float16: as near to float32 as transformers comes in the same type.

Tokens may differ where two are almost equally probable, so transformers is shown our tokens and the log probabilities
of every step are compared. Ours may be FACTOR times as far from float32 as transformers' own: the order of the
additions differs, and the worst of a few thousand numbers is compared.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner import LLM
from npu_runner.layers.linear import OutputPart
from npu_runner.layers.norm import PartsRMSNorm, RMSNorm
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.platforms import pick_platform
from npu_runner.strategies.olmo2 import Olmo2Layer
from tests.families import sees_images
from tests.full_set import only_full
from tests.oracle import reference
from tests.oracle.family_prompts import TEXTS
from tests.oracle.image_prompts import make_prompts
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, greedy, recorded_logits

FACTOR = 1.5
# Half a unit in the last place of the type's mantissa: less than this no computation in it can err.
LEAST_ERROR = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
# Kernels of vendors may take some head dims only: 64 is one that all of them take.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, {}) for name in ("llama", "olmo2", "qwen2", "qwen3", "qwen3_vl", "qwen3_5", "qwen3_5_text")},
    **{name: (name, {}, {}) for name in ("paddleocr_vl", "glm_ocr", "glm4v")},
    # Of experts, rounding may choose others.
    "qwen3_next, dense": ("qwen3_next", {"mlp_only_layers": [0, 1, 2, 3]}, {}),
    "qwen3, head dim 64": ("qwen3", {"head_dim": 64}, {}),
    # Steps that sample nothing are not waited for: their inputs and plans must not overtake each other.
    "qwen3, head dim 64, chunks": ("qwen3", {"head_dim": 64}, {"max_num_batched_tokens": 5}),
}
FAST = [("olmo2", "bfloat16"), ("paddleocr_vl", "bfloat16"), ("qwen3_5", "bfloat16"),
        ("qwen3, head dim 64, chunks", "bfloat16"), ("qwen3", "float16")]
"""A norm that rounds twice, a tower, states, chunks, and the other type."""


@lru_cache(maxsize=2)
def half_model(path: Path, dtype: torch.dtype) -> Any:
    return type(reference.load_model(path)).from_pretrained(path, dtype=dtype).eval()


@torch.inference_mode()
def logprobs_of(model: Any, inputs: dict[str, Tensor], num_steps: int) -> Tensor:
    """(num_steps, V): what each of the last num_steps tokens was drawn from."""
    if "pixel_values" in inputs:
        inputs = {**inputs, "pixel_values": inputs["pixel_values"].to(model.dtype)}
    logits = model(**inputs).logits[0, -num_steps - 1 : -1]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize(("name", "dtype"), [
    *FAST, *only_full("every model in both types; one of each kind of layer stays",
                      *(case for case in itertools.product(MODELS, LEAST_ERROR) if case not in FAST))])
def test_as_near_to_float32_as_transformers(name: str, dtype: str, checkpoint: Any, platform_name: str) -> None:
    model_type, changes, settings = MODELS[name]
    path: Path = checkpoint(model_type, **changes)
    ours_worst = theirs_worst = 0.0
    with LLM(path, platform=platform_name, **{**SMALL, **settings, "dtype": dtype}) as llm:
        if sees_images(model_type):
            prompts, images = make_prompts(llm, ["t", "t4t", "0t1t2t3"])
        else:
            prompts = [llm.engine.processor.from_text(text) for text in TEXTS]
            images = [[] for _ in prompts]
        for prompt, shown in zip(prompts, images, strict=True):
            with recorded_logits(llm) as steps:
                (output,) = llm.generate([prompt], greedy())
            ours = torch.cat([step for step in steps if len(step)]).log_softmax(-1)
            inputs = reference.model_inputs(path, [*prompt.token_ids, *output.token_ids], shown)
            exact = logprobs_of(reference.load_model(path), inputs, MAX_NEW_TOKENS)
            theirs = logprobs_of(half_model(path, getattr(torch, dtype)), inputs, MAX_NEW_TOKENS)
            ours_worst = max(ours_worst, (ours - exact).abs().max().item())
            theirs_worst = max(theirs_worst, (theirs - exact).abs().max().item())
            chosen = exact.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
            # The token we took is the most probable one, or cannot be told from it in this type.
            assert (exact.max(-1).values - chosen).max().item() <= 2 * (ours - exact).abs().max().item()
    print(f"{model_type} {dtype}: log probabilities off by {ours_worst:.4f}, transformers' by {theirs_worst:.4f}")
    assert LEAST_ERROR[dtype] < ours_worst < FACTOR * theirs_worst, f"{ours_worst:.4f}, theirs {theirs_worst:.4f}"


def test_the_norm_of_olmo2_is_rounded_where_transformers_rounds_it() -> None:
    """To the bit: rounded before the weight as well, a quarter of the values are others."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(7, 64, generator=generator).to(torch.bfloat16)
    reference = Olmo2RMSNorm(64, 1e-6).to(torch.bfloat16)
    reference.weight.data.copy_(torch.rand(64, generator=generator) + 0.5)
    context = LayerContext(pick_platform("cpu").make_ops(), None, TensorParallel(), torch.bfloat16,  # type: ignore[arg-type]
                           torch.device("cpu"))
    alone = Olmo2Layer.norm_class(64, 1e-6, context)
    parts = PartsRMSNorm([OutputPart("norm", 64, 0, 64)], 1e-6, context)
    for norm in (alone, parts):
        norm.weight.data.copy_(reference.weight)
    assert torch.equal(alone(x_TD), reference(x_TD))
    assert torch.equal(parts(x_TD)[0], reference(x_TD))
    once_more = RMSNorm(64, 1e-6, context)
    once_more.weight.data.copy_(reference.weight)
    assert not torch.equal(once_more(x_TD), reference(x_TD))


def test_the_norm_of_the_others_is_too() -> None:
    """To the bit, alone and behind a sum: squares that are added in 16 bits, and a weight in float32, give others."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    generator = torch.Generator().manual_seed(1)
    x_TD, y_TD = torch.randn(2, 7, 640, generator=generator).to(torch.bfloat16)
    reference = Qwen3RMSNorm(640, 1e-6).to(torch.bfloat16)
    reference.weight.data.copy_(torch.rand(640, generator=generator) + 0.5)
    ops = pick_platform("cpu").make_ops()
    assert torch.equal(ops.rms_norm(x_TD, reference.weight, 1e-6), reference(x_TD))
    normed_TD, total_TD = ops.add_rms_norm(x_TD, y_TD, reference.weight, 1e-6)
    assert torch.equal(total_TD, x_TD + y_TD)
    assert torch.equal(normed_TD, reference(x_TD + y_TD))
