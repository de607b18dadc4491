"""Counts what one decode step costs on the emulated device: launches for each layer, copies, synchronisations.

    python -m tests.npu.programs.decode_cost SETTINGS.json RESULTS.json

SETTINGS: {"models": {number of layers: folder}, "batch_size": 4, "settings": {...}}. The cost of a layer is the
difference between two checkpoints that differ in nothing but their number of layers. "host" is measured where nothing
runs before somebody waits (CANN_EMU_LAZY=1): what the host does for a step is then not what the emulation computes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from npu_runner import LLM, SamplingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.sampling.sampler import Sampler
from tests.cann.programs.emulation import FALLBACKS, counters, reset_counters
from tests.oracle.running import runner_of

Counts = dict[str, dict[str, dict[str, int]]]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
DRAW = GREEDY.replace(temperature=0.8)
TIMED_STEPS = 24
ALMOST_A_BLOCK = 118
"""Tokens of a prompt whose answer soon begins a block."""
PHASES = ("prepare", "launch", "sample")


def cost_of_a_step(model: str, batch_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Counters over one decode step of a full batch, those of the sampler alone, and the bytes of the KV cache and of
    the states beside it; or, where nothing runs before somebody waits, the host's milliseconds of a step by phase."""
    # One step after the other: with two under way, what belongs to which of them could not be told.
    with LLM(model, platform="npu", max_num_seqs=batch_size, max_model_len=512,
             max_num_batched_tokens=512, async_scheduling=False, **settings) as llm:
        if os.environ.get("CANN_EMU_LAZY") == "1":
            return {"host": host_milliseconds(llm, batch_size)}
        begin(llm, batch_size, GREEDY)
        found: dict[str, Any] = {"step": of_a_step(llm)}
        found["greedy"] = of_the_sampler(llm)
        finish(llm)
        begin(llm, batch_size, DRAW)
        found["draw"] = of_the_sampler(llm)
        finish(llm)
        found |= of_steps_with_news(llm, batch_size)
        runner = runner_of(llm)
        states_bytes = runner.states.num_bytes if runner.states else 0
        return {**found, "cache_bytes": runner.k_cache.nbytes + runner.v_cache.nbytes + states_bytes}


def begin(llm: LLM, batch_size: int, params: SamplingParams) -> None:
    """A full batch that decodes, and has settled what is lazy."""
    for index in range(batch_size):
        llm.engine.add_request(str(index), llm.engine.processor.from_text("which picture " * (index + 1)), params)
    for _ in range(5):
        llm.engine.step()


def of_steps_with_news(llm: LLM, batch_size: int) -> dict[str, Counts]:
    """"grows": of a decode step in which some sequence begins a block; "leaves": of one whose rows are not those of the
    step before. Greedy, as "step" is."""
    submit, batches = runner_of(llm).steps.submit, []
    runner_of(llm).steps.submit = lambda batch: (batches.append(batch), submit(batch))[1]  # type: ignore[method-assign]
    for index in range(batch_size):
        prompt = PromptInputs([5 + index] * (ALMOST_A_BLOCK if index == 1 else 2 * index + 2))
        llm.engine.add_request(str(index), prompt, GREEDY.replace(max_tokens=6 if index == 0 else 20))
    found: dict[str, Counts] = {}
    while llm.engine.has_unfinished_requests() and len(found) < 2:
        counts = of_a_step(llm)
        before, now = ([None, None, *batches])[-2:]
        if before is None or now is None or before.is_prefill or now.is_prefill:
            continue
        if before.request_ids != now.request_ids:
            found.setdefault("leaves", counts)
        elif len(now.new_blocks_N3):
            found.setdefault("grows", counts)
    runner_of(llm).steps.submit = submit  # type: ignore[method-assign]
    return found


def finish(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def of_a_step(llm: LLM) -> Counts:
    """What keeps the tokens for the next step is queued behind the copy that the host waits for: it belongs to the step
    that queued it, the waiting for it to nobody."""
    torch.npu.synchronize()
    reset_counters()
    llm.engine.step()
    syncs = counters().get("syncs", {})
    torch.npu.synchronize()
    return {**counters(), "syncs": syncs}


def of_the_sampler(llm: LLM) -> dict[str, int]:
    """Launches of one call of the sampler, which is no part of a graph."""
    call, found = Sampler.__call__, {}

    def counted(*arguments: Any, **options: Any) -> Any:
        torch.npu.synchronize()
        reset_counters()
        output = call(*arguments, **options)
        torch.npu.synchronize()
        found.update(calls(counters(), "launches"))
        return output

    Sampler.__call__ = counted  # type: ignore[method-assign]
    try:
        llm.engine.step()
    finally:
        Sampler.__call__ = call  # type: ignore[method-assign]
    return found


def host_milliseconds(llm: LLM, batch_size: int) -> dict[str, float]:
    """Of a decode step, by phase: medians. `launch` is a replay, where there is a graph."""
    begin(llm, batch_size, GREEDY.replace(max_tokens=TIMED_STEPS + 8))
    times: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(TIMED_STEPS):
        before = asdict(llm.engine.stats())
        llm.engine.step()
        after = asdict(llm.engine.stats())
        for phase, values in times.items():
            values.append(1e3 * (after[f"{phase}_seconds"] - before[f"{phase}_seconds"]))
    finish(llm)
    return {phase: statistics.median(values) for phase, values in times.items()}


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
    small = cost_of_a_step(first, batch_size, settings)
    large = cost_of_a_step(second, batch_size, settings)
    if "host" in large:
        per_layer = {phase: (large["host"][phase] - small["host"][phase]) / (many - few) for phase in PHASES}
        return {"host_milliseconds": large["host"], "host_milliseconds_per_layer": per_layer, "num_layers": many}
    steps = {"small": small["step"], "large": large["step"]}
    launched = {key: launches(value) for key, value in steps.items()}
    per_layer = {name: (count - launched["small"].get(name, 0)) / (many - few)
                 for name, count in launched["large"].items() if count != launched["small"].get(name, 0)}
    host = {key: calls(value, "host_calls", "ge") for key, value in steps.items()}
    rest = {name: count - per_layer.get(name, 0) * many - large["greedy"].get(name, 0)
            for name, count in launched["large"].items()}
    return {
        "per_layer": per_layer, "forward": {name: count for name, count in rest.items() if count},
        "greedy": large["greedy"], "draw": large["draw"],
        "more": {name: sum(launches(large[name]).values()) - sum(launched["large"].values())
                 for name in ("grows", "leaves")},
        "copies_in": {name: large[name]["copies"]["h2d"]["calls"] for name in ("grows", "leaves")},
        "copies": steps["large"].get("copies", {}), "syncs": steps["large"].get("syncs", {}),
        "cache_bytes": large["cache_bytes"],
        "groups": sorted(steps["large"]), "fallbacks": calls(steps["large"], *FALLBACKS),
        "host_per_layer": {name: (count - host["small"].get(name, 0)) / (many - few)
                           for name, count in host["large"].items() if count != host["small"].get(name, 0)},
    }


def main(settings_path: str, results_path: str) -> None:
    spec = json.loads(Path(settings_path).read_text())
    Path(results_path).write_text(json.dumps(measure(spec["models"], spec["batch_size"], spec["settings"])))


if __name__ == "__main__":
    main(*sys.argv[1:])
