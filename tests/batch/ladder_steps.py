"""A ladder's file and steps, and an engine that says its prompt and its settings. Holds no tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.request.sampling_params import SamplingParams
from tests.batch.scripted import ScriptedEngine

STEPS = [
    {"when": ["cut_off"], "change": {"temperature": 0.5}},
    {"when": ["cut_off"], "change": {"max_tokens": 60, "no_repeat_ngram_size": 5}},
    {"when": ["empty"], "change": {"temperature": 0.7, "append_prompt": " " + "please" * 2}},
    {"when": ["unparsed", "error:generation_failed"], "change": {"top_p": 0.5, "temperature": 0.9}},
]


@dataclass
class Tried(ScriptedEngine):
    """Says its prompt and its settings, as far as max_tokens lets it, one token a character. Rows that begin with
    `quiet` and `moody` need a temperature."""

    def _output(self, request_id: str, text: str, params: SamplingParams) -> RequestOutput:
        said = f"{text} {params.temperature} {params.top_p} {params.seed} {params.no_repeat_ngram_size}"
        if text.startswith("quiet") and not params.temperature:
            said = " \n"
        is_lost = text.startswith("engine error") or (text.startswith("moody") and not params.temperature)
        cut = said[: params.max_tokens]
        end = "error" if is_lost else "stop" if cut == said else "length"
        return RequestOutput(request_id, [CompletionOutput(0, cut, [1] * len(cut), end)], len(text), 1)


def ladder(folder: Path, steps: Any) -> str:
    path = folder / "steps.json"
    path.write_text(steps if isinstance(steps, str) else json.dumps(steps))
    return str(path)
