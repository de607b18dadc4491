"""Rows whose answers are cut off, or have no form that the row asked for, and an engine that gives these answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from npu_runner.request.outputs import REPETITION_DETECTED, CompletionOutput, RequestOutput
from npu_runner.request.sampling_params import SamplingParams
from tests.batch.scripted import ScriptedEngine

OBJECT, WORDS = '{"a": 1}', "no JSON"
SCHEMA: dict[str, Any] = {"type": "object"}
BY_ROW: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
DETECTION = {"max_pattern_size": 9, "min_count": 3}
# What the model says, the row's fields, whether that is cut off, whether unparsed without and with a schema of the job.
ROWS: dict[str, tuple[str, dict[str, Any], bool, bool, bool]] = {
    "words": (WORDS, {}, False, False, True),
    "object": (OBJECT, {}, False, False, False),
    "half of an object": (OBJECT, {"max_tokens": 3}, True, False, True),
    "by the row": (WORDS, {"response_format": BY_ROW}, False, True, True),
    "any object": (WORDS, {"response_format": {"type": "json_object"}}, False, True, True),
    "guided": (WORDS, {"guided_json": SCHEMA, "max_tokens": 2}, True, True, True),
    "vLLM's": (WORDS, {"structured_outputs": {"json": SCHEMA}}, False, True, True),
    "vLLM's object": (WORDS, {"structured_outputs": {"json_object": True}}, False, True, True),
    "fits": (OBJECT, {"response_format": BY_ROW}, False, False, False),
    "one of two fits": (OBJECT, {"response_format": BY_ROW, "n": 2, "temperature": 1}, False, True, True),
    "text": (WORDS, {"response_format": {"type": "text"}}, False, False, False),
    "a choice": (WORDS, {"guided_choice": [WORDS]}, False, False, False),
    "with tools": (WORDS, {"tools": TOOLS}, False, False, False),
    "without its tools": (WORDS, {"tools": TOOLS, "tool_choice": "none"}, False, False, True),
    "repeats": (WORDS, {"repetition_detection": DETECTION}, False, False, True),
    "repeats, and is none": (WORDS, {"repetition_detection": DETECTION, "response_format": BY_ROW}, False, True, True),
    "repeats, and is cut": (WORDS, {"repetition_detection": DETECTION, "max_tokens": 3, "n": 2, "temperature": 1},
                            True, False, True),
    "the engine's fault": ("rorre enigne", {}, False, False, False),
}


class Cutting(ScriptedEngine):
    """Keeps to max_tokens, one a character. The second of two completions is words. The first repeats itself where that
    is looked for."""

    def _output(self, request_id: str, text: str, params: SamplingParams) -> RequestOutput:
        if text == "engine error":
            return super()._output(request_id, text, params)
        answer = text[::-1]
        most = params.max_tokens or len(answer)
        reason = "stop" if len(answer) <= most else "length"
        texts = [answer[:most], *[WORDS] * (params.n - 1)]
        completions = [CompletionOutput(index, said, [1] * len(said), reason) for index, said in enumerate(texts)]
        if params.repetition_detection is not None:
            completions[0] = replace(completions[0], finish_reason="length", stop_reason=REPETITION_DETECTED)
        return RequestOutput(request_id, completions, len(text))
