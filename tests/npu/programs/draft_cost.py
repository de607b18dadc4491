"""Counts what decode steps with drafts cost on the emulated device: keys and values that attention reads, launches, and
graphs that serving makes.

    python -m tests.npu.programs.draft_cost SETTINGS.json RESULTS.json

SETTINGS: {"model": folder, "prompts": [lengths], "splits": [[drafts of each row], ...], "engines": [{"settings": {...},
"fallbacks": {...}}, ...]}. The drafts are made up, and equal in all engines. RESULTS: of each engine its tokens, and of
each split's step the lengths and the counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from npu_runner import LLM
from npu_runner.core.drafts import Drafter
from npu_runner.platforms.npu.platform import NpuPlatform
from npu_runner.request.prompt_inputs import PromptInputs
from tests.npu.measured_layers import VIEWS
from tests.npu.programs.decode_cost import GREEDY, launches, of_a_step
from tests.oracle.running import runner_of


def costs(spec: dict[str, Any], settings: dict[str, Any], fallbacks: dict[str, str]) -> dict[str, Any]:
    NpuPlatform.find_fallbacks = lambda self, needs: fallbacks  # type: ignore[method-assign]
    splits: list[list[int]] = []
    Drafter.propose = lambda self, running, room: [  # type: ignore[method-assign]
        [7] * num for num in (splits.pop(0) if splits else [])]
    with LLM(spec["model"], platform="npu", async_scheduling=False, **settings) as llm:
        steps: Any = runner_of(llm).steps
        prepare, prepared = steps.prepare, []
        steps.prepare = lambda *given: (prepared.append(prepare(*given)), prepared[-1])[1]
        for index, length in enumerate(spec["prompts"]):
            prompt = [(5 + index + place) % 50 for place in range(length)]
            llm.engine.add_request(str(index), PromptInputs(prompt), GREEDY)
        while prepared[-1:] == [] or prepared[-1].batch.is_prefill:
            llm.engine.step()
        found = []
        for split in spec["splits"]:
            splits.append(split)
            counts = of_a_step(llm)
            step = prepared[-1]
            found.append({
                "queries": step.batch.query_lens_B.tolist(), "contexts": step.batch.context_lens_B.tolist(),
                "bucket": step.bucket and step.bucket.batch_size,
                "launches": sum(num for name, num in launches(counts).items() if name not in VIEWS),
                "bytes": sum(each["bytes"] for each in counts["attention"].values()),
                "sequences": sum(each["calls"] for each in counts["attention"].values()),
                "new_graphs": [counts.get(group, {}).get(name, {}).get("calls", 0)
                               for group, name in (("graphs", "captured"), ("ge", "compile"))]})
        outputs = finish_all(llm)
        cache = runner_of(llm).k_cache
        return {"steps": found, "fallbacks": llm.engine.describe().get("fallbacks"), "tokens": outputs,
                "bytes_of_a_token": 2 * len(cache) * cache[0, 0, 0].nbytes}


def finish_all(llm: LLM) -> list[list[int]]:
    """The tokens of each request, in their order."""
    ended: dict[str, list[int]] = {}
    while llm.engine.has_unfinished_requests():
        ended |= {output.request_id: list(output.token_ids) for output in llm.engine.step() if output.finished}
    return [ended[name] for name in sorted(ended)]


def main(settings_path: str, results_path: str) -> None:
    spec = json.loads(Path(settings_path).read_text())
    Path(results_path).write_text(json.dumps([costs(spec, **engine) for engine in spec["engines"]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
