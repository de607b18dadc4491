"""Gated DeltaNet on the npu platform against its definition in float64, with a CANN whose fused operator takes float32
states and with one whose operator does not."""

from __future__ import annotations

import json

import pytest

from tests.cann.environment import has_real_cann, run_python
from tests.full_set import only_full

pytestmark = [pytest.mark.npu, pytest.mark.skipif(has_real_cann(), reason="asks the emulation for its counters")]


@pytest.mark.parametrize(("cann_version", "more"), [("9.2.0", {}), *only_full(
    "every kind of gate, and a CANN without the fused operator; with it, states in float32 take the plain ones, too",
    ("9.2.0", {"EVERY_GATE": "1"}), ("9.0.0", {"EVERY_GATE": "1"}))], ids=str)
def test_prompts_decoding_and_captured_steps(cann_version: str, more: dict[str, str]) -> None:
    done = run_python(["-m", "tests.cann.programs.run_checks", "tests.npu.programs.gated_delta"],
                      cann_version=cann_version, **more)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr[-4000:]
    results = json.loads(lines[0].removeprefix("RESULTS "))
    assert len(results) == 6
    assert {name: text for name, text in results.items() if text != "ok"} == {}
