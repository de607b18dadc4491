"""Experts of int8 on the npu platform: no further from float64 than twice what the same formula in plain torch is, by
layer and for logits; whole experts, ranks, graphs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.quantised import QuantisedExperts, QuantisedOps
from scripts.quantised.writing import quantise
from tests.cann.environment import has_real_cann, run_python
from tests.npu.int8_cases import GRAPH_ENGINE, LIMIT, MODES, SIZES, assert_near, case, distance, logits, run
from tests.npu.programs import generate
from tests.npu.programs.int8_experts import DTYPES, TOP_K, Case, cases, draw
from tests.npu.running import SMALL, on_cpu, on_npu
from tests.oracle.expert_reference import mixture
from tests.oracle.rounded_models import rounded_models

pytestmark = [pytest.mark.npu, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = tmp_path_factory.mktemp("int8_experts") / "out.pt"
    done = run_python(["-m", "tests.npu.programs.int8_experts", str(results)])
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(torch.load(results, weights_only=False))


def launches(case: Case) -> int:
    """Routing, the matmul that rounds for the next one, this one, the sum. From outside NZ that matmul and its
    rounding are two. Where no kernel computes the width rightly: scales in bfloat16, silu and rounding by themselves.
    """
    if case.layout != "none" and case.width >= 64 and case.width % 16 == 0:
        return 4
    is_long = case.width >= 256 or case.num_tokens * TOP_K >= 8
    return 5 if case.layout == "none" and case.width % 64 == 0 and is_long else 7


def test_experts_are_as_near_as_plain_torch_and_ranges_add_up(found: dict[str, Any]) -> None:
    """Over all cases of a dtype: whether a number is rounded to the other side in between is chance."""
    errors: dict[torch.dtype, list[tuple[float, float]]] = {dtype: [] for dtype in DTYPES}
    for each_case in cases():
        _, num_tokens, width, dtype = each_case
        given = draw(num_tokens, width, dtype)
        # In bfloat16 the grouped matmul takes no other scales; the fused operator behind the first has its own.
        narrow = () if dtype != torch.bfloat16 else ("gate_up", "down") if launches(each_case) == 7 else ("down",)
        weights = [(given[each], given[f"{each}_scales"].bfloat16().float() if each in narrow else
                    given[f"{each}_scales"]) for each in ("gate_up", "down")]
        chosen = given["x"], given["weights"], given["experts"]
        exact = mixture(*chosen, *weights)
        plain = QuantisedOps(CpuOps()).experts(*chosen, *(QuantisedExperts(*each) for each in weights))
        whole, of_ranges, of_nothing = found["outputs"][tuple(each_case)]
        theirs = float((plain.double() - exact).abs().max())
        errors[dtype] += [(float((ours.double() - exact).abs().max()), theirs) for ours in (whole, of_ranges)]
        assert of_nothing == 0, each_case  # NaN is not 0
    for dtype, pairs in errors.items():
        ours, theirs = (max(each) for each in zip(*pairs, strict=True))
        assert 0 < ours <= LIMIT * theirs, f"{dtype}: {ours:.3e} from float64, plain torch {theirs:.3e}"


@pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN counts launches")
def test_launches_by_width_layout_and_tokens(found: dict[str, Any]) -> None:
    assert found["launches"] == {
        (one.layout, one.width, one.num_tokens): launches(one) for one in cases()}


def assert_logits(checkpoint: Path, quantised: Path, modes: list[dict[str, Any]], folder: Path) -> None:
    found = run([case(quantised, **mode) for mode in modes], folder)
    with open_weights(quantised, read_quantization(quantised)) as reader:
        exact, plain = rounded_models(checkpoint, reader)
    for tokens, ours in found["logits"]:
        assert_near(ours, logits(exact, tokens), logits(plain, tokens))


def test_logits_are_as_near_as_plain_torch(checkpoint: Any, tmp_path: Path) -> None:
    """transformers' model with experts and linears that round their inputs; one expert's width is 64."""
    plain = checkpoint("qwen3_moe", **SIZES)
    quantise(plain, tmp_path / "w8a8", "modelslim-w8a8-dynamic")
    assert_logits(plain, tmp_path / "w8a8", MODES[:1], tmp_path)


@pytest.mark.full("captured steps and the graph engine; eager steps stay, and int8 captured in test_int8.py")
def test_logits_in_other_modes(checkpoint: Any, tmp_path: Path) -> None:
    plain = checkpoint("qwen3_moe", **SIZES)
    quantise(plain, tmp_path / "w8a8", "w8a8")
    for modes in (MODES[1:], GRAPH_ENGINE):
        assert_logits(plain, tmp_path / "w8a8", modes, tmp_path)


@pytest.mark.full("two and four ranks start; slices of experts are compared in tests/oracle/test_quantised_experts.py")
@pytest.mark.parametrize("is_whole", [False, True])
def test_ranks_are_as_near_to_inputs_that_are_not_rounded_as_one_is(is_whole: bool, checkpoint: Any, tmp_path: Path
                                                                    ) -> None:
    sizes = {"head_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
             "moe_intermediate_size": 256}
    quantise(checkpoint("qwen3_moe", **sizes), tmp_path / "w8a8", "w8a8")
    settings = {"graph_mode": "eager", **SMALL, "dtype": "bfloat16"}
    whole = generate.Case(str(tmp_path / "w8a8"), settings, "texts", 4, max_tokens=2, logprobs=20)
    exact = on_cpu(dataclasses.replace(whole, settings={**settings, "dtype": "float32"}))["logprobs"]
    of_ranks = [{"tensor_parallel_size": size, "enable_expert_parallel": is_whole and size > 1} for size in (1, 2, 4)]
    cases = [dataclasses.replace(whole, settings={**settings, **each}) for each in of_ranks]
    one, *several = (distance(found["logprobs"], exact) for found in on_npu(cases, tmp_path, num_devices=4))
    assert 0 < max(several) <= LIMIT * one, (one, several)
