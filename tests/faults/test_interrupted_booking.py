"""LLMEngine.step goes on after an interrupt while tokens are booked, as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from npu_runner import RunnerConfig, SamplingParams
from npu_runner.engine.detokenizer import IncrementalDetokenizer
from npu_runner.engine.generation import Generation, LogprobsRecord, PlainRows, UnfinishedRequest
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.strategies import open_checkpoint
from tests.faults.lines import Injected, raising
from tests.full_set import only_full, some_of

PARAMS = [
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12),  # an end token
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, stop=["{."]),
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=1.3, max_tokens=14, n=3, seed=4, logprobs=0, stop=["e"]),
]
PLACES = [(PlainRows, "book"), (Generation, "append"), (LogprobsRecord, "append"), (LogprobsRecord, "finish"),
          (IncrementalDetokenizer, "append"), (IncrementalDetokenizer, "finish"), ("scheduler", "finish"),
          ("scheduler", "complete"), ("engine", "_split"), (UnfinishedRequest, "output"), ("engine", "_finish"),
          ("engine", "_answer_if_whole"), ("engine", "_count")]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    config = RunnerConfig.from_keywords("shapes-vl", platform="cpu", max_model_len=256, max_num_seqs=16,
                                        kv_cache_bytes=1 << 22)
    with LLMEngine(open_checkpoint(config)) as engine:
        yield engine


def answers(engine: LLMEngine) -> list[Any]:
    """What every request answers, whatever interrupts its steps."""
    for index, params in enumerate(PARAMS):
        params = engine.processor.resolve_params(params)
        engine.add_request(str(index), engine.processor.from_text("what colour"), params)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except Injected:
            continue
        for output in outputs:
            assert output.request_id not in found, "each is answered once"
            found[output.request_id] = output
    return [said(found[str(index)]) for index in range(len(PARAMS))]


def said(output: Any) -> Any:
    prompt = output.prompt_logprobs
    return [
        None if prompt is None else [[top.token_id for top in place.top] for place in prompt if place is not None],
        *[(completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason,
           None if completion.logprobs is None else [
               (place.sampled.token_id, round(place.sampled.logprob, 3)) for place in completion.logprobs])
          for completion in output.completions],
    ]


@pytest.fixture(scope="module")
def expected(engine: LLMEngine) -> list[Any]:
    return answers(engine)


@pytest.mark.parametrize(("owner", "name", "after"), [
    *((*place, True) for place in PLACES), (*PLACES[0], False),
    *only_full("before each of them: behind the one before it, but for the first",
               *((*place, False) for place in PLACES[1:]))],
    ids=lambda value: {True: "behind", False: "before"}.get(value, getattr(value, "__name__", value)))
def test_what_was_booked_by_halves_is_booked_anew(owner: Any, name: str, after: bool, engine: LLMEngine,
                                                  expected: list[Any]) -> None:
    owners = {"scheduler": engine.scheduler, "engine": engine}
    num_interrupts = 0
    for at_call in some_of((1, 2, 3, 5, 8, 13), 2):
        with raising(owners[owner] if isinstance(owner, str) else owner, name, at_call, after=after) as seen:
            assert answers(engine) == expected, f"call {at_call}"
            num_interrupts += seen() >= at_call
        engine.reset()
    assert num_interrupts > 0, "nothing was interrupted"
