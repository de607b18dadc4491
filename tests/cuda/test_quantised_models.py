"""Checkpoints whose weights are multiplied as they are stored, on a GPU: eager and captured logits are no further from
float64 than twice what transformers' model with the same formula in plain bfloat16 is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npu_runner import LLM
from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.formats.rounding import TO_FP8, TO_INT8, RoundingReader
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.request.prompt_inputs import PromptInputs
from scripts.quantised.writing import quantise
from tests.cuda.small_model import COUNT, LIMIT, PROMPT, SIZES
from tests.oracle.rounded_models import rounded_models
from tests.oracle.running import greedy, recorded_logits, runner_of

FORMS = {"w8a8": "int8", "fp8-dynamic": "fp8", "fp8-tensor": "fp8", "fp8-block": "fp8_blocks", "int8": "int8",
         "fp8": "fp8",
         **dict.fromkeys(("w4a16", "w4a16-asym", "w8a16", "awq", "gptq", "gptq-int8", "modelslim-w4a16",
                          "modelslim-w8a16"), "grouped")}
MADE = {"int8": TO_INT8, "fp8": TO_FP8}
"""By the setting `quantization`, which makes them of 16 bits."""
MODES: list[dict[str, Any]] = [{"graph_mode": "eager"}, {"graph_mode": "reduce-overhead"}]


@pytest.fixture(autouse=True)
def on_a_gpu(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("quantised matmuls are for Hopper")


@torch.inference_mode()
def logits(model: nn.Module, tokens: list[int]) -> Tensor:
    """(count, V), of each token that was chosen."""
    return model(torch.tensor([PROMPT + tokens[:-1]])).logits[0, len(PROMPT) - 1:]


def forms_of(llm: LLM) -> set[str | None]:
    layers = runner_of(llm).model.decoder.layers
    return {linear.form for layer in layers for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj,
                                                           layer.mlp.gate_up_proj, layer.mlp.down_proj)}


def forms_of_experts(llm: LLM) -> set[str | None]:
    return {layer.mlp.experts.form for layer in runner_of(llm).model.decoder.layers}


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_as_near_as_plain_torch(name: str, checkpoint: Any, tmp_path: Path) -> None:
    assert_logits(name, checkpoint("qwen3", **SIZES), {FORMS[name]}, forms_of, tmp_path)


@pytest.mark.parametrize(("name", "form"), [("w8a8", "int8_experts"), ("fp8-block", "fp8_block_experts"),
                                            ("int8", "int8_experts"), ("fp8", "fp8_block_experts")])
def test_logits_of_experts_are_as_near_as_plain_torch(name: str, form: str, checkpoint: Any, tmp_path: Path) -> None:
    """Each token sees all experts: rounding would choose others."""
    path = checkpoint("qwen3_moe", **SIZES, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=4)
    assert_logits(name, path, {form}, forms_of_experts, tmp_path)


def assert_logits(name: str, path: Path, forms: set[str | None], forms_of: Callable[[LLM], set[str | None]],
                  tmp_path: Path) -> None:
    settings: dict[str, Any] = {}
    if name in MADE:
        quantised, settings = path, {"quantization": name}
    else:
        quantised = tmp_path / name
        quantise(path, quantised, name)
    found = []
    for mode in MODES:
        with LLM(quantised, platform="cuda", dtype="bfloat16", max_num_seqs=4, max_model_len=256,
                 kv_cache_bytes=1 << 26, **mode, **settings) as llm, recorded_logits(llm) as steps:
            assert forms_of(llm) == forms
            (output,) = llm.generate([PromptInputs(PROMPT)], greedy(COUNT))
            found.append((output.token_ids, torch.cat([step[:1] for step in steps if len(step)][:COUNT])))
            assert "multiplied as" in llm.engine.describe()["quantization"]
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(open_weights(quantised, read_quantization(quantised)))
        if name in MADE:
            names = {each for each in reader.names if "_proj" in each}
            of_experts = {each for each in names if name == "fp8" and ".experts." in each}
            reader = RoundingReader(reader, names, target=MADE[name], in_blocks=of_experts)
        exact, plain = rounded_models(path, reader)
    for tokens, ours in found:
        expected = logits(exact, tokens)
        distances = [float((each.double() - expected).abs().max()) for each in (ours, logits(plain, tokens))]
        assert distances[0] <= LIMIT * distances[1], f"{distances[0]:.3e} from float64, plain torch {distances[1]:.3e}"


def test_which_forms_a_dtype_has() -> None:
    from npu_runner.platforms import find_platform

    forms_with = find_platform("cuda").forms_with
    all_forms = "int8", "int8_experts", "fp8", "fp8_blocks", "fp8_block_experts", "grouped"
    assert forms_with("bfloat16", "eager") == all_forms
    assert forms_with("float16", "eager") == ("int8", "int8_experts", "grouped")
    assert forms_with("float32", "eager") == forms_with("bfloat16", "max-autotune") == ()
