"""CANN 8.5 under a wheel of TorchNPU 26.2.0: what is served gives the tokens of the cpu platform, the rest is refused
by name before weights load. An operator that computes otherwise ends the start, unless another kernel does its job."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.quantised.writing import quantise
from tests.cann.environment import has_real_cann, run_python
from tests.families import FAMILIES
from tests.npu.family_cases import assert_close_at_the_first_divergence
from tests.npu.layer_kinds import KINDS
from tests.npu.measured_layers import assert_no_cache_is_copied, launches_of, measured
from tests.npu.programs.generate import Case
from tests.npu.running import SMALL, assert_graphs_are_whole, on_cpu, on_npu
from tests.npu.start import host_with, start

pytestmark = [pytest.mark.npu, pytest.mark.skipif(has_real_cann(), reason="a real host has the CANN it has")]

SERVED: dict[str, dict[str, Any]] = {"qwen3": {"num_hidden_layers": 1}, "qwen3_vl": {"rope_parameters": {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [24, 20, 20]}}}


def cann85(folder: Path) -> dict[str, str]:
    return host_with("8.5.0", folder)


def cases(checkpoint: Any, mode: str, model_types: Sequence[str] = tuple(SERVED), **settings: Any) -> list[Case]:
    found = []
    for name in model_types:
        model = checkpoint(name, **{**FAMILIES[name].npu[0], **SERVED[name], "head_dim": 128})
        graphs = {} if mode == "eager" else {"graph_batch_sizes": [4]}
        prompts, count = ("images", 3) if name == "qwen3_vl" else ("texts", 5)
        found.append(Case(str(model), {"graph_mode": mode, "dtype": "bfloat16", **SMALL, **graphs, **settings}, prompts,
                          count, max_tokens=8, logprobs=8))
    return found


def assert_equal_cpu(asked: list[Case], folder: Path, **variables: str) -> str:
    """Tokens are the cpu's, but where two are as good as equal: bfloat16 rounds elsewhere on the cpu. What was said."""
    results = on_npu(asked, folder, allow_fp32_attention=False, **cann85(folder), **variables)
    for case, result in zip(asked, results, strict=True):
        assert_close_at_the_first_divergence(result, on_cpu(case))
        if case.settings.get("tensor_parallel_size", 1) > 1:  # graphs are made in the ranks' processes
            assert case.settings["graph_mode"] == "eager" or result["graphs"] == "4"
        elif case.settings["graph_mode"] != "eager":
            assert_graphs_are_whole(result, [4])
        assert result["after"].get("fallbacks", {}) == {}, "nothing leaves the AI core, nor sorts indices"
        assert "not verified on any 8.5" in result["stderr"]
    return str(results[0]["stderr"])


def test_a_dense_model_captured(checkpoint: Any, tmp_path: Path) -> None:
    assert_equal_cpu(cases(checkpoint, "reduce-overhead", ["qwen3"]), tmp_path)


@pytest.mark.full("each model in its other modes; captured without a tower stays, and eager with its second choice")
def test_dense_models_in_other_modes(checkpoint: Any, tmp_path: Path) -> None:
    assert_equal_cpu([*cases(checkpoint, "eager"), *cases(checkpoint, "reduce-overhead", ["qwen3_vl"])], tmp_path)


