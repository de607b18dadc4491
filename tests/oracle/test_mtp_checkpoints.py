"""More checkpoints with a head for multi-token prediction: videos in prompts, whole experts on ranks, quantised ones,
and one whose settings never draft.

The oracle is that of test_mtp.py: the head in float64, and the answers of plain steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_runner import LLM
from npu_runner.request.prompt_inputs import PromptInputs
from scripts.quantised.writing import quantise
from tests.oracle.mtp_drafts import (
    GREEDY,
    LONG,
    QUIET,
    assert_drafts_are_the_heads,
    assert_ranks_draft_as_one,
    mtp,
    recorded_drafts,
    run,
)
from tests.oracle.mtp_reference import with_head
from tests.oracle.quantised_folders import by_us
from tests.oracle.running import SMALL, need_devices, runner_of
from tests.oracle.video_prompts import make_prompts
from tests.videos import moving_frames, video_of

TEXTS = {f"r-{number}": PromptInputs(LONG[number : number + length]) for number, length in enumerate((5, 90, 40))}


@pytest.mark.full("a family with a tower and videos; images stay in test_mtp, and videos without a head")
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_videos_are_in_what_the_head_reads(model_type: str, checkpoint: Any, tmp_path: Path) -> None:
    """Beside images, before and behind text, the same one twice; chunks begin and end inside."""
    path = with_head(checkpoint(model_type), tmp_path / "head")
    videos = [video_of(moving_frames(30)), video_of(moving_frames(45, 48, 90, seed=1))]
    # The oracle counts placeholders: an answer of random weights must have none.
    placeholders = json.loads((path / "config.json").read_text())
    params = GREEDY.replace(logit_bias={placeholders[f"{kind}_token_id"]: -100.0 for kind in ("image", "video")})
    with LLM(path, platform="cpu", max_num_batched_tokens=64, **SMALL) as llm:
        found, seen = make_prompts(llm, ["0tp1p", "pt0", "t01", "00t"], videos)
        prompts = {f"r-{number}": prompt for number, prompt in enumerate(found)}
        plain = run(llm, prompts, params)
    assert all(span.num_tokens > 1 for prompt in found for span in prompt.spans)
    assert any(span.start // 64 < (span.start + span.num_tokens - 1) // 64 for prompt in found for span in prompt.spans)
    with LLM(path, platform="cpu", max_num_batched_tokens=64, **mtp(2), **SMALL) as llm, recorded_drafts(llm) as drafts:
        outputs = run(llm, prompts, params)
    assert {name: each.token_ids for name, each in outputs.items()} == {
        name: each.token_ids for name, each in plain.items()}
    assert_drafts_are_the_heads(path, drafts, outputs, {
        name: (prompt, shown) for (name, prompt), shown in zip(prompts.items(), seen, strict=True)})


@pytest.mark.full("two ranks start; whole experts stay without a head, and heads with experts on one rank")
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", "qwen3_next"])
@pytest.mark.ranks
def test_ranks_with_whole_experts_draft_as_one(model_type: str, checkpoint: Any, tmp_path: Path,
                                               platform_name: str) -> None:
    """Of seven experts the last rank has one less than the first, of the head's layer too."""
    need_devices(platform_name)
    path = with_head(checkpoint(model_type, num_experts=7), tmp_path / "head", quiet=QUIET)
    assert_ranks_draft_as_one(path, platform=platform_name, tensor_parallel_size=2, enable_expert_parallel=True)


def test_a_quantised_head_drafts_as_its_weights_say(checkpoint: Any, tmp_path: Path) -> None:
    """Its linears, `fc` too, are quantised as the decoder's are."""
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head")
    quantise(path, tmp_path / "quantised", "fp8-block", group_size=8)
    assert_drafts_are_those_of(tmp_path / "quantised", path, tmp_path)


@pytest.mark.full("other formats, experts, and heads that are left as they were; one quantised head stays")
@pytest.mark.parametrize(("model_type", "name"), [("qwen3_5_text", "w4a16"), ("qwen3_5_moe_text", "fp8-block"),
                                                  ("qwen3_5_text", "modelslim-w8a8-dynamic")])
@pytest.mark.parametrize("is_head_quantised", [True, False])
def test_quantised_checkpoints_with_a_head(model_type: str, name: str, is_head_quantised: bool, checkpoint: Any,
                                           tmp_path: Path) -> None:
    path = with_head(checkpoint(model_type), tmp_path / "head")
    quantise(path if is_head_quantised else checkpoint(model_type), tmp_path / "quantised", name, group_size=8)
    if not is_head_quantised:
        add_head_in_16_bits(tmp_path / "quantised", path)
    assert_drafts_are_those_of(tmp_path / "quantised", path, tmp_path)


def add_head_in_16_bits(quantised: Path, source: Path) -> None:
    """As published checkpoints have it: in bfloat16 and in a file of its own. config.json names what is not quantised;
    ModelSlim's description knows nothing of it."""
    head = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(source / "model.safetensors").items()
            if name.startswith("mtp.")}
    save_file(head, quantised / "mtp.safetensors", metadata={"format": "pt"})
    (index,) = quantised.glob("*.safetensors.index.json")
    content = json.loads(index.read_text())
    content["weight_map"].update(dict.fromkeys(head, "mtp.safetensors"))
    index.write_text(json.dumps(content))
    config = json.loads((quantised / "config.json").read_text())
    settings = config.get("quantization_config", {})
    for left in settings.keys() & {"ignore", "modules_to_not_convert"}:
        settings[left] += [name.removesuffix(".weight") for name in head]
    (quantised / "config.json").write_text(json.dumps(config))


def assert_drafts_are_those_of(quantised: Path, source: Path, folder: Path) -> None:
    """Logits are those of the dequantised weights in float64, answers those of plain steps."""
    by_us(quantised, folder / "dequantised", source)
    with LLM(quantised, platform="cpu", max_num_batched_tokens=64, **SMALL) as llm:
        plain = run(llm, TEXTS)
    with (LLM(quantised, platform="cpu", max_num_batched_tokens=64, **mtp(2), **SMALL) as llm,
          recorded_drafts(llm) as drafts):
        outputs = run(llm, TEXTS)
    assert {name: each.token_ids for name, each in outputs.items()} == {
        name: each.token_ids for name, each in plain.items()}
    assert_drafts_are_the_heads(folder / "dequantised", drafts, outputs, {
        name: (prompt, []) for name, prompt in TEXTS.items()})


def test_a_head_that_never_drafts_is_not_computed(checkpoint: Any, tmp_path: Path, platform_name: str) -> None:
    path = with_head(checkpoint("qwen3_5_text"), tmp_path / "head")
    off = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2,
                                  "num_speculative_tokens_per_batch_size": [[1, 64, 0]]}}
    with LLM(path, platform=platform_name, **SMALL) as llm:
        plain = run(llm, {"a-0": PromptInputs(LONG)})
    with LLM(path, platform=platform_name, **off, **SMALL) as llm:
        found: list[Any] = []
        runner_of(llm).model.draft = lambda *arguments: found.append(arguments)
        assert run(llm, {"a-0": PromptInputs(LONG)})["a-0"].token_ids == plain["a-0"].token_ids
    assert not found
