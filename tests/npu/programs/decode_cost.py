"""Counts what one decode step costs on the emulated device: launches for each layer, copies, synchronisations.

    python -m tests.npu.programs.decode_cost SETTINGS.json RESULTS.json

SETTINGS: {"models": {number of layers: folder}, "batch_size": 4, "settings": {...}}. The cost of a layer is the
difference between two checkpoints that differ in nothing but their number of layers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from npu_runner import LLM, SamplingParams
from tests.cann.programs.emulation import counters, reset_counters
from tests.oracle.running import runner_of

Counts = dict[str, dict[str, dict[str, int]]]


def cost_of_a_step(model: str, batch_size: int, settings: dict[str, Any]) -> tuple[Counts, int]:
    """Counters over one decode step of a full batch, and the bytes of the KV cache and of the states beside it."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(model, platform="npu", max_num_seqs=batch_size, max_model_len=512, **settings) as llm:
        for index in range(batch_size):
            llm.engine.add_request(str(index), llm.engine.processor.from_text("which picture " * (index + 1)), params)
        for _ in range(4):  # prefill, and decode steps that settle what is lazy
            llm.engine.step()
        reset_counters()
        llm.engine.step()
        found = counters()
        runner = runner_of(llm)
        states_bytes = runner.states.num_bytes if runner.states else 0
        return found, runner.k_cache.nbytes + runner.v_cache.nbytes + states_bytes


def calls(counts: Counts, *groups: str) -> dict[str, int]:
    """Operator calls by name over several groups of counters."""
    total: dict[str, int] = {}
    for group in groups:
        for name, entry in counts.get(group, {}).items():
            total[name] = total.get(name, 0) + entry["calls"]
    return total


def launches(counts: Counts) -> dict[str, int]:
    """What a step launches; what the graph engine computes when it compiles is not launched."""
    folded = calls(counts, "ge_folded")
    found = {name: count - folded.get(name, 0)
             for name, count in calls(counts, "launches", "replayed", "ge_operators").items()}
    return {name: count for name, count in found.items() if count}


def measure(models: dict[str, str], batch_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    (few, first), (many, second) = sorted((int(count), path) for count, path in models.items())
    small, _ = cost_of_a_step(first, batch_size, settings)
    large, cache_bytes = cost_of_a_step(second, batch_size, settings)
    launched = {key: launches(value) for key, value in (("small", small), ("large", large))}
    per_layer = {name: (count - launched["small"].get(name, 0)) / (many - few)
                 for name, count in launched["large"].items() if count != launched["small"].get(name, 0)}
    host = {key: calls(value, "host_calls", "ge") for key, value in (("small", small), ("large", large))}
    rest = {name: count - per_layer.get(name, 0) * many for name, count in launched["large"].items()}
    return {
        "per_layer": per_layer, "rest": {name: count for name, count in rest.items() if count},
        "copies": large.get("copies", {}), "syncs": large.get("syncs", {}), "cache_bytes": cache_bytes,
        "groups": sorted(large), "fallbacks": calls(large, "ai_cpu", "sorted"),
        "host_per_layer": {name: (count - host["small"].get(name, 0)) / (many - few)
                           for name, count in host["large"].items() if count != host["small"].get(name, 0)},
    }


def main(settings_path: str, results_path: str) -> None:
    spec = json.loads(Path(settings_path).read_text())
    Path(results_path).write_text(json.dumps(measure(spec["models"], spec["batch_size"], spec["settings"])))


if __name__ == "__main__":
    main(*sys.argv[1:])
