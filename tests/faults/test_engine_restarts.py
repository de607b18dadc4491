"""An LLM that loads its engine again, as Ray Data's does: a request that ends it is given up, no other is lost.

The engine is a real one whose steps raise what a dead rank makes them raise; it is "loaded" by being reset. 4 s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from npu_runner.config import RunnerConfig
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.errors import EngineDeadError
from npu_runner.llm import prompt_service
from npu_runner.request.outputs import RequestOutput
from tests.full_set import only_full

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
POISON = [7, 7, 7, 7]
PROMPTS: list[Any] = [[5, 6, number] for number in range(7)]


class RestartedLLM(LLM):
    max_engine_restarts = 9


class Stage:
    """`blame`, `names_rows`: what a dead engine says. `num_deaths`: how often one died, `beside`: with how many."""

    def __init__(self, engine: LLMEngine):
        self.engine: Any = engine
        self.blame: str | None = None
        self.names_rows = True
        self.beside: list[int] = []
        self._add, self._step = self.engine.add_request, self.engine.step
        self.engine.add_request, self.engine.step, self.engine.close = self.add, self.step, lambda: None
        self._poisoned: set[str] = set()

    def add(self, request_id: str, prompt: Any, params: Any) -> Any:
        if prompt.token_ids == POISON:
            self._poisoned.add(request_id)
        return self._add(request_id, prompt, params)

    def step(self) -> list[RequestOutput]:
        under_way = tuple(self.engine._requests)
        if self._poisoned.intersection(under_way):
            self.beside.append(len(under_way) - 1)
            raise EngineDeadError("rank 1 died", request_ids=under_way if self.names_rows else (), blame=self.blame)
        found: list[RequestOutput] = self._step()
        return found

    def load(self, config: RunnerConfig) -> LLMEngine:
        self.engine.reset()
        engine: LLMEngine = self.engine
        return engine


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    with RestartedLLM(SHAPES_VL, platform="cpu", max_num_seqs=4, max_model_len=256, kv_cache_bytes=8 << 20,
                      preprocessing_workers=0) as llm:
        stage = llm.stage = Stage(llm.engine)  # type: ignore[attr-defined]
        monkeypatch.setattr(prompt_service, "load_engine", stage.load)
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("blame", [None, *only_full("another blame, which is passed on alike", "out_of_memory")])
def test_a_request_that_ends_the_engine_is_given_up_and_no_other_is_lost(llm: LLM, blame: str | None) -> None:
    stage: Stage = llm.stage  # type: ignore[attr-defined]
    stage.blame = blame
    whole = tokens(llm.generate(PROMPTS, GREEDY))
    results = llm.generate([*PROMPTS[:3], POISON, *PROMPTS[3:]], GREEDY)
    assert results[3].error_code == (blame or "request_failed")
    assert "alone in its step, this request ended the engine: rank 1 died" in str(results[3].error)
    assert tokens(results[:3] + results[4:]) == whole
    alone = [count for count in stage.beside if count == 0]
    assert len(stage.beside) - len(alone) == 2, "together twice"
    assert len(alone) == (1 if blame else 2)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == whole


def test_an_engine_that_dies_of_no_request_is_not_loaded_again(llm: LLM) -> None:
    stage: Stage = llm.stage  # type: ignore[attr-defined]
    stage.names_rows = False
    with pytest.raises(EngineDeadError, match="rank 1 died"):
        llm.generate([*PROMPTS, POISON], GREEDY)
    assert len(stage.beside) == 1
    with pytest.raises(EngineDeadError, match="the model was closed"):
        llm.generate(PROMPTS, GREEDY)
