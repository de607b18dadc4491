"""A request from the moment the engine has it until all its completions have ended, and what it gives back then.

Knows nothing of steps or of other requests.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from npu_runner.engine.generation import Generation, PromptLogprobsRecord
from npu_runner.request.logprobs import Describe, PromptLogprobs
from npu_runner.request.outputs import CompletionOutput, RequestMetrics, RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs


@dataclass(eq=False)
class UnfinishedRequest:
    """`generations`: one for each completion, or for each prompt of a request for vectors."""

    request_id: str
    prompts: Sequence[PromptInputs]
    generations: list[Generation] = field(default_factory=list)
    num_cached_tokens: int | None = None
    """Of its first prefill: a preempted one finds its own blocks."""
    prompt_logprobs: PromptLogprobsRecord | None = None
    arrival_time: float = field(default_factory=time.time)
    queued_ts: float = field(default_factory=time.monotonic)
    first_token_ts: float = 0.0

    def note_first_token(self) -> None:
        """Its first token, or its first vector, has arrived. Later calls change nothing."""
        self.first_token_ts = self.first_token_ts or time.monotonic()

    def output(self, completions: list[CompletionOutput], describe: Describe) -> RequestOutput:
        """What it gives back. Of several prompts there is neither text nor a list of ids."""
        only = self.prompts[0] if len(self.prompts) == 1 else None
        metrics = RequestMetrics(
            arrival_time=self.arrival_time, queued_ts=self.queued_ts, first_token_ts=self.first_token_ts,
            last_token_ts=time.monotonic(),
            num_generation_tokens=sum(len(completion.token_ids) for completion in completions))
        return RequestOutput(
            self.request_id, completions, num_prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            num_cached_tokens=self.num_cached_tokens or 0, prompt_logprobs=self._scores(describe),
            prompt=only.text if only else None, prompt_token_ids=only.token_ids if only else None, metrics=metrics)

    def _scores(self, describe: Describe) -> PromptLogprobs | None:
        """None if not requested, or if the request ended before its prompt was computed."""
        record = self.prompt_logprobs
        return record.finish(describe) if record is not None and record.is_whole else None
