"""Shifts of norms in folders of ModelSlim: what is stored as a norm's bias is added behind it.

The oracle is transformers' model in float32 with the weights that the format defines. Each norm adds its shift, and
each linear the bias that its quant_bias holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npu_runner import LLM, SamplingParams
from tests.oracle.quantised_folders import read_all
from tests.oracle.running import LOGITS_TOLERANCE, SMALL
from tests.oracle.shifted_norms import add_shifts, shifted


def reference(plain: Path, folder: Path) -> nn.Module:
    """transformers' model of `plain` with the weights of `folder`."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    found = read_all(folder)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.bias" in found:
            module.bias = nn.Parameter(found[f"{name}.bias"].float())
    add_shifts(model, found)
    left = model.load_state_dict({name: tensor.float() for name, tensor in found.items()}, strict=False)
    assert all(name.endswith(".shift") for name in left.unexpected_keys)
    return model


def logprobs(llm: LLM, prompt: list[int]) -> Tensor:
    """Of the last token of `prompt`, for the whole vocabulary."""
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
    top = output.outputs[0].logprobs[0]
    return torch.tensor([[token, entry.logprob] for token, entry in top.items()])


@pytest.mark.parametrize("name", ["modelslim-w8a8", "modelslim-w8a8-dynamic"])
def test_a_shift_is_added_behind_the_norm(name: str, checkpoint: Any, tmp_path: Path) -> None:
    plain: Path = checkpoint("qwen3")
    folder = shifted(plain, tmp_path / "shifted", name, copies=True)
    prompt = [5, 9, 31, 77, 12]
    with torch.inference_mode():
        expected = reference(plain, folder)(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    with LLM(folder, platform="cpu", **SMALL) as llm:
        found = logprobs(llm, prompt)
    ours, theirs = found[:, 1], expected[found[:, 0].long()]
    assert (ours - theirs).abs().max() <= LOGITS_TOLERANCE * expected.abs().max()
