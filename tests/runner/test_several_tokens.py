"""A step may give a row several tokens: the answers are those of one token a step."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.core.scheduler import StepsUnderWay
from npu_runner.core.sequence import Sequence
from npu_runner.engine.executors.executor import Executor
from npu_runner.runner.base import ModelRunnerOutput

PROMPTS = ["which", "what colour is the picture?", "a b c d e f g", "colour " * 40]
SETTINGS: dict[str, Any] = {"platform": "cpu", "max_model_len": 256, "max_num_seqs": 3, "kv_cache_bytes": 1 << 20,
                            "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def path(checkpoint: Any) -> Path:
    folder: Path = checkpoint("qwen3")
    return folder


class WatchedSteps(StepsUnderWay):
    """`sequences` of each, the oldest first, whether they still wait for it or not."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: deque[list[Sequence]] = deque()

    def launch(self, sequences: list[Sequence]) -> None:
        self.sequences.append(sequences)
        super().launch(sequences)

    def complete(self) -> list[Sequence | None]:
        self.sequences.popleft()
        return super().complete()


class KnowsWhatFollows:
    """Adds to each row's token the next `surplus` ones of the answer that one token a step has given."""

    def __init__(self, llm: LLM, answers: dict[tuple[str, int], list[int]], surplus: int):
        self._answers, self._surplus = answers, surplus
        self._real: Executor = llm.engine._executor
        self._steps = llm.engine.scheduler.under_way = WatchedSteps()
        self.collect = self._real.collect

    def __call__(self) -> ModelRunnerOutput:
        output = self.collect()
        tokens = []
        for row, sequence in enumerate(self._steps.sequences[0]):
            given = output.tokens_of(row)
            start = len(sequence.output_token_ids)
            answer = self._answers[sequence.request_id.rpartition("-")[2], sequence.index]
            tokens.append([*given, *[*answer, 5, 5, 5][start + 1 : start + 1 + self._surplus]] if given else given)
        return replace(output, sampled_token_ids=tokens)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("surplus", [1, 2])
def test_several_tokens_a_step_give_the_same_answers(surplus: int, ahead: bool, path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=13, ignore_eos=True)
    with LLM(path, async_scheduling=ahead, **SETTINGS) as llm:
        free = llm.generate(PROMPTS, greedy)
        ends_early = free[1].token_ids[4]
        early, short = greedy.replace(stop_token_ids=[ends_early]), greedy.replace(max_tokens=4)
        params = [greedy, early, greedy.replace(n=2), short]
        one_by_one = llm.generate(PROMPTS, params)
        answers = {(str(8 + index), completion.index): completion.token_ids
                   for index, output in enumerate(one_by_one) for completion in output.completions}
        steps_before = llm.stats()
        monkeypatch.setattr(llm.engine._executor, "collect", KnowsWhatFollows(llm, answers, surplus))
        several = llm.generate(PROMPTS, params)
        assert [output.completions for output in several] == [output.completions for output in one_by_one]
        assert llm.stats().kv_blocks_used == 0
        assert llm.stats().num_decode_steps - steps_before.num_decode_steps < steps_before.num_decode_steps
