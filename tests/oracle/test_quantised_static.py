"""Static scales of inputs as scripts/quantize_checkpoint.py measures and writes them, read back by our readers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import ModelError
from scripts.quantised.calibration import input_ranges
from scripts.quantised.formats import Range
from scripts.quantised.writing import quantise
from tests import zygote
from tests.oracle.quantised_folders import read_all

ROOT = Path(__file__).parents[2]
CONVERSATIONS = [
    [{"role": "user", "content": "which of the two pictures shows a circle?"}],
    [{"role": "user", "content": "a b c d"}, {"role": "assistant", "content": "e f"}, {"role": "user", "content": "g"}],
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """One as of a job, one with messages alone, and an empty line."""
    file, (first, second) = tmp_path / "rows.jsonl", CONVERSATIONS
    lines = [{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": first}},
             {"messages": second}]
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return file


def seen_by_transformers(path: Path) -> dict[str, Range]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    seen: dict[str, Range] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor]) -> None:
            before = seen.get(name, Range(0.0, 0.0))
            seen[name] = Range(min(before.least, inputs[0].min().item()), max(before.most, inputs[0].max().item()))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(watch(name))
    for conversation in CONVERSATIONS:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        with torch.inference_mode():
            model(torch.tensor([tokenizer(text)["input_ids"]]))
    return seen


def test_ranges_are_what_transformers_linears_see(checkpoint: Any, rows: Path) -> None:
    path: Path = checkpoint("qwen2")
    found, expected = input_ranges(path, rows), seen_by_transformers(path)
    assert set(found) == set(expected)
    for name, inputs in expected.items():
        assert found[name] == pytest.approx(inputs, rel=1e-4), name


def ranges_of(path: Path) -> dict[str, Range | None]:
    """Made up, another for each linear."""
    with CheckpointReader(path) as reader:
        linears = [name.removesuffix(".weight") for name in sorted(reader.names) if len(reader.shape(name)) == 2]
    return {name: Range(-0.5 - 0.01 * index, 1.0 + 0.03 * index) for index, name in enumerate(linears)}


def test_modelslims_static_form_reads_back_bit_for_bit(checkpoint: Any, tmp_path: Path) -> None:
    """With biases, which are stored as products with scales of inputs."""
    path: Path = checkpoint("qwen2")
    ranges, plain = ranges_of(path), read_all(path)
    quantise(path, tmp_path / "w8a8", "modelslim-w8a8", ranges=ranges)
    stored, found = tensors_of(tmp_path / "w8a8"), read_all(tmp_path / "w8a8")
    types = json.loads((tmp_path / "w8a8" / "quant_model_description.json").read_text())
    assert set(found) == set(plain)
    static = [name.removesuffix(".input_scale") for name in stored if name.endswith(".input_scale")]
    assert {module.rpartition(".")[2] for module in static} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    for module in static:
        least, most = ranges[module] or (0.0, 0.0)
        scale, offset = stored[f"{module}.input_scale"].item(), stored[f"{module}.input_offset"].item()
        assert types[f"{module}.weight"] == types[f"{module}.deq_scale"] == "W8A8"
        assert scale == pytest.approx((most - least) / 255)
        assert [least / scale + offset, most / scale + offset] == pytest.approx([-128, 127], abs=0.51)
        deq = stored[f"{module}.deq_scale"].double()
        values = stored[f"{module}.weight"]
        assert torch.equal(found[f"{module}.weight"], values.float() * (deq / scale).float()[:, None])
        step = plain[f"{module}.weight"].float().abs().amax(1) / 127
        assert ((found[f"{module}.weight"] - plain[f"{module}.weight"]).abs() <= 0.51 * step[:, None]).all()
        if f"{module}.bias" in plain:
            own = (stored[f"{module}.quant_bias"].double() + offset * values.long().sum(1)) * deq
            assert torch.equal(found[f"{module}.bias"], own.float())
            assert (own - plain[f"{module}.bias"].double()).abs().max() <= deq.max()
    rest = [name for name in plain if name.rpartition(".")[0] not in static]
    dynamic = [name for name in rest if name.endswith("down_proj.weight")]
    assert {types[name] for name in dynamic} == {"W8A8_DYNAMIC"}
    for name in dynamic:
        step = plain[name].float().abs().amax(1) / 127
        assert ((found[name] - plain[name]).abs() <= 0.51 * step[:, None]).all()
    assert all(torch.equal(found[name], plain[name]) for name in rest if name not in dynamic)


def test_static_inputs_of_compressed_tensors_and_dynamic_ones_of_experts(checkpoint: Any, tmp_path: Path) -> None:
    path: Path = checkpoint("qwen3_moe")
    ranges = ranges_of(path)
    for name in ("w8a8-static", "w8a8", "modelslim-w8a8"):
        quantise(path, tmp_path / name, name, ranges=ranges)
    stored, found = tensors_of(tmp_path / "w8a8-static"), read_all(tmp_path / "w8a8-static")
    for name, values in read_all(tmp_path / "w8a8").items():
        assert torch.equal(found[name], values), "the weights are those of dynamic inputs"
    scales = {name.removesuffix(".input_scale"): value for name, value in stored.items() if "input_scale" in name}
    assert len(scales) == 4 * len({name.split(".")[2] for name in scales}), "attention's linears"
    for module, scale in scales.items():
        inputs = ranges[module] or (0.0, 0.0)
        assert scale.item() == pytest.approx(max(map(abs, inputs)) / 127)
    groups = json.loads((tmp_path / "w8a8-static" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [group["input_activations"]["dynamic"] for group in groups.values()] == [False, True]
    types = json.loads((tmp_path / "modelslim-w8a8" / "quant_model_description.json").read_text())
    assert types["model.layers.0.mlp.experts.3.up_proj.weight"] == "W8A8_DYNAMIC"
    assert types["model.layers.0.self_attn.q_proj.weight"] == "W8A8"
    read_all(tmp_path / "modelslim-w8a8")


def test_a_linear_that_no_row_went_through_is_named(checkpoint: Any, tmp_path: Path) -> None:
    path: Path = checkpoint("qwen2")
    ranges = {**ranges_of(path), "model.layers.1.mlp.up_proj": None}
    with pytest.raises(ModelError, match=r"no row went through model\.layers\.1\.mlp\.up_proj\.weight and 0 more"):
        quantise(path, tmp_path / "w8a8", "w8a8-static", ranges=ranges)


@pytest.mark.parametrize(("text", "words"), [
    ("", "there is no row in it"), ('{"prompt": "a"}\n', "line 1: it is no row with messages"),
    ("\nno JSON\n", "line 2: it is no row with messages"), ('{"messages": []}\n[1]\n', "line 2: it is no row"),
])
def test_rows_that_are_none_are_named(text: str, words: str, checkpoint: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ModelError, match=words):
        input_ranges(checkpoint("qwen2"), tmp_path / "rows.jsonl")


@pytest.mark.parametrize("options", [["w8a8-static"], ["w8a8", "--calibrate", "rows.jsonl"]])
def test_scales_are_measured_where_they_are_wanted_and_nowhere_else(options: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "scripts/quantize_checkpoint.py", "shapes-vl", str(tmp_path / "copy"), "--format"]
    done = zygote.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--calibrate is for w8a8-static and modelslim-w8a8, and these need it; --format is" in done.stderr


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
