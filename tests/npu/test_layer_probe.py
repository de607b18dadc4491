"""The doctor computes layers of real shapes: they agree with the CPU, and a kernel that computes otherwise is found."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from npu_runner.cli.doctor_layers import BOUNDS, cases, judge
from npu_runner.platforms import find_platform
from npu_runner.platforms.examination import Findings, examination_of
from npu_runner.platforms.host import Host, Outcome
from tests.cann.environment import has_real_cann, run_python
from tests.npu.programs.sabotage import DECODER, DTYPE, SABOTAGES

NPU = examination_of(find_platform("npu"), Findings(Host(), {}))


@pytest.mark.npu
@pytest.mark.full("layers of real shapes; operators by themselves stay, and what is said of an error that is too large")
@pytest.mark.parametrize("cann_version", ["9.2.0", "9.0.0"])
def test_layers_of_real_shapes_agree_with_the_cpu_and_their_forms_are_named(cann_version: str, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    done = run_python(["-m", "npu_runner.cli.doctor_layers", "npu", json.dumps(cases(NPU)), str(reports)], timeout=300,
                      cann_version=cann_version)
    assert done.returncode == 0, done.stderr[-4000:]
    found = judge(NPU, Outcome([json.loads(line) for line in reports.read_text().splitlines()], None))
    assert len(found) == 5 * len(BOUNDS)
    assert {check.status for check in found} == {"ok"}, found
    text = {check.name: check.found for check in found}
    assert {f"experts layer, 8 of 8 experts ({dtype})" for dtype in BOUNDS} <= text.keys()
    if not has_real_cann():
        delta = {dtype: text[f"Gated DeltaNet layer, 4/8 heads of 128 ({dtype})"] for dtype in BOUNDS}
        assert "decodes through plain operators (the fused operator takes bfloat16" in delta["float16"]
        fused = "decodes through npu_recurrent_gated_delta_rule"
        assert delta["bfloat16"].endswith(fused) == (cann_version == "9.2.0"), delta
        assert cann_version == "9.2.0" or "decodes through plain operators (" in delta["bfloat16"]


@pytest.mark.npu
@pytest.mark.skipif(has_real_cann(), reason="seconds on the emulation, and nothing is learnt twice")
@pytest.mark.full("every sabotage of a layer; what is said of an error that is too large stays")
def test_a_kernel_that_computes_otherwise_is_found() -> None:
    done = run_python(["-m", "tests.npu.programs.sabotage"], timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert set(errors) == set(SABOTAGES)
    for name, error in errors.items():
        if name.startswith("nothing"):
            assert error <= BOUNDS[DTYPE], name
        else:
            assert error > 2 * BOUNDS[DTYPE], f"{name}: {error}; far beyond the bound, or the bound has to be sharp"


def test_too_far_and_not_a_number_and_an_early_end_are_failures() -> None:
    def report(error: float) -> dict[str, object]:
        return {"name": DECODER, "dtype": "bfloat16", "error": error}

    for error, status in ((0.01, "ok"), (0.2, "failed"), (math.nan, "failed")):
        layer, whole = judge(NPU, Outcome([report(error)], None))
        assert (layer.status, bool(layer.remedy)) == (status, status != "ok")
        assert (whole.status, whole.name) == ("failed", "layers"), "all other layers are missing"
    failure = judge(NPU, Outcome([], "RuntimeError: NPU function error", "... error code is 561002 ..."))
    assert "561002" in failure[0].remedy
