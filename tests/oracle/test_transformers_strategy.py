"""Families that nobody here wrote code for, through the generic strategy: tokens and logits are transformers' own.

The oracle is the same checkpoint in transformers with its own attention and masks.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_runner import LLM
from npu_runner.errors import ConfigError, ModelError, WeightsError
from npu_runner.models import transformers_probe
from npu_runner.models.transformers_model import check_call
from npu_runner.platforms.cpu.attention import CpuAttention
from npu_runner.strategies import pick_strategy, transformers_model
from tests.full_set import only_full
from tests.oracle.foreign_checkpoints import make_foreign_checkpoint, write_config_alone
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, assert_equals_reference, assert_prompt_rows_equal, greedy

transformers = pytest.importorskip("transformers")

TEXTS = ["which", "which of the two pictures shows a circle?", "a b c d e f g " * 20, "colour " * 90]
# What each adds to plain Llama stands beside it.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma": {},  # embeddings scaled in the forward, zero-centred norms
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0},  # a soft cap behind the head
    "gemma3_text": {},  # embeddings that scale themselves, another rotary base in layers that slide
    "phi": {},  # partial rotary, biases, attention beside the MLP
    "phi3": {},  # fused projections
    "glm4": {},  # interleaved partial rotary, four norms a layer
    "olmo3": {},  # norms behind, not before
    "olmoe": {},  # experts
    "mixtral": {},  # experts
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.1},
    "starcoder2": {},  # layer norms, biases
    "stablelm": {"use_qkv_bias": True},
    "cohere": {"logit_scale": 0.25, "num_key_value_heads": 2},  # logits scaled, one norm a layer
    "gpt_neox": {},  # one projection for query, key and value
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 2048},  # learned positions
    "opt": {},  # learned positions with an offset, a decoder within the base
    "smollm3": {"no_rope_layers": [1, 0, 1]},  # layers without positions
    "ernie4_5": {},  # interleaved rotary
    "exaone4": {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "helium": {},
}
ALONE = ("gemma3_text", "granite", "gpt2", "mixtral")
"""Windows, a scale of its own, learned positions, experts."""


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(model_type: str, **changes: Any) -> Path:
        key = repr((model_type, sorted(changes.items())))
        if key not in made:
            made[key] = make_foreign_checkpoint(tmp_path_factory.mktemp(model_type), model_type, **changes)
        return made[key]

    return make


def prompts_of(llm: LLM, texts: list[str] = TEXTS) -> list[Any]:
    return [llm.engine.processor.from_text(text) for text in texts]


@pytest.mark.parametrize("model_type", [
    *ALONE, *only_full("networks of transformers that ask our attention for nothing that others do not",
                       *(name for name in FAMILIES if name not in ALONE))])
def test_greedy_tokens_and_logits_equal_transformers(model_type: str, foreign: Any, platform_name: str) -> None:
    path: Path = foreign(model_type, **FAMILIES[model_type])
    assert isinstance(pick_strategy(path), transformers_model.TransformersStrategy)
    with LLM(path, platform=platform_name, max_num_batched_tokens=128, **SMALL) as llm:
        assert_prompt_rows_equal(path, llm, list(range(203, 3, -1)))
        assert_equals_reference(path, llm, prompts_of(llm))


# Whatever the scheduler and the cache do.
WORDS = [f"{word} {'which of the pictures ' * count}" for count, word in enumerate("abcdefg")]


@pytest.mark.parametrize(("num_tokens", "model_type"), [
    (33, "gpt2"), *only_full("each of four families with both sizes of chunks", (7, "gemma3_text"), (7, "granite"),
                             (7, "mixtral"), (7, "gpt2"), (33, "gemma3_text"), (33, "granite"), (33, "mixtral"))])
def test_chunked_prefill_equals_whole(num_tokens: int, model_type: str, foreign: Any, platform_name: str) -> None:
    path: Path = foreign(model_type, **FAMILIES[model_type])
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens, **SMALL) as llm:
        assert_equals_reference(path, llm, prompts_of(llm, WORDS))


@pytest.mark.parametrize("model_type", ["gemma3_text", *only_full(
    "families without windows; schedulers do not know them", "granite", "mixtral", "gpt2")])
def test_a_warm_prefix_cache_equals_a_cold_one(model_type: str, foreign: Any, platform_name: str) -> None:
    path: Path = foreign(model_type, **FAMILIES[model_type])
    with LLM(path, platform=platform_name, **SMALL) as llm:
        prompts = prompts_of(llm)
        cold = llm.generate(prompts, greedy())
        hits = llm.stats().prefix_cache_hits
        warm = llm.generate(prompts, greedy())
        assert [output.token_ids for output in warm] == [output.token_ids for output in cold]
        assert llm.stats().prefix_cache_hits > hits
        assert_equals_reference(path, llm, prompts)


@pytest.mark.full("schedulers do not know families; windows stay in test_sliding_window.py")
@pytest.mark.parametrize("model_type", ["gemma3_text", "granite", "mixtral", "gpt2"])
def test_preempted_sequences_end_as_if_undisturbed(model_type: str, foreign: Any, platform_name: str) -> None:
    if platform_name != "cpu":
        pytest.skip("blocks of 4 tokens are the CPU's")
    path: Path = foreign(model_type, **FAMILIES[model_type])
    num_kv_heads = pick_strategy(path).read_config().num_kv_heads
    block_bytes = 2 * 3 * 4 * num_kv_heads * 16 * 4  # k and v, layers, block_size, kv heads, head_dim, bytes
    with LLM(path, platform=platform_name, block_size=4, kv_cache_bytes=24 * block_bytes, max_num_seqs=8,
             max_model_len=72, dtype="float32", enable_prefix_caching=False) as llm:
        assert_equals_reference(path, llm, prompts_of(llm, WORDS), num_tokens=MAX_NEW_TOKENS)
        assert llm.stats().num_preemptions > 0, "the test must force preemption"


MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SLIDING: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": MIXED}, "exaone4": {"layer_types": MIXED}, "cohere2": {"layer_types": MIXED},
    "starcoder2": {},  # every layer
}


@pytest.mark.full("four families with two windows; tokens of families that slide stay, and our own windows")
@pytest.mark.parametrize("model_type", SLIDING)
@pytest.mark.parametrize("window", [2, 24])
def test_sliding_windows_equal_transformers(window: int, model_type: str, foreign: Any, platform_name: str) -> None:
    path: Path = foreign(model_type, sliding_window=window, **SLIDING[model_type])
    layers = pick_strategy(path).read_config().attention_layers
    kinds = SLIDING[model_type].get("layer_types", MIXED[:1] * 3)
    assert [layer.sliding_window for layer in layers] == [window if kind == MIXED[0] else None for kind in kinds]
    with LLM(path, platform=platform_name, max_num_batched_tokens=33, **SMALL) as llm:
        assert_equals_reference(path, llm, prompts_of(llm))


@pytest.mark.parametrize("model_type", ["gemma3_text", *only_full("experts, which float32 has, too", "mixtral")])
def test_half_precision_begins_like_transformers(model_type: str, foreign: Any, platform_name: str) -> None:
    """In float32: transformers' own bfloat16 rounds experts more often, and begins one answer otherwise."""
    path: Path = foreign(model_type, **FAMILIES[model_type])
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with LLM(path, platform=platform_name, max_num_batched_tokens=33, **{**SMALL, "dtype": "bfloat16"}) as llm:
        prompts = prompts_of(llm)
        with torch.inference_mode():
            first = [int(oracle(torch.tensor([prompt.token_ids])).logits[0, -1].argmax()) for prompt in prompts]
        assert [output.token_ids[0] for output in llm.generate(prompts, greedy(1))] == first


