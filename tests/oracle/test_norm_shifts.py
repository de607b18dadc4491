"""Shifts of norms in folders of ModelSlim: what is stored as a norm's bias is added behind it.

The oracle is transformers' model in float32 with the weights that the format defines. Each norm adds its shift, and
each linear the bias that its quant_bias holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from npu_runner import LLM, SamplingParams
from scripts.quantised.writing import quantise
from tests.oracle.quantised_folders import one_range, read_all
from tests.oracle.running import LOGITS_TOLERANCE, SMALL

NORMS = ("input_layernorm", "post_attention_layernorm")
BEHIND = {"input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
          "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")}


def shifted(plain: Path, folder: Path, name: str, *, copies: bool = False) -> Path:
    """A quantised copy whose norms are shifted. Linears of static inputs take a part of it back, as ModelSlim's do."""
    quantise(plain, folder, name, ranges=one_range(plain))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(4)
    for norm in sorted(key.removesuffix(".weight") for key in tensors if key.endswith("norm.weight")):
        layer, _, kind = norm.rpartition(".")
        if kind not in NORMS and norm != "model.norm":
            continue
        weight = tensors[f"{norm}.weight"]
        shift = torch.randn(weight.shape, generator=generator) / 2
        tensors[f"{norm}.bias"] = shift.to(weight.dtype)
        if copies:
            tensors |= {f"{norm}.module.{each}": tensors[f"{norm}.{each}"].clone() for each in ("weight", "bias")}
        for linear in BEHIND.get(kind, ()):
            module = f"{layer}.{linear}"
            if f"{module}.quant_bias" in tensors:
                back = torch.randint(-3000, 3000, tensors[f"{module}.quant_bias"].shape, generator=generator)
                tensors[f"{module}.quant_bias"] += back.int()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def add_shifts(model: nn.Module, found: dict[str, Tensor]) -> None:
    """Have the norms of transformers' model add what `found` has for them."""
    for name, module in model.named_modules():
        if f"{name}.shift" in found:
            shift = found[f"{name}.shift"]
            module.register_forward_hook(lambda _, __, out, shift=shift: out + shift.to(out.dtype))


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
