"""The doctor's look at arithmetic: layers of real shapes on the device, against the same layers on the CPU in float32.

    python -m npu_runner.cli.doctor_layers PLATFORM CASES REPORTS

The embedded model is smaller than anything in use (head dim 32): its right answers say little about the kernels that a
real model takes. Knows nothing of what the host has installed.
"""

from __future__ import annotations

import json
import sys

from npu_runner.platforms.examination import Examination
from npu_runner.platforms.host import Check, Outcome, run_program

# How far a token may be from the CPU's: the length of the difference over the length of what it should be. Rounding
# once after each operator makes a third of this at most.
BOUNDS = {"bfloat16": 0.03, "float16": 0.005}
# Name to whether it is dense: has neither states nor experts.
_LAYERS = {"decoder layer, 32/8 heads of 128": True, "decoder layer, 16/8 heads of 128": True,
           "Gated DeltaNet layer, 4/8 heads of 128": False, "experts layer, 8 of 8 experts": False,
           "tower layer, 16 heads of 72": True}


def check_layers(examination: Examination, timeout_seconds: float) -> list[Check]:
    arguments = [examination.platform.name, json.dumps(cases(examination))]
    return judge(examination, run_program(examination.host, __name__, arguments, timeout_seconds))


def cases(examination: Examination) -> dict[str, list[str]]:
    """By dtype, the layers that are served on this host."""
    return {dtype: [name for name, is_dense in _LAYERS.items() if examination.computes(dtype, is_dense=is_dense)]
            for dtype in BOUNDS}


def judge(examination: Examination, outcome: Outcome) -> list[Check]:
    """One check for each layer that was computed, and one for what went wrong on the way."""
    if_wrong = f"answers will be wrong: {examination.if_wrong}"
    checks = [_judge_layer(if_wrong, **report) for report in outcome.reports]
    if outcome.error is not None or len(checks) < sum(map(len, cases(examination).values())):
        checks.append(Check("layers", "failed", outcome.error or "ended before all layers were computed",
                            examination.explain(outcome)))
    return checks


def _judge_layer(if_wrong: str, name: str, dtype: str, error: float, form: str = "") -> Check:
    bound = BOUNDS[dtype]
    found = f"{100 * error:.2f} % from the CPU's at most; {100 * bound:.1f} % is allowed"
    found += f"; {form}" if form else ""
    is_close = error <= bound  # false for NaN, too
    return Check(f"{name} ({dtype})", "ok" if is_close else "failed", found, "" if is_close else if_wrong)


def main(arguments: list[str]) -> None:
    """Write one line for each layer and dtype."""
    platform, asked, reports = arguments
    import torch

    from npu_runner.cli.layer_probe import Probe

    with torch.inference_mode():
        for dtype, names in json.loads(asked).items():
            for name, error, form in Probe(platform, dtype).errors(names):
                with open(reports, "a") as file:
                    file.write(json.dumps({"name": name, "dtype": dtype, "error": error, "form": form}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
