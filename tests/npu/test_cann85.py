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
from tests.npu.hosts import toolkit
from tests.npu.layer_kinds import KINDS
from tests.npu.measured_layers import assert_no_cache_is_copied, launches_of, measured
from tests.npu.programs.generate import Case
from tests.npu.programs.probes import OPERATORS, REPLAYS
from tests.npu.running import SMALL, assert_graphs_are_whole, on_cpu, on_npu

pytestmark = [pytest.mark.npu, pytest.mark.skipif(has_real_cann(), reason="a real host has the CANN it has")]

SERVED: dict[str, dict[str, Any]] = {"qwen3": {"num_hidden_layers": 1}, "qwen3_vl": {"rope_parameters": {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [24, 20, 20]}}}


def cann85(folder: Path) -> dict[str, str]:
    """The emulation's switch, and a toolkit that says the same."""
    return {"cann_version": "8.5.0", **toolkit(folder / "cann", "8.5.0")}


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
    for said in (r"the cache write \(npu_scatter_pa_kv_cache, 4/2 heads of 128\) is refused: .*; "
                 r"_npu_reshape_and_cache agrees and is used",
                 r"a layer of the vision tower \(npu_fused_infer_attention_score, 2 heads of \d+\) is refused: .*; "
                 r"npu_fusion_attention agrees and is used"):
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
def said(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("probes")
    model = checkpoint("qwen3", num_hidden_layers=1, head_dim=128)
    quantise(model, folder / "w8a8", "w8a8")
    done = run_python(["-m", "tests.npu.programs.probes", str(model), bare(model, folder / "bare"),
                       str(folder / "w8a8")], **cann85(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "stderr": done.stderr}


NAMES = {
    "rotated backwards": "the rotation of q and k (npu_apply_rotary_pos_emb, 4/2 heads of 128) differs",
    "values before keys": "the cache write (npu_scatter_pa_kv_cache, 4/2 heads of 128) differs",
    "a slot further": "the cache write",
    "the last token not seen": "attention over the paged cache (npu_fused_infer_attention_score, 4/2 heads of 128)",
    "a scale of its own": "attention over the paged cache",
    "images see each other":
        "a layer of the vision tower (npu_fused_infer_attention_score, 2 heads of 72) differs from the CPU by",
    "the other gelu": "a layer of the vision tower",
    "NaN": "a layer of the vision tower (npu_fused_infer_attention_score, 2 heads of 72) differs from the CPU by nan %",
    "equal heads":
        "8.5.0: attention over the paged cache (npu_fused_infer_attention_score, 2/2 heads of 128) is refused: ",
    "too many heads": "8.5.0: the rotation of q and k (npu_apply_rotary_pos_emb, 72/8 heads of 128) is refused: ",
    "old lengths": "a captured graph, replayed with other context lengths, differs from the CPU by",
    "a replay that fails": "a captured graph, replayed with other context lengths, fails: error code is 207000",
}


def test_every_probe_finds_an_operator_that_computes_otherwise(said: dict[str, Any]) -> None:
    assert (said["nothing"], said["nothing, captured"]) == ("", "")
    assert set(NAMES) == {*OPERATORS, *REPLAYS, "equal heads", "too many heads"} - {"nothing", "nothing, captured"}
    for name, words in NAMES.items():
        assert words in said[name], name


def test_a_job_that_another_kernel_does_right_goes_to_that_one_with_a_warning(said: dict[str, Any]) -> None:
    assert said["values before keys, first choice"] == "_npu_reshape_and_cache"
    assert said["images see each other, first choice"] == "npu_fusion_attention"
    for warned in (r"the cache write \(npu_scatter_pa_kv_cache, 4/2 heads of 128\) differs from the CPU by [\d.]+ % .*;"
                   r" _npu_reshape_and_cache agrees and is used",
                   r"a layer of the vision tower \(npu_fused_infer_attention_score, 2 heads of 72\) differs from .*; "
                   r"npu_fusion_attention agrees and is used"):
        assert re.search(warned, said["stderr"]), said["stderr"][-4000:]
    assert said["started with a second choice"]["cache_write"] == "_npu_reshape_and_cache"
    assert said["started with old lengths"]["cache_write"] == "npu_scatter_pa_kv_cache"


@pytest.mark.parametrize(("name", "kernels"), [
    ("values before keys", ("npu_scatter_pa_kv_cache", "_npu_reshape_and_cache")),
    ("images see each other", ("npu_fused_infer_attention_score", "npu_fusion_attention")),
])
def test_where_no_kernel_does_it_right_both_findings_are_said(name: str, kernels: tuple[str, str],
                                                              said: dict[str, Any]) -> None:
    first, second = (re.escape(kernel) for kernel in kernels)
    assert re.search(rf"\({first}, .*\) differs from the CPU by .*; .* \({second}, .*\) differs from the CPU by .*; "
                     "install CANN 9.0", said[name]), said[name]


def test_what_atb_lacks_is_the_second_finding(said: dict[str, Any]) -> None:
    assert re.search(r"\(npu_scatter_pa_kv_cache, .*\) differs from .*; .* \(_npu_reshape_and_cache, .*\) is refused: "
                     "Please check that the nnal package is installed", said["no NNAL"]), said["no NNAL"]


def test_int8_matmuls_are_probed_by_form(said: dict[str, Any]) -> None:
    assert said["nothing of int8"] == {}
    for name, form in {"rows by their squares": "int8", "a norm by another scale": "int8",
                       "the bias twice": "int8_static", "an offset that is lost": "int8_static"}.items():
        assert set(said[name]) == {form}, name
        assert re.match(r"differs from the CPU by [\d.]+ % of a row's length, 3 % is allowed", said[name][form])
    assert said["no such operator"] == {"int8": "is refused: error code is 207000"}


def test_int8_is_multiplied_where_its_matmuls_are_right_and_else_dequantised_with_a_warning(said: dict[str, Any]
                                                                                           ) -> None:
    found, without = said["started with int8"], said["started without int8"]
    assert found["quantization"].startswith("compressed-tensors, int8 with dynamic inputs multiplied as int8; other")
    assert without["quantization"] == "compressed-tensors, dequantised at load, inputs not quantised"
    assert (len(found["tokens"]), len(without["tokens"])) == (4, 4)
    assert re.search(r"a matmul with weights of the form int8 differs from the CPU by .*; such weights are dequantised",
                     said["stderr"]), said["stderr"][-4000:]
    assert said["asked for int8"].startswith("quantization 'int8': the matmuls of this device are wrong")


def test_a_start_ends_by_the_operators_name_before_weights_and_stays_eager_where_only_replays_differ(
    said: dict[str, Any]
) -> None:
    assert said["started backwards"].startswith("CANN 8.5.0: the rotation of q and k")
    eager = said["started with old lengths"]
    assert (len(eager["tokens"]), any(letter.isdigit() for letter in eager["graphs"].partition(" (")[0])) == (4, False)
    assert "run eagerly, as all do" in said["stderr"]
    assert "replayed with other context lengths, differs" in said["stderr"]
