"""`doctor --operators` over the emulation, and starts where an operator of a model is refused: another one serves."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from scripts.quantised.writing import quantise
from tests.cann.environment import ROOT, has_real_cann, run_python
from tests.families import FAMILIES
from tests.full_set import only_full
from tests.npu.running import unknown_launches
from tests.npu.start import start

pytestmark = pytest.mark.npu

DOCTOR = ["-m", "npu_runner", "doctor", "--platform", "npu", "--operators"]
# All but larger graphs, ranks and most layers, which take the emulation a minute.
ONLY = ("npu_", "linear", "cache", "window", "attention of", "tower", "norm", "of 8 experts", "Gated DeltaNet, ",
        "rule", "x 151936", "graph of 1 rows, int8", "graph of 1 rows, states")
KERNELS = ("npu_scatter_pa_kv_cache", "_npu_reshape_and_cache", "npu_fused_infer_attention_score",
           "npu_fusion_attention", "gathered blocks", "queries of a row together", "one query a row", "NZ", "ND",
           "npu_add_rms_norm_quant", "two operators", "npu_grouped_matmul_swiglu_quant_v2", "npu_dequant_swiglu_quant",
           "three operators")


# One case of each family, and of each choice between kernels for the layers that most models have.
SOME = ("npu_swiglu", "npu_rms_norm", "the cache write")


@pytest.mark.parametrize(("names", "kernels", "least"), [
    (SOME, KERNELS[:2], 6), *only_full("eighty cases and a soak take a minute; some stay", (
        (*ONLY, "replays with changing lengths for 0.02 minutes"), KERNELS, 80))], ids=["some", "all"])
def test_every_operator_is_right_and_a_report_says_so(names: tuple[str, ...], kernels: tuple[str, ...], least: int,
                                                      tmp_path: Path) -> None:
    out = tmp_path / "first hour"
    only = [word for name in names for word in ("--only", name)]
    soak = ["--soak", "0.02"] if names is not SOME else []
    done = run_python([*DOCTOR, "--out", str(out), *soak, *only], timeout=300, cann_version="9.2.0",
                      memory_bytes=4 << 30, counters=tmp_path / "counters_%p")
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-2000:])
    assert has_real_cann() or "aclnnRmsNorm" in "".join(path.read_text() for path in tmp_path.glob("counters_*"))
    assert unknown_launches(tmp_path) == set()
    report = json.loads((out / "operators.json").read_text())
    verdicts = {each["case"]: each["verdict"] for each in report["cases"]}
    assert len(verdicts) == len(report["cases"]) > least
    assert set(verdicts.values()) <= ({"right", "slow"} if not has_real_cann() else {"right"}), verdicts
    for name in names:
        assert any(name in case for case in verdicts), name
    for kernel in kernels:
        assert any(f"({kernel}, " in case for case in verdicts), kernel
    for case in verdicts:
        assert re.search(rf"^(right|slow) .*{re.escape(case)}", done.stdout, re.MULTILINE), case
    page = (out / "operators.txt").read_text()
    assert all(case in page for case in verdicts)
    with tarfile.open(f"{out}.tar.gz") as packed:
        assert {f"{out.name}/{name}" for name in ("operators.json", "operators.txt", "logs", "npu-smi.txt",
                                                  "health.txt")} <= set(packed.getnames())


@pytest.mark.full("larger graphs and two ranks; graphs of one row stay, and ranks that serve")
def test_larger_graphs_and_ranks_are_right(tmp_path: Path) -> None:
    done = run_python([*DOCTOR, "--only", "graph of", "--only", "ranks", "--out", str(tmp_path / "out")], timeout=600,
                      cann_version="9.2.0", memory_bytes=8 << 30)
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-2000:])
    cases = [each["case"] for each in json.loads((tmp_path / "out/operators.json").read_text())["cases"]]
    for words in ("of 128 rows, states", "of 512 rows, 3 drafts", "all_gather of 2 ranks, in a captured graph",
                  "all_to_all of 2 ranks, in a captured graph"):
        assert any(words in case for case in cases), words


@pytest.mark.full("a second run of the doctor; refusals stay in the table of test_cann85.py")
@pytest.mark.skipif(has_real_cann(), reason="nothing is refused there because a test asks for it")
def test_what_is_refused_has_its_code_and_a_remedy_and_only_some_are_computed(tmp_path: Path) -> None:
    done = run_python([*DOCTOR, "--only", "npu_swiglu", "--only", "topk", "--out", str(tmp_path / "out")],
                      cann_version="9.2.0", fail="aclnnSwiGlu:1+:561003")
    assert done.returncode == 1
    found = {each["case"].partition(",")[0]: each for each in json.loads((tmp_path / "out/operators.json").read_text())[
        "cases"]}
    assert set(found) == {"npu_swiglu", "topk of 64"}
    assert found["npu_swiglu"]["verdict"] == "refused"
    assert "561003" in found["npu_swiglu"]["message"]
    remedy = found["npu_swiglu"]["remedy"]
    assert "CANN has no kernel for this chip" in remedy
    worst, *others = (tmp_path / "out/operators.txt").read_text().splitlines()[2:]
    assert re.match("refused +npu_swiglu, .*561003", worst)
    assert worst.endswith(remedy)
    assert any(re.match("(warning|failed) +.*: .*; ", line) for line in others), "what the host lacks, with its remedy"
    assert found["topk of 64"]["verdict"] in ("right", "slow")
    assert "2 refused" in done.stdout, "in both dtypes"


FALLBACKS: dict[str, tuple[str, str]] = {
    "layout ND": ("dense", "aclnnQuantMatmulWeightNz:1+:207001"),
    "norm two operators": ("dense", "aclnnAddRmsNormDynamicQuant:1+:561002,aclnnAddRmsNormDynamicQuantV2:1+:561002"),
    "experts npu_dequant_swiglu_quant": ("experts", "aclnnGroupedMatmulSwigluQuantWeightNzV2:1+:561002"),
    "experts three operators": ("experts", "aclnnGroupedMatmulSwigluQuantWeightNzV2:1+:561002,"
                                           "aclnnDequantSwigluQuantV2:1+:561002"),
}


@pytest.mark.skipif(has_real_cann(), reason="nothing is refused there because a test asks for it")
@pytest.mark.parametrize("fallback", only_full(
    "two starts each; two fallbacks of one start stay (test_cann85.py)", "layout ND", "norm two operators",
    "experts npu_dequant_swiglu_quant", "experts three operators"))
def test_a_refused_operator_is_replaced_with_a_warning_and_a_setting_and_tokens_stay(
        fallback: str, checkpoint: Any, tmp_path: Path) -> None:
    kind, fail = FALLBACKS[fallback]
    if kind == "experts":
        model = checkpoint("qwen3_moe", **{**FAMILIES["qwen3_moe"].npu[0], "moe_intermediate_size": 128})
    else:
        model = checkpoint("qwen3", num_hidden_layers=1, head_dim=128)
    quantise(model, tmp_path / "model", "w8a8")
    other = start(tmp_path / "model", tmp_path / "other", fail, cann="9.2.0", graph_mode="eager")
    is_passing = "207001" in fail  # another job has the memory: the next start of this host is right
    assert is_passing == (not kept_in(tmp_path / "other")) == ("operators are compared again" in other["stderr"])
    usual = start(tmp_path / "model", tmp_path / ("other" if is_passing else "usual"), "", cann="9.2.0",
                  graph_mode="eager")
    assert "fallbacks" not in usual
    assert other["fallbacks"] == fallback
    assert other["quantization"] == usual["quantization"]
    job, _, kernel = fallback.partition(" ")
    assert f"{job}: {kernel} instead, for the operator above; npu-runner doctor --operators" in other["stderr"]
    # Experts of random weights lie so close that rounding decides between them.
    assert usual["tokens"] == other["tokens"] if kind == "dense" else len(other["tokens"]) == 4


def kept_in(home: Path) -> list[Path]:
    return list(home.glob(".cache/npu_runner/cases/*.json"))


KEPT = """
import json, sys
from dataclasses import replace
from pathlib import Path
from npu_runner.platforms.cases import Finding
from npu_runner.platforms.npu.verdicts import _keep
right = Finding(case="c", verdict="right", message="error code is 207001")
for number, (verdict, message) in enumerate(json.loads(sys.argv[2])):
    path = Path(sys.argv[1], str(number))
    _keep((right, replace(right, verdict=verdict, message=message)), path)
    print(path.exists())
