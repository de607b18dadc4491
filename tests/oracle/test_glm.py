"""GLM-OCR, GLM-4.1V and GLM-4.6V against transformers: chunks, preemption and a warm cache with images; the three ways
in which weights are laid out when they are loaded; what is left out of a file and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from npu_runner import LLM
from npu_runner.errors import ModelError, RequestError, WeightsError
from npu_runner.layers.linear import Padding
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.models.vision.parts import PaddedHeadNorm
from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.strategies import pick_strategy
from tests.full_set import only_full
from tests.oracle.changed_checkpoints import copy_with_more_tensors, spoiled
from tests.oracle.image_prompts import LAYOUTS, make_prompts
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, assert_equals_reference, greedy

FAMILIES = ["glm_ocr", "glm4v", "glm46v"]


@pytest.mark.parametrize(("model_type", "num_tokens"), [
    ("glm_ocr", 7), *only_full("the other of two towers of one kind", ("glm4v", 37))])
def test_chunks_may_cut_an_image(model_type: str, num_tokens: int, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type)
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens, **SMALL) as llm:
        prompts, images = make_prompts(llm, LAYOUTS[:6])
        assert_equals_reference(path, llm, prompts, images)


@pytest.mark.parametrize("model_type", ["glm_ocr", *only_full("the other of two towers of one kind", "glm4v")])
def test_a_warm_prefix_cache_equals_a_cold_one(model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type)
    with LLM(path, platform=platform_name, block_size=4, **SMALL) as llm:
        prompts, images = make_prompts(llm, LAYOUTS[:5])
        llm.generate(prompts, greedy())
        warm = llm.generate(prompts, greedy())
        assert all(output.num_cached_tokens > 0 for output in warm)
        assert_equals_reference(path, llm, prompts, images)


@pytest.mark.full("schedulers do not know towers; images of another stay (test_scheduling_changes_nothing.py)")
@pytest.mark.parametrize("model_type", ["glm4v", "glm_ocr"])
def test_preempted_sequences_end_as_if_undisturbed(model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type)
    head_dim = pick_strategy(path).read_config().head_dim
    per_block = 2 * 3 * 4 * 2 * head_dim * 4  # k and v, layers, block_size, kv heads, head_dim, bytes
    with LLM(path, platform=platform_name, block_size=4, kv_cache_bytes=41 * per_block, max_num_seqs=8,
             max_model_len=160, dtype="float32", enable_prefix_caching=False) as llm:
        prompts, images = make_prompts(llm, LAYOUTS[:6])
        assert_equals_reference(path, llm, prompts, images, num_tokens=MAX_NEW_TOKENS)
        assert llm.stats().num_preemptions > 0, "the test must force preemption"


@pytest.mark.parametrize("size", [16, 24, 64])
def test_norms_of_heads_do_not_see_the_zeros_between(size: int) -> None:
    """An attention that takes heads of 64 only has halves of a smaller head apart."""
    context = LayerContext(CpuOps(), None, TensorParallel(), torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    norm = PaddedHeadNorm("q_norm", size, Padding(size // 2, 32), 1e-3, context)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((5, 2, size), (size,)))

    def padded(values: torch.Tensor) -> torch.Tensor:
        return F.pad(values.unflatten(-1, (2, size // 2)), (0, 32 - size // 2)).flatten(-2)

    for part in norm.weight_parts["weight"]:
        part.place(norm.weight.data).copy_(weight.narrow(0, part.start, part.length) if part.dim == 0 else weight)
    norm.weights_are_loaded()
    torch.testing.assert_close(norm(padded(x)), padded(F.rms_norm(x, (size,), weight, 1e-3)))


def test_the_layer_that_predicts_several_tokens_is_left_out_and_said_so(
    checkpoint: Any, tmp_path: Path, platform_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    layers = "model.language_model.layers"
    path = copy_with_more_tensors(checkpoint("glm_ocr"), tmp_path / "mtp", f"{layers}.3.eh_proj.weight",
                                  f"{layers}.3.mlp.gate_up_proj.weight")
    with caplog.at_level("INFO"), LLM(path, platform=platform_name, **SMALL) as llm:
        prompts, images = make_prompts(llm, LAYOUTS[:2])
        assert_equals_reference(checkpoint("glm_ocr"), llm, prompts, images)
    assert f"2 tensors of {path} are left out: {layers}.3." in caplog.text
    path = copy_with_more_tensors(checkpoint("glm_ocr"), tmp_path / "other", f"{layers}.4.eh_proj.weight")
    with pytest.raises(WeightsError, match=r"left over: model.language_model.layers.4.eh_proj.weight"):
        LLM(path, platform=platform_name, **SMALL)


@pytest.mark.parametrize(("section", "changes", "words"), [
    ("vision_config", {"hidden_act": "gelu"}, "vision hidden_act 'gelu' is not supported in this tower"),
    ("vision_config", {"patch_size": [14, 7]}, r"vision_config.patch_size \[14, 7\] is not supported"),
    ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "vision rope_type 'yarn' is not supported"),
    ("vision_config", {"spatial_merge_size": 4}, "merge_size is 2 in preprocessor_config.json"),
    ("text_config", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported in the language model"),
    ("text_config", {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1]}},
     r"mrope_section \(1, 1, 1\) does not sum to half of the dims that turn"),
])
@pytest.mark.parametrize("model_type", ["glm_ocr", "glm4v"])
def test_a_checkpoint_that_we_would_get_wrong_is_refused(
    model_type: str, section: str, changes: dict[str, Any], words: str, checkpoint: Any, tmp_path: Path
) -> None:
    path: Path = checkpoint(model_type)
    values = {**json.loads((path / "config.json").read_text())[section], **changes}
    with pytest.raises(ModelError, match=words):
        LLM(spoiled(lambda base: path, tmp_path, **{section: values}), platform="cpu", **SMALL)


@pytest.mark.parametrize(("changes", "words"), [
    ({"do_center_crop": True}, "do_center_crop is set"), ({"resample": 9}, "resample is 9"),
    ({"size": [3]}, "size is")])
def test_images_that_we_would_get_wrong_are_refused(changes: dict[str, Any], words: str, checkpoint: Any,
                                                    tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spoiled(checkpoint, tmp_path, base="glm_ocr")
    file = made / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    monkeypatch.setattr("npu_runner.strategies.glm_ocr.GlmOcrStrategy.build", None)  # refused before
    with pytest.raises(ModelError, match=words):
        LLM(made, platform="cpu", **SMALL)


def test_an_image_that_is_too_thin_fails_its_prompt_alone(checkpoint: Any, platform_name: str) -> None:
    thin, other = (Image.fromarray(np.zeros((*sides, 3), dtype=np.uint8)) for sides in ((30, 6030), (40, 30)))
    chats = [[{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "which?"}]}]
             for image in (thin, other)]
    with LLM(checkpoint("glm_ocr"), platform=platform_name, **SMALL) as llm:
        with pytest.raises(RequestError, match=r"6030x30 pixels, a ratio of 201\.0; the model") as found:
            llm.chat(chats[0], greedy(1))
        assert found.value.code == "image_aspect_ratio"
        assert len(llm.chat(chats[1], greedy(1))) == 1


def test_published_configs_are_read(checkpoint: Any, tmp_path: Path) -> None:
    """The numbers of GLM-OCR and GLM-4.1V-9B, and where their files have them."""
    rope = {"rope_type": "default", "rope_theta": 10000, "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0}
    ocr = {"model_type": "glm_ocr_text", "hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 16,
           "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 59392,
           "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_parameters": rope, "hidden_act": "silu",
           "eos_token_id": [59246, 59253], "num_nextn_predict_layers": 1, "dtype": "bfloat16"}
    tower = {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "out_hidden_size": 1536,
             "attention_bias": True, "patch_size": 14, "image_size": 336, "spatial_merge_size": 2, "in_channels": 3,
             "temporal_patch_size": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    path = spoiled(checkpoint, tmp_path / "ocr", base="glm_ocr", text_config=ocr, vision_config=tower,
                   image_token_id=59280, eos_token_id=None)
    (path / "generation_config.json").unlink()
    config = pick_strategy(path).read_config()
    assert (config.head_dim, config.num_kv_heads, config.num_layers, config.eos_token_ids) == (
        128, 8, 16, (59246, 59253))
    assert (config.rope.rotary_dim, config.rope.mrope_section, config.rope.mrope_is_interleaved) == (
        None, (16, 24, 24), False)
    assert config.vision is not None
    assert vars(config.vision)["merger_intermediate_size"] == 4608
    assert config.vision.num_position_embeddings == 0
    old = {"hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32,
           "num_key_value_heads": 2, "vocab_size": 151552, "rms_norm_eps": 1e-5, "max_position_embeddings": 65536,
           "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "attention_bias": True, "torch_dtype": "bfloat16",
           "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}}
    wide = {**tower, "hidden_size": 1536, "num_heads": 12, "intermediate_size": 13696, "out_hidden_size": 4096,
            "attention_bias": False}
    config = pick_strategy(spoiled(checkpoint, tmp_path / "4v", base="glm4v", text_config=old,
                                   vision_config=wide)).read_config()
    assert (config.head_dim, config.rope.rotary_dim, config.rope.mrope_section) == (128, 64, (8, 12, 12))
    assert config.vision is not None
    assert (config.vision.intermediate_size, config.vision.num_position_embeddings) == (4096, 24 * 24)
    assert vars(config.vision)["merger_intermediate_size"] == 13696
