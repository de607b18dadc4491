"""Reads prompts on one platform, for vectors, for states of tokens, for log probabilities and for classes, and writes
what came out, as JSON.

    python -m tests.npu.programs.reading CASES.json RESULTS.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from npu_runner import LLM, PoolingParams, SamplingParams
from tests.npu.programs.generate import conversation

DIMENSIONS = (None, 40, 7)


def read(case: dict[str, Any]) -> dict[str, Any]:
    """`model`, `settings`, and `count` conversations, some with images where the model sees any. `classifier`: the same
    model with a classifier's head, where there is one."""
    settings = case["settings"]
    with LLM(case["model"], runner="pooling", **settings) as llm:
        processor = llm.engine.processor
        prompts = [processor(_plain(conversation(index), processor.has_vision)) for index in range(case["count"])]
        params = [PoolingParams(dimensions=DIMENSIONS[index % 3]) for index in range(len(prompts))]
        vectors = [result.embedding.tolist() for result in llm.embed(prompts, params)]
        states = [result.data.tolist() for result in llm.encode(prompts[:2], pooling_task="token_embed")]
        steps = llm.stats().num_decode_steps
    with LLM(case["model"], graph_mode="eager", **settings) as llm:
        scored = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3))
        scores = [[[position.rank, position.token.logprob, *(token.logprob for token in position.top)]
                   for position in output.prompt_logprobs or () if position is not None] for output in scored]
    classes = []
    if "classifier" in case:
        with LLM(case["classifier"], **settings) as llm:
            classes = [result.probs for result in llm.classify(prompts)]
    return {"vectors": vectors, "states": states, "scores": scores, "classes": classes, "decode_steps": steps,
            "fallbacks": fallbacks()}


def _plain(messages: list[dict[str, Any]], has_vision: bool) -> list[dict[str, Any]]:
    if has_vision:
        return messages
    parts = [part for part in messages[0]["content"] if part["type"] == "text"]
    return [{"role": "user", "content": parts}]


def fallbacks() -> dict[str, Any]:
    """Operators that left the AI core of the emulated device, sorted or transposed, for want of a kernel."""
    if "CANN_EMU" not in os.environ:
        return {}
    from tests.cann.programs import emulation

    return emulation.fallbacks()


def main(cases_path: str, results_path: str) -> None:
    cases = json.loads(Path(cases_path).read_text())
    Path(results_path).write_text(json.dumps([read(case) for case in cases]))


if __name__ == "__main__":
    main(*sys.argv[1:])