def test_rotary_that_grows_is_the_original_one_within_its_length(foreign: Any, platform_name: str) -> None:
    path: Path = foreign("phi3", **LONGROPE)
    with LLM(path, platform=platform_name, max_num_batched_tokens=128, **{**SMALL, "max_model_len": 512}) as llm:
        assert_equals_reference(path, llm, prompts_of(llm, TEXTS[:3]))


LONGROPE: dict[str, Any] = {"rope_parameters": {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0 + step / 8 for step in range(8)],
    "long_factor": [4.0] * 8, "original_max_position_embeddings": 512, "factor": 4.0},
    "original_max_position_embeddings": 512}


# -- no mask over all pairs of tokens ---------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the most elements that two equal sizes of a tensor had."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.over_pairs: list[tuple[int, ...]] = []
        self.seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for made in tree_leaves(output):
            if isinstance(made, torch.Tensor):
                self.seen += made.shape[:2].count(self.num_tokens)
                if list(made.shape).count(self.num_tokens) > 1:
                    self.over_pairs.append(tuple(made.shape))
        return output


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt2", *only_full(
    "transformers' masks are made in one place; a family with windows stays, and one without", "mixtral", "exaone4")])
def test_no_mask_over_all_pairs_of_tokens_is_made(model_type: str, foreign: Any, monkeypatch: Any) -> None:
    from transformers import masking_utils

    asked: list[str] = []
    mapping = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    path: Path = foreign(model_type, **FAMILIES[model_type])
    with LLM(path, platform="cpu", max_num_batched_tokens=1000, **SMALL) as llm:
        for name, function in list(mapping.items()):
            monkeypatch.setitem(mapping, name, lambda *args, _name=name, _function=function, **more: (
                asked.append(_name), _function(*args, **more))[1])
        prompts = [list(range(1, 200)) * 1, list(range(1, 200))[::-1]]  # 199 each, 398 in one step
        with Largest(398) as watch:
            llm.generate(prompts, greedy(3))
    assert watch.seen, "both prompts must lie in one step"
    assert not watch.over_pairs
    assert not asked, "transformers' mask interface must not be asked"


