"""A LoRA adapter merged while loading: weights and tokens equal what PEFT makes of the same adapter, in float32."""

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
from npu_runner.checkpoint.adapted_weights import AdaptedReader
from npu_runner.checkpoint.lora import CONFIG, WEIGHTS, read_adapter
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import ConfigError, ModelError, WeightsError
from npu_runner.strategies import pick_strategy
from tests.full_set import only_full
from tests.oracle.family_prompts import prompts_of
from tests.oracle.running import SMALL, assert_equals_reference, greedy, need_devices

peft = pytest.importorskip("peft")
Make = Callable[..., tuple[Path, Path, Path]]
ALL = "all-linear"
TEXT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("qwen3", {}, {"target_modules": TEXT}),
    "rank-stabilised, patterns, head, saved norm": ("qwen3", {}, {
        "target_modules": [*TEXT, "lm_head"], "use_rslora": True, "rank_pattern": {"q_proj": 2, "layers.1.mlp.*": 3},
        "alpha_pattern": {"o_proj": 5}, "modules_to_save": ["norm"]}),
    "DoRA": ("llama", {"attention_bias": True}, {"target_modules": TEXT, "use_dora": True}),
    "embedding and head, each its own": ("qwen3", {}, {"target_modules": ["embed_tokens", "lm_head"]}),
    "embedding, tied": ("qwen3", {"tie_word_embeddings": True}, {"target_modules": ["embed_tokens"]}),
    "biases": ("qwen2", {}, {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}),
    "tower, decoder and shared expert": ("qwen3_5_moe", {}, {
        "target_modules": ["qkv", "proj", "q_proj", "shared_expert.up_proj"]}),
    "tower and decoder": ("qwen2_5_vl", {}, {"target_modules": ALL}),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Folders: the base, an adapter of random numbers, and the base that PEFT has merged it into."""

    def make(model_type: str, changes: dict[str, Any], settings: dict[str, Any]) -> tuple[Path, Path, Path]:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        base = checkpoint(model_type, **changes)
        folder = tmp_path_factory.mktemp("lora")
        has_tower = hasattr(AutoConfig.from_pretrained(base), "vision_config")
        factory = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
        model = factory.from_pretrained(base, dtype=torch.float32)
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **settings))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) * 0.05
        adapted.save_pretrained(folder / "adapter")
        merged = adapted.merge_and_unload()
        merged.save_pretrained(folder / "merged")
        for file in base.iterdir():
            if not (folder / "merged" / file.name).exists():
                shutil.copy(file, folder / "merged")
        return base, folder / "adapter", folder / "merged"

    return make


@pytest.mark.parametrize("kind", [*list(KINDS)[:6], *only_full(
    "towers; the merged model of one stays, with its tokens and logits", *list(KINDS)[6:])])
def test_every_weight_is_what_peft_merges(kind: str, made: Make) -> None:
    """Whole, and cut along each dim at odd places. 1 s each."""
    base, adapter, merged = made(*KINDS[kind])
    plain, expected = load_all(base), load_all(merged)
    with CheckpointReader(base) as stored:
        reader = AdaptedReader(stored, read_adapter(adapter), pick_strategy(base).renamed(stored.names))
        assert reader.names == set(expected) == set(plain)
        changed = 0
        for name, right in expected.items():
            assert reader.shape(name) == tuple(right.shape)
            changed += not torch.equal(right, plain[name])
            assert_close(reader.read(name), right)
            for dim in [dim for dim in range(min(2, right.dim())) if right.shape[dim] > 3]:
                length = (right.shape[dim] + 1) // 2 - 1
                assert_close(reader.read(name, dim, 1, length), right.narrow(dim, 1, length))
        assert changed == reader.num_changed > 0, "the test's adapter changes what it says"


@pytest.mark.parametrize("kind", ["tower and decoder", *only_full(
    "another adapter through the engine; its weights are compared in the fast set", "DoRA")])
def test_tokens_and_logits_equal_those_of_the_merged_model(kind: str, made: Make, platform_name: str) -> None:
    """6 s."""
    base, adapter, merged = made(*KINDS[kind])
    with LLM(base, lora=str(adapter), platform=platform_name, **SMALL) as llm:
        prompts, images = prompts_of(llm, KINDS[kind][0])
        assert_equals_reference(merged, llm, prompts, images)
        described = llm.engine.describe()
    with LLM(base, platform=platform_name, **SMALL) as llm:
        assert "lora" not in llm.engine.describe()
    assert described["lora"] == read_adapter(adapter).fingerprint


def test_a_head_of_its_own_is_untied_from_the_embedding(made: Make, platform_name: str) -> None:
    """Where the adapter stands beside the model, embedding and head differ. Merging in place would change both."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, adapter, _ = made("qwen3", {"tie_word_embeddings": True}, {"target_modules": ["lm_head", "q_proj"]})
    with LLM(base, lora=str(adapter), platform=platform_name, **SMALL) as llm:
        (output,) = llm.generate(["which"], greedy(8))
        prompt = llm.engine.processor.from_text("which").token_ids
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(8):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert output.token_ids == tokens[len(prompt):]


