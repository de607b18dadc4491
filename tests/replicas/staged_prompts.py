"""A replica of LLM that a certain prompt kills. Imported by its processes. Holds no tests."""

from __future__ import annotations

import os
import signal
from typing import Any

from npu_runner.request.outputs import RequestOutput
from npu_runner.serving.calls.prompt_server import PromptServer
from npu_runner.serving.replica import ReplicaFacts

POISON = [7, 7, 7, 7]


class StagedServer(PromptServer):
    """The engine is the real one, until it runs a step with that prompt."""

    def _load(self) -> ReplicaFacts:
        facts = super()._load()
        engine: Any = self._engine
        add, step, is_poisoned = engine.add_request, engine.step, False

        def add_request(request_id: str, prompt: Any, params: Any) -> None:
            nonlocal is_poisoned
            is_poisoned = is_poisoned or prompt.token_ids == POISON
            add(request_id, prompt, params)

        def poisoned_step() -> list[RequestOutput]:
            if is_poisoned:
                os.kill(os.getpid(), signal.SIGKILL)
            found: list[RequestOutput] = step()
            return found

        engine.add_request, engine.step = add_request, poisoned_step
        return facts