# -- what is not served, by name and before memory is taken: these folders hold no weights ----------------------------

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "state (mamba)": ("mamba", {}, "keep a state of another kind"),
    "hybrid state (jamba)": ("jamba", {}, "keep a state of another kind"),
    "convolution over tokens (lfm2)": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "'conv'"),
    "encoder-decoder (t5)": ("t5", {}, "no AutoModelForCausalLM"),
    "cross attention (bart)": ("bart", {}, "cross attention"),
    "both directions (bert)": ("bert", {}, "masks attention in a way of its own"),
    "latent attention (deepseek_v3)": ("deepseek_v3", {}, "latent .kv_lora_rank 512"),
    "shared keys and values (gemma3n_text)": ("gemma3n_text", {
        "num_hidden_layers": ..., "sliding_window": ..., "intermediate_size": ...}, "layers share keys and values"),
    "head dims that differ (gemma4_text)": ("gemma4_text", {
        "num_hidden_layers": ..., "head_dim": ..., "num_kv_shared_layers": 0}, "head_dim differs by layer"),
    "soft cap on attention (gemma2)": ("gemma2", {}, "attn_logit_softcapping 50"),
    "sinks (gpt_oss)": ("gpt_oss", {"num_hidden_layers": 2, "layer_types": ...}, "passes s_aux to attention"),
    "chunked attention (llama4_text)": ("llama4_text", {"num_hidden_layers": ...}, "'chunked_attention'"),
    "value of another size (mimo_v2_flash)": ("mimo_v2_flash", {"v_head_dim": 8}, "query, key and value of shapes"),
    "attention of its own (gptj)": ("gptj", {}, "does not go through transformers' attention interface"),
    "alibi (falcon)": ("falcon", {"alibi": True, "head_dim": ...}, "alibi"),
    "alibi (bloom)": ("bloom", {}, "does not go through transformers' attention interface"),
    "bias over all pairs of tokens (doge)": ("doge", {}, "makes a mask or bias over all pairs of tokens"),
    "neighbours mixed (blt)": ("blt", {"num_hidden_layers": ...}, "mixes neighbouring tokens outside attention"),
    "images without a class (phi4_multimodal)": ("phi4_multimodal", {}, "no AutoModelForImageTextToText"),
    "quantised in a way that is not read": ("gemma", {"quantization_config": {"quant_method": "hqq"}},
                                            r"quantised \(hqq\)"),
}


@pytest.mark.parametrize("what", [*(what for what in REFUSED if "gemma4" not in what), *only_full(
    "imports a family of several media for seconds", "head dims that differ (gemma4_text)")])
def test_what_is_not_served_is_named_before_memory_is_taken(what: str, tmp_path: Path) -> None:
    model_type, changes, message = REFUSED[what]
    path = write_config_alone(tmp_path, model_type, **changes)
    with pytest.raises(ModelError, match=message):
        LLM(path, platform="cpu", **SMALL)


