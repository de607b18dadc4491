"""The doctor's look at arithmetic: layers of real shapes on the device, against the same layers on the CPU.

The embedded model is smaller than anything in use (head dim 32): its right answers say little about the kernels that a
real model takes. Knows nothing of what the host has installed.
"""

from __future__ import annotations

from collections.abc import Sequence

from npu_runner.platforms.cases import BOUNDS, Finding, run_cases
from npu_runner.platforms.examination import Examination
from npu_runner.platforms.host import Check, Outcome

SOURCE = "npu_runner.cli.layer_cases:served"
# Name to whether it is dense: has neither states nor experts.
_LAYERS = {"decoder layer, 32/8 heads of 128": True, "decoder layer, 16/8 heads of 128": True,
           "decoder layer, M-RoPE, a prompt of 2,000 tokens": True, "Gated DeltaNet layer, 4/8 heads of 128": False,
           "experts layer, 8 of 8 experts": False, "tower layer, 16 heads of 72": True}


def check_layers(examination: Examination, timeout_seconds: float) -> list[Check]:
    return judge(examination, run_cases(examination.host, examination.platform.name, SOURCE, cases(examination),
                                        timeout_seconds))


def cases(examination: Examination) -> dict[str, list[str]]:
    """By dtype, the layers that are served on this host."""
    return {dtype: [name for name, is_dense in _LAYERS.items() if examination.computes(dtype, is_dense=is_dense)]
            for dtype in BOUNDS}


def judge(examination: Examination, findings: Sequence[Finding]) -> list[Check]:
    """One check for each finding."""
    return [_judge(examination, finding) for finding in findings]


def _judge(examination: Examination, finding: Finding) -> Check:
    if finding.verdict == "wrong":
        return Check(finding.case, "failed", finding.message, f"answers will be wrong: {examination.if_wrong}")
    if not finding.is_right:
        return Check(finding.case, "failed", f"{finding.verdict}: {finding.message}",
                     examination.explain(Outcome([], finding.message, finding.message)))
    found = f"{100 * (finding.largest_error or 0.0):.2f} % from the CPU's at most"
    return Check(finding.case, "ok", f"{found}; {finding.message}" if finding.message else found)
