"""The doctor computes layers of real shapes: they agree with the CPU, and a kernel that computes otherwise is found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from npu_runner.cli.doctor_layers import SOURCE, cases, judge
from npu_runner.platforms import find_platform
from npu_runner.platforms.cases import BOUNDS, Finding, run_cases
from npu_runner.platforms.examination import Findings, examination_of
from npu_runner.platforms.host import Host
from tests.cann.environment import environment, has_real_cann, run_python
from tests.npu.programs.sabotage import DTYPE, SABOTAGES

NPU = examination_of(find_platform("npu"), Findings(Host(), {}))


@pytest.mark.npu
@pytest.mark.full("layers of real shapes; operators by themselves stay, and what is said of an error that is too large")
@pytest.mark.parametrize("cann_version", ["9.2.0", "9.0.0"])
def test_layers_of_real_shapes_agree_with_the_cpu_and_their_forms_are_named(cann_version: str) -> None:
    host = Host(environment=environment(cann_version=cann_version))
    found = judge(NPU, run_cases(host, "npu", SOURCE, cases(NPU), 300))
    assert len(found) == 6 * len(BOUNDS)
    assert {check.status for check in found} == {"ok"}, found
    text = {check.name: check.found for check in found}
    assert {f"experts layer, 8 of 8 experts ({dtype})" for dtype in BOUNDS} <= text.keys()
    if not has_real_cann():
        delta = {dtype: text[f"Gated DeltaNet layer, 4/8 heads of 128 ({dtype})"] for dtype in BOUNDS}
        assert "decodes through plain operators (the fused operator takes bfloat16" in delta["float16"]
        fused = "decodes through npu_recurrent_gated_delta_rule"
        assert (fused in delta["bfloat16"]) == (cann_version == "9.2.0"), delta
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


def test_what_is_not_right_is_a_failure_with_a_remedy() -> None:
    def check(verdict: str, message: str) -> Any:
        (found,) = judge(NPU, [Finding(case="a layer", verdict=verdict, largest_error=0.2, message=message)])
        return found

    assert check("right", "").status == check("slow", "10 us were enough").status == "ok"
    wrong = check("wrong", "differs from the CPU by nan %")
    assert (wrong.status, wrong.found) == ("failed", "differs from the CPU by nan %")
    assert wrong.remedy.startswith("answers will be wrong")
    for verdict in ("refused", "crashed", "left out"):
        failed = check(verdict, "RuntimeError: ... error code is 561002")
        assert (failed.status, failed.found.partition(":")[0]) == ("failed", verdict)
        assert "561002" in failed.remedy