@pytest.mark.parametrize(("config", "message"), [
    ({"model_type": "nobodys", "auto_map": {"AutoModelForCausalLM": "code.Nobodys"}},
     "'nobodys' is not supported .the checkpoint's own code, auto_map, is never run.; supported are"),
    ({"model_type": "nobodys"}, "model_type 'nobodys' is not supported; supported are "),
    ({}, "model_type None is not supported; supported are "),
    ({"model_type": "mamba", "layer_types": ["full_attention"]},
     "model_type 'mamba': transformers .* does not take this config"),
])
def test_a_config_that_transformers_does_not_know_is_refused(config: dict[str, Any], message: str,
                                                             tmp_path: Path) -> None:
    path = write_config_alone(tmp_path, "gemma")
    (path / "code.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        LLM(path, platform="cpu", **SMALL)


def test_code_beside_a_family_that_transformers_knows_is_not_run(foreign: Any, tmp_path: Path) -> None:
    path = shutil.copytree(foreign("gemma"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "code.py").write_text("raise SystemExit('the code of a checkpoint was run')")
    with LLM(path, platform="cpu", **SMALL) as llm:
        assert_equals_reference(foreign("gemma"), llm, prompts_of(llm, TEXTS[:1]))


@pytest.mark.parametrize(("settings", "message"), [
    ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "enable_expert_parallel"),
    ({"tensor_parallel_size": 3}, "tensor_parallel_size 3: num_attention_heads 4 does not divide"),
    ({"graph_mode": "max-autotune"}, "graph_mode 'max-autotune'.*never tried with a compiler"),
])
def test_settings_that_it_does_not_serve_are_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(write_config_alone(tmp_path, "gemma"), platform="cpu", **SMALL, **settings)


def test_rotary_that_grows_is_refused_beyond_its_original_length(tmp_path: Path) -> None:
    path = write_config_alone(tmp_path, "phi3", **LONGROPE)
    with pytest.raises(ConfigError, match=r"'longrope' depends on the longest position.*at most 512"):
        LLM(path, platform="cpu", **SMALL)


def test_the_start_says_that_it_is_the_generic_path(foreign: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(foreign("gemma"), platform="cpu", **SMALL):
        assert "GemmaForCausalLM of transformers is served by the generic one, which is slower" in caplog.text


# -- what only shows in a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "part"), [("float32", 0.1), ("bfloat16", 1.0)])
def test_a_network_that_mixes_tokens_outside_attention_does_not_start(dtype: str, part: float, foreign: Any,
                                                                      monkeypatch: Any) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaMLP

    forward = GemmaMLP.forward
    monkeypatch.setattr(GemmaMLP, "forward", lambda self, x: forward(self, x) + part * x.roll(1, dims=1))
    with pytest.raises(ModelError, match=r"a token changes by .* with what else lies in its step"):
        LLM(foreign("gemma"), platform="cpu", **{**SMALL, "dtype": dtype})


def test_a_network_that_counts_positions_itself_does_not_start(foreign: Any, monkeypatch: Any) -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRotaryEmbedding

    forward = GemmaRotaryEmbedding.forward

    def counting(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, torch.arange(x.shape[1], device=x.device)[None])

    monkeypatch.setattr(GemmaRotaryEmbedding, "forward", counting)
    with pytest.raises(ModelError, match="a token changes by"):
        LLM(foreign("gemma"), platform="cpu", **SMALL)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mask_that_shows_only_with_weights_does_not_start(dtype: str, foreign: Any, monkeypatch: Any) -> None:
    from transformers.models.gemma import modeling_gemma

    causal = modeling_gemma.create_causal_mask

    def seeing_ahead(**given: Any) -> Any:
        """The first eight tokens see each other, as those of an image or a prefix do."""
        mask = causal(**given)
        if mask is not None and mask.device.type != "meta":
            mask[..., :8, :8] = 0.0
        return mask

    monkeypatch.setattr(modeling_gemma, "create_causal_mask", seeing_ahead)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn: attention differs from transformers' own by"):
        LLM(foreign("gemma"), platform="cpu", **{**SMALL, "dtype": dtype})


def test_a_window_that_is_not_served_does_not_start(foreign: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(transformers_probe, "_window_of", lambda mask_function, longest: None)
    path: Path = foreign("exaone4", **FAMILIES["exaone4"])
    with pytest.raises(ModelError, match="attention differs from transformers' own"):
        LLM(path, platform="cpu", **SMALL)


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_operator_that_is_wrong_does_not_start(name: str, foreign: Any, monkeypatch: Any) -> None:
    attend = getattr(CpuAttention, name)
    monkeypatch.setattr(CpuAttention, name, lambda *args, **more: attend(*args, **more) * 1.01)
    with pytest.raises(ModelError, match=r"attention differs from transformers' own by [01]\."):
        LLM(foreign("gemma"), platform="cpu", **SMALL)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
def test_a_model_of_few_positions_is_compared_with_as_many_tokens(num_tokens: int, foreign: Any) -> None:
    with LLM(foreign("gemma"), platform="cpu", **{**SMALL, "max_model_len": 1 + num_tokens}) as llm:
        assert llm.generate([list(range(3, 3 + num_tokens))], greedy(1))


@pytest.mark.parametrize(("mask", "more", "message"), [
    (None, {"softcap": 50.0}, "a.b passes softcap to attention"),
    (None, {"position_bias": torch.ones(1)}, "a.b passes position_bias to attention"),
    (None, {"s_aux": torch.ones(4)}, "a.b passes s_aux to attention"),  # sinks
    (None, {"indices": torch.ones(1)}, "a.b passes indices to attention"),  # a sparse choice of keys
    (None, {"token_type_ids": torch.ones(1)}, "a.b passes token_type_ids to attention"),
    (None, {"something_new": False}, "a.b passes something_new to attention"),
    (torch.ones(1), {}, "a.b brings an attention mask"),
    (None, {"is_causal": False}, "a.b attends in both directions"),
    (None, {"dropout": 0.1}, "a.b asks for dropout"),
])
def test_an_argument_of_attention_is_never_dropped(mask: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_call("a.b", mask, more)


def test_arguments_that_change_nothing_are_taken() -> None:
    check_call("a.b", None, {"dropout": 0.0, "softcap": None, "sliding_window": 4096, "is_causal": True,
                             "position_ids": torch.ones(1)})


# -- weights ----------------------------------------------------------------------------------------------------------

NORM = "model.norm.weight"


@pytest.mark.parametrize(("edit", "message"), [
    (lambda tensors: tensors.pop(NORM), f"missing: {NORM}"),
    (lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)}), "left over: model.extra.weight"),
    (lambda tensors: tensors.update({NORM: torch.ones(3)}), rf"misshapen: {NORM} is \[3\], config.json makes"),
    (lambda tensors: tensors.update({NORM: torch.ones(64, dtype=torch.int8)}), f"{NORM} holds I8"),
])
def test_weights_that_do_not_fit_are_named(edit: Callable[[Any], object], message: str, foreign: Any,
                                           tmp_path: Path) -> None:
    path = shutil.copytree(foreign("gemma"), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=message):
        LLM(path, platform="cpu", **SMALL)


# -- transformers stays out of everything else ------------------------------------------------------------------------


@pytest.mark.full("a start from nothing; one with answers stays (tests/runner/test_start.py)")
def test_a_family_of_our_own_imports_no_transformers(checkpoint: Any) -> None:
    program = ("import sys; from npu_runner import LLM, SamplingParams\n"
               "with LLM(sys.argv[1], platform='cpu', max_num_seqs=2, max_model_len=64) as llm:\n"
               "    llm.generate(['which'], SamplingParams(max_tokens=2))\n"
               "sys.exit('transformers' in sys.modules)")
    subprocess.run([sys.executable, "-c", program, str(checkpoint("llama"))], check=True)


def test_the_network_is_transformers_own(foreign: Any) -> None:
    with LLM(foreign("gemma"), platform="cpu", **SMALL) as llm:
        model: Any = llm.engine._executor._runner.model  # type: ignore[attr-defined]
        assert type(model.causal_lm).__module__ == "transformers.models.gemma.modeling_gemma"
        assert all(isinstance(parameter, nn.Parameter) for parameter in model.causal_lm.parameters())
