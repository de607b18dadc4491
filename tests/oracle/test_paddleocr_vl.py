"""PaddleOCR-VL against transformers: published files and names, its prompts, images cut by steps, and what is refused
before the network is built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_runner import LLM
from npu_runner.cli.main import main
from npu_runner.errors import ModelError, RequestError, WeightsError
from npu_runner.strategies import pick_strategy
from tests.full_set import only_full
from tests.oracle.changed_checkpoints import spoiled
from tests.oracle.image_prompts import LAYOUTS, SIZES, make_prompts
from tests.oracle.reference import random_image
from tests.oracle.running import SMALL, assert_equals_reference, greedy

HEAD = "lm_head.weight"
TASKS = ["OCR:", "Table Recognition:", "Formula Recognition:", "Chart Recognition:"]
# The form of the published template: roles as words, an image before its task.
TEMPLATE = (
    "{{ cls_token }}{% for m in messages %}{% if m.role == 'user' %}User: {% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{{ '\n' }}"
    "{% else %}Assistant:\n{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)


def asked(seen: Any, kind: str = "image", task: str = "OCR:") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, kind: seen}, {"type": "text", "text": task}]}]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})


def as_published(path: Path, folder: Path) -> Path:
    """The same checkpoint as PaddleOCR-VL's files were published: text fields at the root, fields that nothing reads,
    tensors that nothing uses."""
    made = spoiled(lambda base: path, folder)
    config = json.loads((path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config["vision_config"].update(model_type="paddleocr_vl", temporal_patch_size=2, tokens_per_second=2)
    del config["vision_config"]["rope_parameters"]
    old = {**text, **config, "rope_theta": rope["rope_theta"], "torch_dtype": "float32", "use_3d_rope": True,
           "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": rope["mrope_section"]}}
    (made / "config.json").write_text(json.dumps(old))
    unused = {f"visual.vision_model.{name}": torch.zeros(3) for name in (
        "head.probe", "head.attention.in_proj_bias", "head.mlp.fc1.weight",
        "embeddings.packing_position_embedding.weight")}
    tensors = tensors_of(path)
    assert {"mlp_AR.pre_norm.bias", "visual.vision_model.post_layernorm.bias", "model.norm.weight", HEAD} <= set(
        tensors), "transformers 5 writes the published names"
    save(made, tensors | unused)
    return made


def as_in_memory(path: Path, folder: Path) -> Path:
    """With the names that transformers gives the parts."""
    made = spoiled(lambda base: path, folder)
    stems = {"mlp_AR.": "model.projector.", "visual.": "model.visual.", "model.": "model.language_model."}
    save(made, {next((new + name.removeprefix(old) for old, new in stems.items() if name.startswith(old)), name): tensor
                for name, tensor in tensors_of(path).items()})
    return made


@pytest.mark.parametrize("form", [as_published, as_in_memory])
def test_both_namings_load_and_unused_tensors_are_left_out(form: Any, checkpoint: Any, tmp_path: Path,
                                                           platform_name: str) -> None:
    path = form(checkpoint("paddleocr_vl"), tmp_path)
    with LLM(path, platform=platform_name, **SMALL) as llm:
        assert not llm.engine.model_config.tie_word_embeddings
        assert_equals_reference(path, llm, *make_prompts(llm, LAYOUTS[:4]))


def test_a_tensor_that_nothing_claims_is_named(checkpoint: Any, tmp_path: Path) -> None:
    made = spoiled(checkpoint, tmp_path, base="paddleocr_vl")
    save(made, tensors_of(made) | {"visual.vision_model.adapter.weight": torch.zeros(3)})
    with pytest.raises(WeightsError, match=r"left over: visual\.vision_model\.adapter\.weight"):
        LLM(made, platform="cpu", **SMALL)


@pytest.mark.parametrize(("said", "has_head", "is_tied"), [
    (None, True, False), (None, False, True), (True, True, True), (True, False, True), (False, True, False)])
def test_config_json_decides_whether_the_head_is_tied(said: bool | None, has_head: bool, is_tied: bool, checkpoint: Any,
                                                      tmp_path: Path) -> None:
    path: Path = checkpoint("paddleocr_vl")
    text = {**json.loads((path / "config.json").read_text())["text_config"], "tie_word_embeddings": said}
    text = {name: value for name, value in text.items() if value is not None}
    made = spoiled(lambda base: path, tmp_path, tie_word_embeddings=said, text_config=text)
    save(made, {name: tensor for name, tensor in tensors_of(path).items() if has_head or name != HEAD})
    assert pick_strategy(made).read_config().tie_word_embeddings is is_tied


@pytest.mark.parametrize("num_tokens", [37, *only_full("smaller chunks; those of qwen3_vl stay", 5)])
def test_steps_may_cut_an_image(num_tokens: int, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("paddleocr_vl")
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens, **SMALL) as llm:
        assert_equals_reference(path, llm, *make_prompts(llm, LAYOUTS[3:]))
        assert llm.stats().num_images_encoded == len(SIZES)


def test_published_prompts_are_those_of_transformers(checkpoint: Any, tmp_path: Path, platform_name: str) -> None:
    from transformers import AutoTokenizer

    path = spoiled(checkpoint, tmp_path, base="paddleocr_vl")
    file = path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "chat_template": TEMPLATE, "cls_token": "<|im_start|>"}))
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    image = random_image(np.random.default_rng(1), 61, 40)
    with LLM(path, platform=platform_name, **SMALL) as llm:
        prompts = []
        for task in TASKS:
            messages = asked(image, task=task)
            prompts.append(llm.engine.processor(messages))
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            count = prompts[-1].spans[0].num_tokens
            text = text.replace("<|image_pad|>", count * "<|image_pad|>")
            assert prompts[-1].token_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert_equals_reference(path, llm, prompts, [[image]] * len(TASKS))


def test_a_bare_published_config_is_looked_at(checkpoint: Any, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """Its tower's temporal_patch_size is 2, and its images have one frame."""
    bare = as_published(checkpoint("paddleocr_vl"), tmp_path) / "config.json"
    assert main(["models", str(bare)]) == 0
    assert main(["doctor", "--fits", str(bare), "--device-memory", "4G", "--platform", "npu"]) == 0
    said = capsys.readouterr().out
    assert "served as paddleocr_vl" in said
    assert "text and images in, text out" in said
    assert "fits: the KV cache holds" in said


