"""Answers with weights in NZ, and what was launched: matmuls that read NZ, others, and casts.

    NPU_RUNNER_ASCEND_NZ_WEIGHTS=... python -m tests.npu.programs.nz SPEC.json RESULTS.pt

SPEC: {"cases": as of tests/npu/programs/int8.py}. RESULTS: {"answers": [{"tokens", "logits", "launches", "captured",
"casts": of one answer, and of a second one}]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from npu_runner import LLM
from npu_runner.request.prompt_inputs import PromptInputs
from tests.oracle.running import greedy, recorded_logits

CAST = "Identity"


def answer(case: dict[str, Any]) -> dict[str, Any]:
    from tests.cann.programs.emulation import calls, reset_counters  # where the emulation is loaded

    reset_counters()
    with LLM(case["model"], platform="npu", **case["settings"]) as llm, recorded_logits(llm) as steps:
        (output,) = llm.generate([PromptInputs(case["prompt"])], greedy(case["count"]))
        logits = torch.cat([step[:1] for step in steps])
        launches, captured = calls("launches"), calls("captured")
        llm.generate([PromptInputs(case["prompt"][1:])], greedy(case["count"]))
        casts = [launches.get(CAST, 0), calls("launches").get(CAST, 0)]
    return {"tokens": output.token_ids, "logits": logits, "launches": launches, "captured": captured, "casts": casts}


def main(spec_path: str, results_path: str) -> None:
    import torch_npu  # noqa: F401 - the tests read this module, too, and have none

    spec = json.loads(Path(spec_path).read_text())
    torch.save({"answers": [answer(case) for case in spec["cases"]]}, results_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
