"""Counts what the model's own head costs behind a decode step on the emulated device: launches, those of them that no
graph makes (`outside`), copies, synchronisations. Then what of the whole step no graph makes, and what it waits for.

    python -m tests.npu.programs.head_cost SETTINGS.json RESULTS.json

SETTINGS: {"model": folder, "batch_size": 4, "drafts": [0, 1, 2], "settings": {...}}. Of each number of drafts a row:
0 is a plain step, behind which nothing is drafted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from npu_runner import LLM
from tests.cann.programs.emulation import counters, reset_counters
from tests.npu.programs.decode_cost import GREEDY, begin, calls, launches, of_a_step
from tests.oracle.running import runner_of


def cost_behind_a_step(model: str, batch_size: int, num_drafts: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Of a step of a full batch, each row with that many drafts."""
    speculative = {"method": "mtp", "num_speculative_tokens": max(1, num_drafts)}
    if not num_drafts:
        # A head that drafts at no size is not computed.
        speculative["num_speculative_tokens_per_batch_size"] = [[batch_size, batch_size, 0]]
    sizes = sorted({batch_size, batch_size * (1 + num_drafts)})
    graphs = {} if settings["graph_mode"] == "eager" else {"graph_batch_sizes": sizes}
    with LLM(model, platform="npu", max_num_seqs=batch_size, max_model_len=512, speculative_config=speculative,
             **settings, **graphs) as llm:
        steps: Any = runner_of(llm).steps
        behind, found = steps._behind_tokens, dict[str, Any]()

        def counted(step: Any) -> Any:
            torch.npu.synchronize()
            reset_counters()
            proposed = behind(step)
            syncs = counters().get("syncs", {})
            torch.npu.synchronize()
            if step.batch.num_tokens == batch_size * (1 + num_drafts):
                counts = counters()
                found.update(launches=launches(counts), outside=calls(counts, "launches"), syncs=syncs,
                             copies=counts.get("copies", {}))
            return proposed

        steps._behind_tokens = counted
        begin(llm, batch_size, GREEDY)
        assert found, f"no step of {batch_size} rows with {num_drafts} drafts each"
        steps._behind_tokens = behind
        num_tokens = llm.stats().num_draft_tokens
        whole = of_a_step(llm)
        assert llm.stats().num_draft_tokens - num_tokens == batch_size * num_drafts, "this one, too"
        return {**found, "step_outside": calls(whole, "launches"), "step_syncs": whole["syncs"]}


def main(settings_path: str, results_path: str) -> None:
    spec = json.loads(Path(settings_path).read_text())
    Path(results_path).write_text(json.dumps({
        num_drafts: cost_behind_a_step(spec["model"], spec["batch_size"], num_drafts, spec["settings"])
        for num_drafts in spec["drafts"]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