@pytest.mark.full("two ranks on two cores; one rank stays")
@pytest.mark.parametrize("mode", ["eager", "reduce-overhead"])
def test_two_ranks(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    asked = cases(checkpoint, mode, tensor_parallel_size=2)
    assert_equal_cpu(asked, tmp_path)


@pytest.mark.full("the other way of capturing; the usual one stays")
def test_recorded_graphs(checkpoint: Any, tmp_path: Path) -> None:
    assert_equal_cpu(cases(checkpoint, "reduce-overhead", ["qwen3"]), tmp_path,
                     NPU_RUNNER_ASCEND_CAPTURE="recorded")


@pytest.mark.full("two processes; the launches on a newer CANN stay (test_decode_cost.py)")
@pytest.mark.parametrize("mode", ["eager", "reduce-overhead"])
@pytest.mark.parametrize("refusals", [{}, {"fail": "aclnnScatterPaKvCache:1+:561002"}], ids=["usual", "fallback"])
def test_a_layer_has_as_many_launches_as_on_a_newer_cann(refusals: dict[str, str], mode: str, checkpoint: Any,
                                                         tmp_path: Path) -> None:
    cost = measured(KINDS["dense"], mode, checkpoint, tmp_path, **cann85(tmp_path), **refusals)
    assert sum(launches_of(cost).values()) == KINDS["dense"].launches[mode] == 13
    assert_no_cache_is_copied(cost)


# Of the cache write and the tower's attention, the emulation refuses the first choice.
REFUSES_FIRST = {"fail": "aclnnScatterPaKvCache:1+:561002", "plain_tnd": "0"}


def assert_fallbacks(stderr: str) -> None:
    for said in (r"the cache write, 4/2 heads of 128 \(npu_scatter_pa_kv_cache, bfloat16\): refused, .*561002",
                 "cache_write: _npu_reshape_and_cache instead",
                 r"a layer of the vision tower, 2 heads of \d+ \(npu_fused_infer_attention_score, bfloat16\): refused",
                 "vision: npu_fusion_attention instead"):
        assert re.search(said, stderr), stderr[-4000:]


def test_tokens_stay_where_a_first_choice_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    assert_fallbacks(assert_equal_cpu(cases(checkpoint, "eager", ["qwen3_vl"]), tmp_path, **REFUSES_FIRST))


@pytest.mark.full("captured, in both ways; an eager run stays")
@pytest.mark.parametrize("capture", ["compiled", "recorded"])
def test_captured_graphs_hold_the_fallbacks(capture: str, checkpoint: Any, tmp_path: Path) -> None:
    assert_fallbacks(assert_equal_cpu(cases(checkpoint, "reduce-overhead", ["qwen3_vl"]), tmp_path, **REFUSES_FIRST,
                                      NPU_RUNNER_ASCEND_CAPTURE=capture))


def bare(model: Path, folder: Path) -> str:
    """The same checkpoint without weights, so that nobody can have read them."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    return str(folder)


REFUSED = """
import json, sys
from npu_runner import LLM
from npu_runner.errors import ConfigError
for model, settings in json.loads(sys.argv[1]):
    try:
        LLM(model, platform="npu", max_model_len=512, max_num_seqs=2, **settings)
    except ConfigError as refusal:
        print("REFUSED", refusal)
"""


def test_what_is_not_served_is_refused_by_name_before_weights(checkpoint: Any, tmp_path: Path) -> None:
    dense = bare(checkpoint("qwen3", num_hidden_layers=1, head_dim=128), tmp_path / "dense")
    narrow = bare(checkpoint("qwen3", num_hidden_layers=1, head_dim=64), tmp_path / "narrow")
    hybrid = bare(checkpoint("qwen3_5_text", **FAMILIES["qwen3_5_text"].ranks), tmp_path / "hybrid")
    experts = bare(checkpoint("qwen3_moe", head_dim=128), tmp_path / "experts")
    window = bare(checkpoint("mistral", num_hidden_layers=1, head_dim=128, sliding_window=20), tmp_path / "window")
    eager, brain = {"graph_mode": "eager"}, {"dtype": "bfloat16"}
    asked = {
        "graph_mode max-autotune on CANN 8.5.0": (dense, {**brain, "graph_mode": "max-autotune"}),
        "dtype float16 on CANN 8.5.0": (dense, {"dtype": "float16", **eager}),
        "dtype float32 on CANN 8.5.0": (dense, {"dtype": "float32", "attention_backend": "fused", **eager}),
        "head dim 64 on CANN 8.5.0": (narrow, {**brain, **eager}),
        "Gated DeltaNet layers, head dim 32 on CANN 8.5.0": (hybrid, {**brain, **eager}),
        "layers of experts on CANN 8.5.0": (experts, {**brain, **eager}),
        "sliding windows on CANN 8.5.0": (window, {**brain, **eager}),
    }
    done = run_python(["-c", REFUSED, json.dumps(list(asked.values()))], forked=True, allow_fp32_attention=True,
                      **cann85(tmp_path))
    said = [line for line in done.stdout.splitlines() if line.startswith("REFUSED")]
    assert len(said) == len(asked), (done.stdout, done.stderr[-3000:])
    for line, words in zip(said, asked, strict=True):
        assert line.startswith(f"REFUSED {words}"), line
        assert "graph_mode to" in line or "install CANN 9.0 or newer, or set platform to cpu" in line


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = run_python(["-m", "tests.npu.programs.cases"], **cann85(tmp_path_factory.mktemp("cases")))
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


REFUSALS = {
    "rotated backwards": "npu_apply_rotary_pos_emb, 4/2 heads of 128 (bfloat16): wrong, differs from the CPU by",
    "values before keys": "the cache write, 4/2 heads of 128 (npu_scatter_pa_kv_cache, bfloat16): wrong",
    "a slot further": "the cache write, 4/2 heads of 128 (_npu_reshape_and_cache, bfloat16): wrong",
    "the last token not seen": "attention over the paged cache, 4/2 heads of 128 (bfloat16): wrong",
    "a scale of its own": "attention over the paged cache",
    "images see each other": "a layer of the vision tower, 2 heads of 72 (npu_fusion_attention, bfloat16): wrong",
    "the other gelu": "a layer of the vision tower",
    "NaN": "differs from the CPU by nan %",
    "equal heads": "attention over the paged cache, 2/2 heads of 128 (bfloat16): refused, ",
    "too many heads": "npu_apply_rotary_pos_emb, 72/8 heads of 128 (bfloat16): refused, ",
    "no NNAL": "(_npu_reshape_and_cache, bfloat16): refused, Please check that the nnal package is installed",
}
CHOICES: dict[str, dict[str, str]] = {
    "nothing": {}, "nothing of int8": {}, "nothing, captured": {},
    "rows by their squares": {"int8": ""}, "a norm by another scale": {"int8": ""}, "no such operator": {"int8": ""},
    "the bias twice": {"int8_static": ""}, "an offset that is lost": {"int8_static": ""},
    "old lengths": {"graphs": ""}, "a replay that fails": {"graphs": ""},
    "nothing, drafted": {}, "another row's blocks": {"drafts": "one query a row"},
    "an old split": {"drafts": "one query a row"}, "replays with drafts that fail": {"graphs": ""},
    "values before keys, first choice": {"cache_write": "_npu_reshape_and_cache"},
    "images see each other, first choice": {"vision": "npu_fusion_attention"},
    "a window of another scale": {"window": "gathered blocks"},
}


def test_an_operator_that_computes_otherwise_is_replaced_or_given_up_or_ends_the_start(said: dict[str, Any]) -> None:
    assert set(said) == {*REFUSALS, *CHOICES}
    for name, words in REFUSALS.items():
        assert words in said[name], name
    for name, kernels in CHOICES.items():
        assert said[name]["kernels"] == kernels, name
        assert len(said[name]["reasons"]) >= len(kernels)


@pytest.fixture(scope="module")
def models(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dense checkpoint, and the same in int8 with inputs that are rounded row by row."""
    model, folder = checkpoint("qwen3", num_hidden_layers=1, head_dim=128), tmp_path_factory.mktemp("w8a8") / "model"
    quantise(model, folder, "w8a8")
    return model, folder


@pytest.mark.full("three starts; the verdicts of its cases stay (the table of choices)")
def test_int8_is_multiplied_where_its_matmuls_are_right_and_else_dequantised_with_a_warning(
        models: tuple[Path, Path], tmp_path: Path) -> None:
    found = start(models[1], tmp_path / "right", "", graph_mode="eager")
    assert found["quantization"].startswith("compressed-tensors, int8 with dynamic inputs multiplied as int8; other")
    assert "fallbacks" not in found
    fail = "aclnnQuantMatmulWeightNz:1+:561002,aclnnQuantMatmulV5:1+:561002"
    without = start(models[1], tmp_path / "wrong", fail, graph_mode="eager")
    assert without["quantization"] == "compressed-tensors, dequantised at load, inputs not quantised"
    assert without["fallbacks"] == "int8 dequantised"
    assert (len(found["tokens"]), len(without["tokens"])) == (4, 4)
    asked = start(models[0], tmp_path / "wrong", fail, graph_mode="eager", quantization="int8")
    assert asked["refusal"].startswith("quantization 'int8': the matmuls of this device are wrong")


def test_a_start_ends_by_the_operators_name_before_weights_and_only_knowingly_goes_on(
        models: tuple[Path, Path], tmp_path: Path) -> None:
    ended = start(Path(bare(models[0], tmp_path / "bare")), tmp_path, "aclnnApplyRotaryPosEmbV2:1+:561003",
                  graph_mode="eager")
    assert "npu_apply_rotary_pos_emb, 4/2 heads of 128 (bfloat16): refused" in ended["refusal"]
    assert "561003: CANN has no kernel for this chip" in ended["refusal"]
    assert "NPU_RUNNER_ASCEND_CASES=off starts all the same" in ended["refusal"]
    assert not list(tmp_path.glob(".cache/npu_runner/cases/*")), "what ends a start is tried again at the next"


@pytest.mark.full("two starts; the verdicts of its cases stay (the table of choices)")
def test_steps_are_eager_where_a_replay_fails_unless_the_user_asked_for_graphs(
        models: tuple[Path, Path], tmp_path: Path) -> None:
    fail = "aclmdlRICaptureBegin:1+:107030"
    eager = start(models[0], tmp_path, fail)
    assert (eager["graph_mode"], eager["fallbacks"], len(eager["tokens"])) == ("eager", "graphs eager", 4)
    (kept,) = tmp_path.glob(".cache/npu_runner/cases/*.json")
    assert "captured graph" in kept.read_text()
    asked = start(models[0], tmp_path, fail, graph_mode="reduce-overhead")
    assert asked["refusal"].startswith("graph_mode 'reduce-overhead': a replayed graph computes otherwise")
