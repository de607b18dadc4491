"""Quantised checkpoints through the engine: tokens and logits equal transformers' on the dequantised weights.

Whose dequantised weights: of compressed-tensors and FP8 those that transformers loads itself, which ours must equal; of
the rest those that the tests of reading have compared with their definition.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_runner import LLM
from scripts.quantised.writing import quantise
from tests.oracle.family_prompts import prompts_of
from tests.oracle.quantised_folders import by_us, read_all
from tests.oracle.running import LOGITS_TOLERANCE, SMALL, assert_equals_reference, greedy, need_devices

Make = Callable[..., tuple[Path, Path]]
FAST = [("qwen3", "fp8-block"), ("qwen3", "w4a16-asym"), ("qwen3_moe", "modelslim-w8a8-dynamic")]
FULL = [("qwen3", name) for name in ("w8a8", "fp8-dynamic", "awq", "gptq", "modelslim-w4a8-dynamic")] + [
    ("qwen3_moe", "fp8-block"), ("qwen3_vl", "w4a16"), ("qwen3_vl", "modelslim-w8a8-dynamic"),
    ("qwen3_vl_moe", "fp8-block"), ("qwen3_5_moe", "fp8-block"), ("qwen3_5_text", "modelslim-w4a16"),
    ("qwen3_next", "w8a8"), ("qwen2_5_vl", "awq"),
]
# Where weights that move by one rounding of float32 move the logits, in float64, by as much as the usual tolerance
# (2.2e-5 of the largest; 7e-6 with int8 or float32 weights of this model). transformers' own float32 is 1.5e-5 to
# 2.3e-5 from its float64, by the number of threads.
ILL_CONDITIONED = {("qwen3_5_moe", "fp8-block"): 6e-5}
BY_TRANSFORMERS = {("qwen3", name) for name in ("fp8-block", "w4a16-asym", "w8a8", "fp8-dynamic")}


@pytest.fixture(scope="module")
def made(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """(quantised, dequantised) folders of a tiny checkpoint."""

    def make(model_type: str, name: str) -> tuple[Path, Path]:
        path = tmp_path_factory.mktemp(f"{model_type}-{name}")
        quantise(checkpoint(model_type), path / "quantised", name, group_size=8, with_tower=True)
        dequantise = by_transformers if (model_type, name) in BY_TRANSFORMERS else by_us
        dequantise(path / "quantised", path / "dequantised", checkpoint(model_type))
        return path / "quantised", path / "dequantised"

    return make


def by_transformers(quantised: Path, target: Path, source: Path) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    method = json.loads((quantised / "config.json").read_text())["quantization_config"]["quant_method"]
    if method != "fp8":
        pytest.importorskip("compressed_tensors", reason="compressed-tensors needs Python 3.11")
    config = FineGrainedFP8Config if method == "fp8" else CompressedTensorsConfig
    model = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32,
                                                 quantization_config=config(dequantize=True))
    theirs = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    ours = read_all(quantised)
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor.float(), theirs[name]), f"{name} is not what transformers loads"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(theirs, target / "model.safetensors", metadata={"format": "pt"})


def compare(folders: tuple[Path, Path], model_type: str, platform_name: str, *, tolerance: float = LOGITS_TOLERANCE,
            **settings: Any) -> None:
    quantised, dequantised = folders
    with LLM(quantised, platform=platform_name, max_num_batched_tokens=128, **SMALL, **settings) as llm:
        prompts, images = prompts_of(llm, model_type)
        assert_equals_reference(dequantised, llm, prompts, images, tolerance=tolerance)


@pytest.mark.parametrize(("model_type", "name"), FAST)
def test_tokens_and_logits_equal_transformers_on_dequantised_weights(
        model_type: str, name: str, made: Make, platform_name: str) -> None:
    compare(made(model_type, name), model_type, platform_name)


@pytest.mark.full("other formats and layers; the readers are all compared in the fast set")
@pytest.mark.parametrize(("model_type", "name"), FULL)
def test_more_formats_and_layers(model_type: str, name: str, made: Make, platform_name: str) -> None:
    tolerance = ILL_CONDITIONED.get((model_type, name), LOGITS_TOLERANCE)
    compare(made(model_type, name), model_type, platform_name, tolerance=tolerance)


@pytest.mark.full("an engine of its own for other names of the same tensors")
def test_a_tower_under_the_names_of_older_folders_of_modelslim(made: Make, tmp_path: Path, platform_name: str) -> None:
    """`visual.` where newer ones have `model.visual.`; one file, and a description, under older names."""
    quantised, dequantised = made("qwen3_vl", "modelslim-w8a8-dynamic")
    path = tmp_path / "older"
    shutil.copytree(quantised, path, ignore=shutil.ignore_patterns("*.safetensors*", "quant_model_*"))
    tensors = {name: tensor for file in quantised.glob("*.safetensors") for name, tensor in load_file(file).items()}
    save_file({older(name): tensor for name, tensor in tensors.items()},
              path / "quant_model_weight_w8a8_dynamic.safetensors", metadata={"format": "pt"})
    description = json.loads((quantised / "quant_model_description.json").read_text())
    del description["version"]
    (path / "quant_model_description_w8a8_dynamic.json").write_text(
        json.dumps({older(name): kind for name, kind in description.items()}))
    compare((path, dequantised), "qwen3_vl", platform_name)


def older(name: str) -> str:
    return name.removeprefix("model.") if name.startswith("model.visual.") else name


@pytest.mark.full("each engine of several ranks starts as many processes")
@pytest.mark.parametrize(("model_type", "name", "num_ranks", "is_whole"), [
    ("qwen3", "fp8-block", 2, False), ("qwen3_moe", "w4a16", 2, False), ("qwen3_moe", "fp8-block", 4, False),
    ("qwen3_moe", "fp8-block", 4, True), ("qwen3_vl_moe", "fp8-block", 2, True),
])
@pytest.mark.ranks
def test_ranks_equal_one(model_type: str, name: str, num_ranks: int, is_whole: bool, made: Make, platform_name: str
                         ) -> None:
    """Slices that cut blocks of 8 and words of 8 numbers: an expert's 40 inputs are 20 or 10 on each rank. Whole
    experts are one by one in the file, or fused."""
    need_devices(platform_name, num_ranks)
    quantised, _ = made(model_type, name)
    texts = ["which of the two pictures shows a circle?", "a b c d e f g " * 20]
    answers = []
    for ranks in ({}, {"tensor_parallel_size": num_ranks, "enable_expert_parallel": is_whole}):
        with LLM(quantised, platform=platform_name, **ranks, **SMALL) as llm:
            answers.append([each.token_ids for each in llm.generate(texts, greedy())])
    assert answers[0] == answers[1]
