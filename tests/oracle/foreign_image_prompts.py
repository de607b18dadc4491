"""Prompts with images for families that only transformers knows: ours, and the same ones as transformers' processor and
model take them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from npu_runner import LLM
from npu_runner.request.prompt_inputs import PromptInputs
from tests.oracle.image_checkpoints import ImageCheckpoint
from tests.oracle.running import LOGITS_TOLERANCE, greedy, recorded_logits, runner_of

Part = str | Image.Image


@dataclass(frozen=True)
class Asked:
    """One prompt: as we prepare it, and what transformers' processor makes of the same text and images."""

    prompt: PromptInputs
    inputs: dict[str, Any]


def messages_of(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts]}]


def ask(checkpoint: ImageCheckpoint, llm: LLM, parts: Sequence[Part]) -> Asked:
    """Asserts that both have the same token ids."""
    prompt = llm.engine.processor(messages_of(parts))
    assert prompt.text is not None
    inputs = checkpoint.inputs(prompt.text, [part for part in parts if not isinstance(part, str)])
    assert prompt.token_ids == inputs["input_ids"][0].tolist()
    return Asked(prompt, inputs)


def assert_equals_transformers(path: Path, llm: LLM, asked: Sequence[Asked], *, num_tokens: int = 6,
                               tolerance: float = LOGITS_TOLERANCE) -> None:
    """All prompts together give, each, transformers' tokens; the last one alone has its logits for each token. Several
    ranks are compared by tokens alone."""
    expected = [_generate(path, each.inputs, num_tokens) for each in asked]
    together = llm.generate([each.prompt for each in asked], greedy(num_tokens))
    for index, (output, (tokens, _)) in enumerate(zip(together, expected, strict=True)):
        assert output.token_ids == tokens, f"prompt {index} of {len(asked)}"
    tokens, logits = expected[-1]
    if llm.config.parallel.tensor_parallel_size > 1:
        return
    with recorded_logits(llm) as steps:
        (alone,) = llm.generate([asked[-1].prompt], greedy(num_tokens))
    assert alone.token_ids == tokens
    assert_close(torch.cat([step for step in steps if len(step)]), logits, tolerance)


@torch.inference_mode()
def assert_all_rows_equal(path: Path, llm: LLM, asked: Asked, *, tolerance: float = LOGITS_TOLERANCE) -> None:
    """Logits of all tokens of a prompt that is not cached. A mask over an image may leave the last row as it is."""
    model: Any = runner_of(llm).model
    chunks: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda _, args, hidden_TD: chunks.append(hidden_TD.clone()))
    llm.generate([asked.prompt], greedy(1))
    hook.remove()
    num_tokens = len(asked.prompt.token_ids)
    ours = model.compute_logits(torch.cat(chunks)[:num_tokens]).float().cpu()
    assert len(ours) == num_tokens, "the prompt must not be cached"
    whole = load(path)
    assert_close(ours, whole(**_accepted(whole, asked.inputs), use_cache=False).logits[0].float(), tolerance)


def assert_close(ours: torch.Tensor, logits: torch.Tensor, tolerance: float) -> None:
    assert ours.shape == logits.shape
    worst = (ours - logits).abs().max().item()
    assert worst < tolerance * logits.abs().max().item(), f"logits differ by {worst:.2e}"


@torch.inference_mode()
def _generate(path: Path, inputs: dict[str, Any], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens past any EOS, and the logits that each was taken from."""
    whole = load(path)
    output = whole.generate(**_accepted(whole, inputs), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
                            do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None,
                            pad_token_id=0)
    return output.sequences[0, inputs["input_ids"].shape[1]:].tolist(), torch.cat(output.logits).float()


def load(path: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    if path not in _LOADED:
        _LOADED.clear()
        _LOADED[path] = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    return _LOADED[path]


_LOADED: dict[Path, Any] = {}


def _accepted(whole: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    names = {name for module in (whole, whole.base_model) for name in inspect.signature(module.forward).parameters}
    return {name: value for name, value in inputs.items() if name in names}
