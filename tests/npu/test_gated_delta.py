"""Gated DeltaNet on the npu platform against its definition in float64, with a CANN whose fused operator takes float32
states and with one whose operator does not."""

from __future__ import annotations

import json

import pytest

from tests.cann.environment import has_real_cann, run_python

pytestmark = [pytest.mark.npu, pytest.mark.skipif(has_real_cann(), reason="asks the emulation for its counters")]


@pytest.mark.parametrize("cann_version", ["9.0.0", "9.2.0"])
def test_prompts_decoding_and_captured_steps(cann_version: str) -> None:
    done = run_python(["-m", "tests.cann.programs.run_checks", "tests.npu.programs.gated_delta"],
                      cann_version=cann_version)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr[-4000:]
    results = json.loads(lines[0].removeprefix("RESULTS "))
    assert len(results) == 7
    assert {name: text for name, text in results.items() if text != "ok"} == {}