@pytest.mark.full("two ranks start twice; slices of what is merged are compared in the fast set")
@pytest.mark.ranks
def test_two_ranks_cut_what_is_merged(made: Make, platform_name: str) -> None:
    """8 s. Rows, columns and DoRA's norms of whole rows."""
    need_devices(platform_name)
    base, adapter, _ = made(*KINDS["DoRA"])
    answers = []
    for ranks in (1, 2):
        with LLM(base, lora=str(adapter), platform=platform_name, tensor_parallel_size=ranks, **SMALL) as llm:
            answers.append([output.token_ids for output in llm.generate(["which", "a b c d"], greedy())])
    assert answers[0] == answers[1]


def peft_from_disk(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """The weights that PEFT merges when it loads an adapter beside its base."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged: Any = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return dict(merged.state_dict())


@pytest.mark.parametrize("way", [True, False, "gaussian", "orthogonal", "mica", "eva"])
def test_a_way_to_begin_training_that_keeps_the_base_is_merged(way: Any, made: Make, tmp_path: Path) -> None:
    base, adapter, _ = made("qwen3", {}, {"target_modules": ["q_proj", "up_proj"]})
    shutil.copytree(adapter, tmp_path / "adapter")
    edit(tmp_path / "adapter", init_lora_weights=way)
    right = peft_from_disk(base, tmp_path / "adapter")
    with CheckpointReader(base) as stored:
        reader = AdaptedReader(stored, read_adapter(tmp_path / "adapter"), {})
        for name in reader.names:
            assert_close(reader.read(name), right[name])


@pytest.mark.parametrize("way", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "a new one"])
def test_a_way_to_begin_training_that_may_change_the_base_is_refused(way: str, made: Make, tmp_path: Path) -> None:
    base, adapter, _ = made("qwen3", {}, {"target_modules": ["q_proj", "up_proj"]})
    shutil.copytree(adapter, tmp_path / "adapter")
    edit(tmp_path / "adapter", init_lora_weights=way)
    if way in ("pissa", "olora"):  # the others need their own data; PEFT's source says so of them
        with CheckpointReader(base) as stored:
            whole = AdaptedReader(stored, read_adapter(adapter), {})
            right = peft_from_disk(base, tmp_path / "adapter")
            assert not torch.allclose(whole.read(QUERY), right[QUERY], atol=1e-3), "PEFT changes the base"
    with pytest.raises(ModelError, match=f"init_lora_weights '{way}' may change the base"):
        read_adapter(tmp_path / "adapter")


def test_every_field_of_peft_is_known_to_ask_for_nothing_or_refused_by_name(made: Make, tmp_path: Path) -> None:
    """Also a field that PEFT has not yet."""
    _, adapter, _ = made("qwen3", {}, {"target_modules": ["q_proj"]})
    shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((adapter / CONFIG).read_text())
    computed_with = {"r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
    for name in [*peft.LoraConfig.__dataclass_fields__, "a_field_of_next_year"]:
        if name in computed_with or name == "peft_type":
            continue
        (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config | {name: {"some": 1}}))
        if name in ASK_NOTHING:
            read_adapter(tmp_path / "adapter")
        else:
            with pytest.raises(ModelError, match=f"{name} {{'some': 1}} is not merged; merge it with PEFT"):
                read_adapter(tmp_path / "adapter")


ASK_NOTHING = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "lora_dropout",
    "bias", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config"}
QUERY = "model.layers.0.self_attn.q_proj.weight"
REFUSED: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "no adapter": (lambda path: (path / CONFIG).unlink(), ModelError, "there is no adapter_config.json"),
    "another kind": (lambda path: edit(path, peft_type="LOHA"), ModelError, "peft_type is 'LOHA'; LORA is merged"),
    "what is not merged": (lambda path: edit(path, fan_in_fan_out=True), ModelError, "fan_in_fan_out True is not"),
    "no weights": (lambda path: (path / WEIGHTS).rename(path / "adapter_model.bin"), WeightsError,
                   "adapter_model.bin cannot be used"),
    "cut short": (lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-9]), WeightsError,
                  "cannot be read"),
    "half a pair": (lambda path: change(path, drop="layers.0.self_attn.q_proj.lora_B"), WeightsError,
                    "q_proj: one of lora_A and lora_B is missing"),
    "another rank": (lambda path: edit(path, r=5), WeightsError, "are no pair of rank 5"),
    "a name nobody knows": (lambda path: change(path, rename=("q_proj", "query_proj")), WeightsError,
                            "query_proj.weight: the checkpoint has no such tensor"),
    "an unknown tensor": (lambda path: change(path, rename=("q_proj.lora_A.weight", "q_proj.lora_C.weight")),
                          WeightsError, "lora_C.weight: not known"),
    "rank 0": (lambda path: edit(path, r=0), ModelError, "adapter_config.json: r 0: Input should be greater"),
    "rank of a pattern 0": (lambda path: edit(path, rank_pattern={"q_proj": 0}), ModelError, "rank_pattern.q_proj 0"),
    "alpha as text": (lambda path: edit(path, lora_alpha="6"), ModelError, "lora_alpha '6': Input should be a valid"),
    "no alpha": (lambda path: edit(path, lora_alpha=None), ModelError, "lora_alpha None"),
    "alpha is no number": (lambda path: edit(path, lora_alpha=float("nan")), ModelError, "lora_alpha nan"),
    "endless alpha": (lambda path: edit(path, lora_alpha=float("inf")), ModelError, "lora_alpha inf"),
    "alpha beyond float32": (lambda path: edit(path, alpha_pattern={"q": 1e39}), ModelError, r"alpha_pattern.q 1e\+39"),
    "patterns as a list": (lambda path: edit(path, rank_pattern=["q_proj"]), ModelError, "rank_pattern .'q_proj'"),
    "no pattern": (lambda path: edit(path, alpha_pattern={"(": 3}), ModelError, "alpha_pattern has the pattern"),
    "a pattern of too many turns": (lambda path: edit(path, alpha_pattern={"((.?){999}){999}x": 3}), ModelError,
                                    "it takes more than 20000 steps for one name"),
    "magnitudes missing": (lambda path: edit(path, use_dora=True), WeightsError, "its magnitudes are missing"),
}


def edit(path: Path, **settings: Any) -> None:
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | settings))


def change(path: Path, drop: str | None = None, rename: tuple[str, str] = ("", "")) -> None:
    tensors = {name.replace(*rename): tensor for name, tensor in load_file(path / WEIGHTS).items()
               if drop is None or drop not in name}
    save_file(tensors, path / WEIGHTS)


@pytest.mark.parametrize("what", REFUSED)
def test_an_adapter_that_does_not_fit_is_an_error(what: str, made: Make, tmp_path: Path) -> None:
    spoil, error, message = REFUSED[what]
    base, adapter, _ = made("qwen3", {}, {"target_modules": ["q_proj"]})
    shutil.copytree(adapter, tmp_path / "adapter")
    spoil(tmp_path / "adapter")
    with pytest.raises(error, match=message), CheckpointReader(base) as stored:
        AdaptedReader(stored, read_adapter(tmp_path / "adapter"), {})


def test_a_quantised_base_is_refused(made: Make, tmp_path: Path) -> None:
    base, adapter, _ = made("qwen3", {}, {"target_modules": ["q_proj"]})
    shutil.copytree(base, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lora .*: the checkpoint's weights are quantised \(fp8\)"):
        LLM(tmp_path / "base", lora=str(adapter), platform="cpu", **SMALL)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader(folder) as reader:
        return {name: reader.read(name) for name in sorted(reader.names)}


def assert_close(found: torch.Tensor, right: torch.Tensor) -> None:
    """One rounding of the product's order."""
    torch.testing.assert_close(found.float(), right, rtol=1e-5, atol=1e-6 * float(right.abs().max()) + 1e-6)
