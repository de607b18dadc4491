"""Answers of steps with drafts beside those of plain steps, with a drafter that knows what follows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from random import Random
from typing import Any

from npu_runner import LLM, SamplingParams
from npu_runner.core.drafts import Drafter
from npu_runner.core.sequence import Sequence
from npu_runner.request.outputs import EngineStats, RequestOutput
from npu_runner.request.repetition_detection import RepetitionDetectionParams
from npu_runner.request.speculative import SpeculativeConfig
from tests.oracle import mixed_requests
from tests.oracle.mixed_requests import (
    PARAMS,
    assert_logprobs_equal,
    few_blocks,
    prompts_of,
    without_logprobs,
)
from tests.oracle.running import need_devices

SETTINGS: dict[str, Any] = {**mixed_requests.SETTINGS, "platform": "cpu"}
DRAWN = SamplingParams(temperature=1.0, seed=4, max_tokens=18)
MORE = [
    DRAWN.replace(no_repeat_ngram_size=2, ignore_eos=True),
    DRAWN.replace(temperature=0.0, repetition_detection=RepetitionDetectionParams(
        max_pattern_size=4, min_pattern_size=1, min_count=3)),
    DRAWN.replace(allowed_token_ids=list(range(60, 90)), n=2),
    DRAWN.replace(presence_penalty=1.5, frequency_penalty=0.7, bad_words=("a b", "of the"), logprobs=2, min_tokens=9),
    DRAWN.replace(structured_outputs={"regex": "[a-z]{30,40}"}, repetition_penalty=1.2, logprobs=1),
    DRAWN.replace(stop=["b"], include_stop_str_in_output=True, min_tokens=4),
    DRAWN.replace(prompt_logprobs=1, logprobs=0),
]
FORCED = {"method": "forced", "num_speculative_tokens": 4}


class KnowsWhatFollows(Drafter):
    """Drafts the answers of plain steps, with another token in some places, also behind their ends."""

    def __init__(self, outputs: list[RequestOutput], most: int, error_share: float):
        super().__init__(SpeculativeConfig(method="forced", num_speculative_tokens=most))
        self._answers = {(index, each.index): each.token_ids
                         for index, output in enumerate(outputs) for each in output.completions}
        self._random, self._error_share = Random(0), error_share

    def can_draft(self, running: SequenceOf[Sequence]) -> bool:
        return self._config.most_drafts(len(running)) > 0

    def propose(self, running: SequenceOf[Sequence], room: int) -> list[list[int]]:
        guesses = [self._guess(seq) for seq in running]
        self.record_next(running, guesses, [len(guess) for guess in guesses])
        return super().propose(running, room)

    def _guess(self, seq: Sequence) -> list[int]:
        answer = self._answers.get((int(seq.request_id.rpartition("-")[2]), seq.index), [])
        follows = [*answer[len(seq.output_token_ids) :], 7, 7, 7, 7]
        return [token if self._random.random() >= self._error_share else 9 for token in follows]


def knows(llm: LLM, outputs: list[RequestOutput], most: int, error_share: float = 0.1) -> None:
    llm.engine._drafter = llm.engine.scheduler.drafter = KnowsWhatFollows(outputs, most, error_share)


def requests(llm: LLM, model_type: str) -> list[tuple[Any, SamplingParams]]:
    return list(itertools.islice(itertools.product([*PARAMS, *MORE], prompts_of(llm, model_type)), 0, None, 2))


def both(path: Path, model_type: str, most: int, **settings: Any) -> tuple[list[RequestOutput], list[RequestOutput],
                                                                           EngineStats]:
    """The answers of plain steps, those of steps with drafts, and the counters of these."""
    with LLM(path, **SETTINGS, **settings) as llm:
        pairs = requests(llm, model_type)
        params, prompts = [each for each, _ in pairs], [prompt for _, prompt in pairs]
        plain = llm.generate(prompts, params)
    with LLM(path, speculative_config=FORCED, **SETTINGS, **settings) as llm:
        knows(llm, plain, most)
        drafted = llm.generate(prompts, params)
        return plain, drafted, llm.stats()


def assert_same(drafted: list[RequestOutput], plain: list[RequestOutput], tolerance: float = 2e-5) -> None:
    for ours, theirs in zip(drafted, plain, strict=True):
        assert without_logprobs(ours) == without_logprobs(theirs)
        assert_logprobs_equal(ours, theirs, tolerance)
        assert (ours.prompt_logprobs is None) == (theirs.prompt_logprobs is None)


def assert_same_but_at_edges(drafted: list[RequestOutput], plain: list[RequestOutput], tolerance: float,
                             most: int) -> None:
    """The same for all but `most` requests at most. Their first other token is the next one by number, as where the
    uniform number of a draw lies within rounding of the edge between two tokens; what follows is another text."""
    others = [index for index, both in enumerate(zip(drafted, plain, strict=True))
              if without_logprobs(both[0]) != without_logprobs(both[1])]
    assert len(others) <= most, f"requests {others} have other tokens"
    for index in others:
        pairs = zip(drafted[index].completions, plain[index].completions, strict=True)
        firsts = [next(((mine, theirs) for mine, theirs in zip(one.token_ids, two.token_ids, strict=False)
                        if mine != theirs), None) for one, two in pairs]
        assert all(abs(first[0] - first[1]) == 1 for first in firsts if first is not None), (index, firsts)
    assert_same(*([output for index, output in enumerate(outputs) if index not in others]
                  for outputs in (drafted, plain)), tolerance)


def assert_every_feature_is_as_without(path: Path, model_type: str, tolerance: float = 2e-5,
                                       most_at_edges: int = 0) -> None:
    """In few blocks, over prompts that are cut; with a prefix cache, in which blocks of drafts would be found."""
    plain, drafted, stats = both(path, model_type, 3, **few_blocks(path, SETTINGS["platform"]))
    assert_same_but_at_edges(drafted, plain, tolerance, most_at_edges)
    reasons = {completion.finish_reason for output in drafted for completion in output.completions}
    assert reasons == {"stop", "length"}
    assert stats.kv_blocks_used == 0
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0.5 * stats.num_draft_tokens


def counted_replays(buckets: Any) -> dict[int, int]:
    """How often each graph runs from now on."""
    counts = {bucket.batch_size: 0 for bucket in buckets.compiled()}

    def counted(bucket: Any) -> Any:
        forward = bucket.forward

        def run(inputs: Any) -> Any:
            counts[bucket.batch_size] += 1
            return forward(inputs)

        return run

    for bucket in buckets.compiled():
        bucket.forward = counted(bucket)
    return counts


def assert_two_ranks_answer_as_one_without(model_type: str, checkpoint: Any, platform_name: str) -> None:
    need_devices(platform_name)
    path: Path = checkpoint(model_type)
    with LLM(path, **SETTINGS) as llm:
        pairs = requests(llm, model_type)
        plain = llm.generate([prompt for _, prompt in pairs], [each for each, _ in pairs])
    with LLM(path, speculative_config=FORCED, tensor_parallel_size=2,
             **SETTINGS) as llm:
        knows(llm, plain, 3)
        assert_same(llm.generate([prompt for _, prompt in pairs], [each for each, _ in pairs]), plain)
        assert llm.stats().num_accepted_tokens > 0
