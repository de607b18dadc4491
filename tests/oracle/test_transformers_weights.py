"""Weights of networks of transformers through our loader: quantised, with adapters, random, cut and refused.

The oracle is transformers in float32, on the dequantised weights or on those that PEFT merged.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_runner import LLM
from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.checkpoint.renamed_weights import Chunk, RenamedReader
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import ModelError, WeightsError
from npu_runner.layers.linear import HeldLinear
from npu_runner.layers.parallel import LayerContext
from npu_runner.layers.weight_forms import hold_as_stored
from npu_runner.models import transformers_parts
from npu_runner.models.transformers_parts import Experts, WithoutTraffic
from npu_runner.platforms import pick_platform
from npu_runner.strategies import transformers_internals
from npu_runner.strategies.transformers_model import TransformersStrategy
from scripts.quantised.writing import quantise
from tests.full_set import only_full
from tests.oracle.foreign_checkpoints import make_foreign_checkpoint, small_config, write_config_alone
from tests.oracle.quantised_folders import by_us
from tests.oracle.running import SMALL, assert_equals_reference, assert_prompt_rows_equal, greedy, runner_of

PROMPT = list(range(203, 3, -1))
TEXTS = ["which", "which of the two pictures shows a circle?"]


def make(folder: Path, model_type: str, **changes: Any) -> Path:
    folder.mkdir()
    return make_foreign_checkpoint(folder, model_type, **{**small_config(model_type), **changes})


def assert_equal(path: Path, oracle: Path, platform_name: str, **settings: Any) -> None:
    with LLM(path, platform=platform_name, max_num_batched_tokens=128, **{**SMALL, **settings}) as llm:
        assert_prompt_rows_equal(oracle, llm, PROMPT)
        assert_equals_reference(oracle, llm, [llm.engine.processor.from_text(text) for text in TEXTS])


@pytest.mark.parametrize(("model_type", "name"), [
    ("mixtral", "fp8-block"), ("phi3", "gptq"), *only_full(
        "other formats and layers; the readers are all compared in the fast set",
        *((model_type, name) for model_type in ("gemma3_text", "phi3", "gpt_neox", "olmo3")
          for name in ("w8a8", "fp8-block", "fp8-dynamic", "awq", "w4a16-asym", "modelslim-w8a8-dynamic")),
        ("mixtral", "w8a8"), ("mixtral", "gptq"), ("gemma3_text", "gptq"))])
def test_quantised_weights_equal_transformers_on_dequantised_ones(model_type: str, name: str, tmp_path: Path,
                                                                  platform_name: str) -> None:
    source = make(tmp_path / "source", model_type)
    quantise(source, tmp_path / "quantised", name, group_size=8)
    by_us(tmp_path / "quantised", tmp_path / "dequantised", source)
    file = tmp_path / "dequantised/model.safetensors"
    tensors = {name.replace(".shift", ".bias"): tensor for name, tensor in load_file(file).items()}  # of ModelSlim
    save_file(tensors, file, metadata={"format": "pt"})
    assert_equal(tmp_path / "quantised", tmp_path / "dequantised", platform_name)


@pytest.mark.parametrize(("model_type", "modules"), [
    ("gpt_neox", ["query_key_value", "embed_out"]), *only_full(
        "two more families with adapters; one with renamed tensors stays",
        ("phi3", ["qkv_proj", "gate_up_proj"]), ("mixtral", ["q_proj", "o_proj"]))])
def test_an_adapter_equals_what_peft_merged(model_type: str, modules: list[str], tmp_path: Path,
                                            platform_name: str) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    source = make(tmp_path / "source", model_type)
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), settings)
    model.save_pretrained(tmp_path / "adapter")
    shutil.copytree(source, tmp_path / "merged")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_equal(source, tmp_path / "merged", platform_name, lora=str(tmp_path / "adapter"))


@pytest.mark.parametrize("settings", [{"load_format": "dummy"}, {"quantization": "int8"}])
def test_weights_are_made_at_load(settings: dict[str, Any], tmp_path: Path) -> None:
    with LLM(make(tmp_path / "model", "mixtral"), platform="cpu", **SMALL, **settings) as llm:
        assert len(llm.generate(["which"], greedy(3))[0].token_ids) == 3


# -- what of a network is ours, and what is cut -----------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "num_linears", "num_experts"), [
    ("phi3", 12, 0), ("gpt2", 12, 0), ("mixtral", 6, 3), ("minimax_m3_vl_text", 12, 0)])
def test_linears_and_experts_are_ours(model_type: str, num_linears: int, num_experts: int, tmp_path: Path) -> None:
    with LLM(make(tmp_path / "model", model_type), platform="cpu", **SMALL) as llm:
        modules = list(runner_of(llm).model.modules())
    assert sum(isinstance(module, HeldLinear) for module in modules) == num_linears
    assert sum(isinstance(module, Experts) for module in modules) == num_experts


def test_experts_with_a_gate_of_their_own_stay(tmp_path: Path, monkeypatch: Any) -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    monkeypatch.setattr(MixtralExperts, "_apply_gate", lambda self, x: x.chunk(2, dim=-1)[0])
    with LLM(make(tmp_path / "model", "mixtral"), platform="cpu", **SMALL) as llm:
        assert not any(isinstance(module, Experts) for module in runner_of(llm).model.modules())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("model_type", "name", "form"), [
    ("phi3", "gptq", "grouped"), ("gpt_neox", "w8a8", "int8"), ("mixtral", "w8a8", "int8_experts")])
def test_weights_are_held_as_they_are_stored(model_type: str, name: str, form: str, rank: int, tmp_path: Path) -> None:
    """On platforms that multiply such weights, for each of two ranks."""
    quantise(make(tmp_path / "source", model_type, intermediate_size=256), tmp_path / "model", name, group_size=32)
    strategy = TransformersStrategy(tmp_path / "model")
    platform = pick_platform("cpu")
    attention = platform.make_attention("auto", num_heads=2, num_kv_heads=1, head_dim=16, block_size=16,
                                        dtype=torch.bfloat16)
    context = LayerContext(platform.make_ops(), attention, WithoutTraffic(rank=rank, size=2), torch.bfloat16,
                           torch.device("meta"), weight_forms=("int8", "int8_experts", "grouped"))
    model = strategy.build(strategy.read_config(), 128, context)
    with open_weights(tmp_path / "model", read_quantization(tmp_path / "model")) as stored:
        reader = strategy.named(stored)
        hold_as_stored(model, reader, strategy.renamed(reader.names))
    found = {module.form for name, module in model.named_modules()
             if name.endswith(("qkv_proj", "query_key_value", "experts"))}
    assert found == ({"int8", form} if model_type == "mixtral" else {form})  # a merged qkv_proj, and experts


def test_each_tensor_is_read_once(tmp_path: Path, monkeypatch: Any) -> None:
    """With few bytes in a piece, and experts of three layers, some are read in several pieces, never twice."""
    read: list[tuple[Any, ...]] = []
    own = CheckpointReader._read
    monkeypatch.setattr(CheckpointReader, "_read", lambda self, name, slices: (
        read.append((name, str(slices))), own(self, name, slices))[1])
    LLM(make(tmp_path / "model", "mixtral"), platform="cpu", **SMALL).close()
    assert len(read) == len(set(read))
    with CheckpointReader(tmp_path / "model") as reader:
        assert {name for name, _ in read} == reader.names


# On four ranks two share a head of keys and values, and a norm over all of these gathers each once.
@pytest.mark.parametrize(("model_type", "changes", "num_ranks"), [
    ("olmo3", {}, 4), ("cohere", {"use_qk_norm": True}, 2), ("phi3", {}, 4), ("bitnet", {}, 2), ("laguna", {}, 2)])
def test_a_network_runs_with_some_of_its_heads(model_type: str, changes: dict[str, Any], num_ranks: int,
                                               tmp_path: Path) -> None:
    path = write_config_alone(tmp_path, model_type, **{**small_config(model_type), **changes})
    TransformersStrategy(path)._check_ranks(num_ranks)


@pytest.mark.parametrize(("model_type", "changes", "num_ranks", "message"), [
    ("stablelm", {"qk_layernorm": True}, 2, r"self_attn.q_layernorm.norms: a part of attention that is not known"),
    ("persimmon", {}, 8, "num_attention_heads 4 does not divide by tensor_parallel_size 8"),
    ("gpt_bigcode", {"multi_query": False}, 2, None),
])
def test_what_cannot_be_cut_is_named(model_type: str, changes: dict[str, Any], num_ranks: int, message: str | None,
                                     tmp_path: Path) -> None:
    path = write_config_alone(tmp_path, model_type, **{**small_config(model_type), **changes})
    if message is None:
        TransformersStrategy(path)._check_ranks(num_ranks)
    else:
        with pytest.raises(Exception, match=message):
            TransformersStrategy(path)._check_ranks(num_ranks)


def test_linears_of_attention_that_are_not_known_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    path = write_config_alone(tmp_path, "gpt2", **small_config("gpt2"))
    monkeypatch.setitem(transformers_parts._ROLES, "o", ())
    with pytest.raises(ModelError, match=r"h\.0\.attn: its linears for o are not known .* set tensor_parallel_size"):
        TransformersStrategy(path)._check_ranks(2)


def test_tensors_that_are_converted_otherwise_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(transformers_internals, "_STACKED", {})
    with pytest.raises(WeightsError, match=r"w1.weight: transformers makes .*gate_up_proj of it by MergeModulelist"):
        LLM(make(tmp_path / "model", "mixtral"), platform="cpu", **SMALL)


def test_a_tensor_that_transformers_cuts_into_parts_is_read_in_parts(tmp_path: Path) -> None:
    """The oracle is torch.chunk, by which transformers cuts. A quantised one is dequantised."""
    names = {f"{own}_proj.weight": Chunk("qkv.weight", place, 3) for place, own in enumerate("qkv")}
    save_file({"qkv.weight": torch.randn(48, 32)}, tmp_path / "model.safetensors")
    with RenamedReader(open_weights(tmp_path, None), names) as reader:
        whole = reader.base.read("qkv.weight")
        assert reader.names == set(names)
        for name, expected in zip(names, whole.chunk(3), strict=True):
            assert reader.shape(name) == (16, 32)
            assert torch.equal(reader.read(name), expected)
            assert torch.equal(reader.read(name, 0, 5, 7), expected[5:12])
            assert torch.equal(reader.read(name, 1, 8, 16), expected[:, 8:24])
            assert [torch.equal(values, expected[rows]) for rows, values in reader.pieces(name)] == [True]
    source = make(tmp_path / "source", "phi3")
    quantise(source, tmp_path / "quantised", "fp8-dynamic", group_size=8)
    stored = "model.layers.0.self_attn.qkv_proj.weight"
    with open_weights(tmp_path / "quantised", read_quantization(tmp_path / "quantised")) as base:
        reader = RenamedReader(base, {"q": Chunk(stored, 0, 2), "all": stored})
        assert reader.fp8_form("all") is not None
        assert reader.fp8_form("q") is reader.int8_inputs("q") is reader.grouped_form("q") is None
        assert torch.equal(reader.read("q"), base.read(stored).chunk(2)[0])


def test_the_parts_of_a_tensor_are_named_as_transformers_names_them() -> None:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, QianfanOCRConfig

    with torch.device("meta"):
        network = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[QianfanOCRConfig](QianfanOCRConfig(
            text_config={"num_hidden_layers": 1}, vision_config={"num_hidden_layers": 1}))
    home = "vision_model.encoder.layers.0.attn.qkv"
    found = transformers_internals.stored_names(network, [f"{home}.weight", f"{home}.bias"])
    assert found == {f"model.vision_tower.layers.0.attention.{own}_proj.{kind}": Chunk(f"{home}.{kind}", place, 3)
                     for kind in ("weight", "bias") for place, own in enumerate("qkv")}
    assert found.keys() <= network.state_dict().keys()
    with pytest.raises(WeightsError, match="are both model"):
        transformers_internals.stored_names(
            network, [f"{home}.bias", "model.vision_tower.layers.0.attention.k_proj.bias"])
