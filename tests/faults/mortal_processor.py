"""A processor some of whose texts kill the process that prepares them. Imports no torch: workers read it."""

from __future__ import annotations

from typing import Any

from npu_runner.prompts.processor import ChatProcessor
from npu_runner.request.prompt_inputs import PromptInputs
from tests.faults.strikes import die, strikes

POISON = "W"


class MortalProcessor(ChatProcessor):
    """How often POISON kills is a matter of strikes.py."""

    def from_text(self, prompt: Any, *arguments: Any, **keywords: Any) -> PromptInputs:
        if isinstance(prompt, str) and POISON in prompt and strikes():
            die()
        return super().from_text(prompt, *arguments, **keywords)