_keep((right,), Path(sys.argv[1], "0", "below a file"))
"""


def test_what_may_not_fail_again_is_not_kept(tmp_path: Path) -> None:
    findings = {
        ("right", ""): True, ("wrong", "differs from the CPU by 50.0 %"): True,
        ("refused", "call aclnnAdd failed, error code is 561002"): True, ("refused", "error code is 207000"): True,
        ("refused", "NPU out of memory. Tried to allocate 2.00 GiB"): False,
        ("refused", "NPU function error: aclrtMalloc, error code is 207001"): False,
        ("refused", "EL0003: an argument; 507015"): False, ("refused", "error code is 507899"): False,
        ("crashed", "killed by SIGSEGV"): False, ("left out", "the 600 s were over"): False,
    }
    done = run_python(["-c", KEPT, str(tmp_path), json.dumps(list(findings))], forked=True)
    assert done.stdout.split() == [str(is_kept) for is_kept in findings.values()], done.stderr
    assert done.stderr.count("compared again at the next start, as this may not come again: c") == 6
    assert "0/below a file cannot be written" in done.stderr
    assert "operators are compared again at the next start" in done.stderr.splitlines()[-1]


TITLES = """
import json
from npu_runner.cli import layer_cases
from npu_runner.platforms import find_platform
assert find_platform("npu").why_unavailable() is None
from npu_runner.platforms.npu.cases import graphs_and_ranks, operators
layers = layer_cases.served({"bfloat16": [*layer_cases._MIXERS, "tower layer, 16 heads of 72"]})
print(json.dumps([case.title for case in (*operators(None), *graphs_and_ranks(20.0), *layers)]))
"""


@pytest.mark.skipif(has_real_cann(), reason="a host may have one device, and then no cases of ranks")
def test_each_point_that_only_a_device_can_tell_names_cases_that_exist() -> None:
    page = (ROOT / "docs/ascend.md").read_text()
    rows = page.partition("| open on a device | known so far | told by |\n|---|---|---|\n")[2].partition("\n\n")[0]
    done = run_python(["-c", TITLES], forked=True)
    titles = json.loads(done.stdout.splitlines()[-1])
    assert len(rows.splitlines()) > 15
    for row in rows.splitlines():
        names = re.findall("`([^`]+)`", row.split("|")[3])
        assert names, row
        for name in names:
            assert any(name in title for title in titles) or (ROOT / name).is_file(), name