def test_an_image_outside_the_limits_fails_its_row_alone(checkpoint: Any, platform_name: str) -> None:
    """By the family's own rule: 5 x 1,001 becomes 28 x 5,606, which is 200.2 to 1; 14 x 2,800 is 200 to 1."""
    rng = np.random.default_rng(1)
    sizes = {(1001, 5): "image_aspect_ratio", (2800, 14): None, (40, 40): None}
    with LLM(checkpoint("paddleocr_vl"), platform=platform_name, **SMALL) as llm:
        images = [random_image(rng, *size) for size in sizes]
        outputs = llm.chat(list(map(asked, images)), greedy(2), return_errors=True)
    assert [output.error_code for output in outputs] == list(sizes.values())


def test_videos_are_refused_with_the_reason(checkpoint: Any) -> None:
    words = "takes no videos here: the processor that transformers has for PaddleOCR-VL takes images only; send frames"
    with LLM(checkpoint("paddleocr_vl"), platform="cpu", **SMALL) as llm, pytest.raises(
            RequestError, match=words) as refused:
        llm.chat(asked(b"0", "video"), greedy(1))
    assert refused.value.code == "model_has_no_video"


@pytest.mark.parametrize(("part", "changes", "words"), [
    ("vision_config", {"hidden_act": "relu"}, "vision hidden_act 'relu' is not supported; supported are"),
    ("vision_config", {"num_channels": 1}, "vision_config.in_channels 1 is not supported"),
    ("vision_config", {"patch_size": 16}, "patch_size is 14 in preprocessor_config.json but patch_size is 16"),
    ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "vision rope_type 'yarn' is not supported"),
    ("vision_config", {"num_attention_heads": 8}, "vision_config.hidden_size 48 of 8 heads is not supported"),
    ("vision_config", {"layer_norm_eps": "small"}, "could not convert"),
    ("text_config", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported in the language model"),
    ("text_config", {"layer_types": ["sliding_attention"] * 3}, "layer_types names 'sliding_attention'"),
])
def test_a_network_that_we_would_get_wrong_is_refused(part: str, changes: dict[str, Any], words: str, checkpoint: Any,
                                                      tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path: Path = checkpoint("paddleocr_vl")
    changed = {**json.loads((path / "config.json").read_text())[part], **changes}
    monkeypatch.setattr("npu_runner.strategies.paddleocr_vl.PaddleOCRVLStrategy.build", None)  # refused before
    with pytest.raises(ModelError, match=words):
        LLM(spoiled(lambda base: path, tmp_path, **{part: changed}), platform="cpu", **SMALL)


@pytest.mark.parametrize(("changes", "words"), [
    ({"do_center_crop": True}, "do_center_crop is set"), ({"resample": 9}, "resample is 9"),
    ({"temporal_patch_size": 2}, "temporal_patch_size is 2; this family's tower takes one frame"),
    ({"merge_size": 3}, "merge_size is 3 in preprocessor_config.json but spatial_merge_size is 2")])
def test_images_that_we_would_get_wrong_are_refused(changes: dict[str, Any], words: str, checkpoint: Any,
                                                    tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spoiled(checkpoint, tmp_path, base="paddleocr_vl")
    file = made / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    monkeypatch.setattr("npu_runner.strategies.paddleocr_vl.PaddleOCRVLStrategy.build", None)  # refused before
    with pytest.raises(ModelError, match=words):
        LLM(made, platform="cpu", **SMALL)
