"""Rows that show a page, and an engine that answers them. Holds no tests."""

from __future__ import annotations

from typing import Any

from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from tests.batch.scripted import ScriptedEngine, row


def asks(name: str, **address: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": name, **address}},
             {"type": "text", "text": "What colour is it?"}]
    return row(name, messages=[{"role": "user", "content": parts}], max_tokens=8)


class PageEngine(ScriptedEngine):
    """Answers every prompt with the same word."""

    def add_request(self, request_id: str, prompt: PromptInputs, params: SamplingParams) -> list[int]:
        self.waiting.append((request_id, "page", params))
        return [len("page")]
