"""Requests that wait in the engine: as many as fill two steps, and only those of a planned step are under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from npu_runner import SamplingParams
from npu_runner.config import RunnerConfig
from npu_runner.core.batch import ScheduledBatch
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.llm.prompt_server import PromptServer
from npu_runner.prompts.tasks import MadeTask
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.serving.endpoint import Prepared
from npu_runner.serving.options import PreprocessingOptions
from npu_runner.serving.replica import Finished, Started
from npu_runner.serving.replicas.inline_replica import MOST_WAITING, few_waiting
from npu_runner.strategies import open_checkpoint

MAX_NUM_SEQS, STEP_TOKENS = 8, 4096
SETTINGS = {"platform": "cpu", "enforce_eager": True, "dtype": "float32", "max_model_len": 512,
            "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": STEP_TOKENS, "block_size": 16}


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[..., Path]) -> Iterator[LLMEngine]:
    config = RunnerConfig.from_keywords(checkpoint("qwen3", num_hidden_layers=1), **SETTINGS)
    with LLMEngine(open_checkpoint(config)) as engine:
        yield engine


@pytest.fixture
def server(engine: LLMEngine) -> Iterator[PromptServer]:
    engine.reset()
    server = PromptServer(lambda progress: engine, PreprocessingOptions(preprocessing_workers=0), "this process",
                          pack=lambda answer: answer)
    server.start(lambda: None, lambda event: None)
    server.poll(0.0)
    server.serve(None)
    yield server
    server.pool.close()  # type: ignore[union-attr]


def submit(server: PromptServer, engine: LLMEngine, prompts: list[list[int]], max_tokens: int = 3) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    server.submit([MadeTask(number=number, params=params, made=engine.processor.from_text(prompt))
                   for number, prompt in enumerate(prompts)])


def test_short_prompts_fill_two_steps_and_a_planned_step_is_what_is_under_way(
        server: PromptServer, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between any two polls finds no more rows under way than the steps under way have."""
    under_way: set[int] = set()
    most_waiting = 0
    submit_step = engine._executor.submit

    def submitted(batch: ScheduledBatch) -> None:
        assert {int(name.rpartition("-")[2]) for name in batch.request_ids} <= under_way, "no row runs before it is"
        submit_step(batch)

    monkeypatch.setattr(engine._executor, "submit", submitted)
    submit(server, engine, [[number // 90 + 1, *[number % 90 + 1] * 19] for number in range(700)])
    finished: list[int] = []
    while len(finished) < 700:
        for event in server.poll(0.0):
            if isinstance(event, Started):
                assert not under_way.intersection(event.indices)
                under_way.update(event.indices)
            elif isinstance(event, Finished):
                finished += [row.number for row in event.rows]
                under_way.difference_update(finished)
                assert all(isinstance(row.data, RequestOutput) for row in event.rows)
        assert len(under_way) <= engine.info.num_steps_under_way * MAX_NUM_SEQS
        most_waiting = max(most_waiting, engine.num_waiting)
    assert most_waiting * 20 == pytest.approx(2 * STEP_TOKENS, rel=0.05)
    assert most_waiting > 5 * few_waiting(MAX_NUM_SEQS)


@pytest.mark.parametrize(("prompts", "most"), [
    ([[number % 90 + 1] * 400 for number in range(100)], few_waiting(MAX_NUM_SEQS)),
    ([[1]] * (MOST_WAITING + 200), MOST_WAITING)], ids=["long", "of one token"])
def test_long_prompts_wait_in_small_numbers_and_none_without_a_bound(
        prompts: list[list[int]], most: int, server: PromptServer, engine: LLMEngine) -> None:
    submit(server, engine, prompts)
    server.poll(0.0)
    assert engine.num_waiting in range(most - MAX_NUM_SEQS, most + 1)


def test_what_the_prefix_cache_has_is_not_counted(server: PromptServer, engine: LLMEngine) -> None:
    beginning = [7] * 320
    submit(server, engine, [[*beginning, 5, 6]], max_tokens=1)
    while not any(isinstance(event, Finished) for event in server.poll(0.0)):
        pass
    submit(server, engine, [[*beginning, number % 90 + 1] for number in range(200)])
    for _ in range(2):
        server.poll(0.0)
    assert engine.num_waiting > 2 * few_waiting(MAX_NUM_SEQS)


def test_a_step_is_not_kept_waiting_for_prompts_that_come_behind_enough_others(
        server: PromptServer, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 tokens are added between two steps, and no fewer prompts than the steps need."""
    monkeypatch.setattr("npu_runner.serving.replicas.inline_replica._MOST_ADDED_TOKENS", 2000)
    beginning, few = [7] * 320, few_waiting(MAX_NUM_SEQS)
    submit(server, engine, [[*beginning, 5, 6]], max_tokens=1)
    while not any(isinstance(event, Finished) for event in server.poll(0.0)):
        pass
    added: list[int] = []
    add_request = engine.add_request

    def add(name: str, prompt: PromptInputs, params: SamplingParams) -> list[int]:
        added[-1] += len(prompt.token_ids)
        return add_request(name, prompt, params)

    monkeypatch.setattr(engine, "add_request", add)
    submit(server, engine, [[*beginning, number % 90 + 1] for number in range(200)], max_tokens=20)
    num_waiting = [0]
    while sum(added) < 200 * 321:
        added.append(0)
        server.poll(0.0)
        num_waiting.append(engine.num_waiting)
    assert added[0] == few * 321
    assert all(tokens <= 2000 + 321 for tokens, waiting in zip(added[1:], num_waiting[1:], strict=False)
               if waiting + MAX_NUM_SEQS > few)
    assert max(num_waiting) > few + MAX_NUM_SEQS, "more wait than are needed"


def test_large_memory_of_an_answered_request_is_let_go_of_by_a_thread(
        server: PromptServer, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[bool, set[str]] = {False: set(), True: set()}

    class Held:
        def __init__(self, *, is_large: bool):
            self.is_large = is_large

        def __del__(self) -> None:
            threads[self.is_large].add(threading.current_thread().name.rstrip("0123456789"))

    prepare = server.endpoint._prepare

    def prepared(task: MadeTask) -> Prepared:
        is_large = task.number % 2 == 1
        return replace(prepare(task), num_bytes=is_large << 20, form=Held(is_large=is_large))

    monkeypatch.setattr(server.endpoint, "_prepare", prepared)
    submit(server, engine, [[number % 90 + 1] * 20 for number in range(20)])
    num_finished = 0
    while num_finished < 20:
        num_finished += sum(len(event.rows) for event in server.poll(0.0) if isinstance(event, Finished))
    server._dropping.shutdown()
    assert threads[False] == {"MainThread"}
    assert "dropping_" in threads[True], "this thread may have the last reference to the first, while the other starts"


def test_large_ones_wait_within_their_bytes(server: PromptServer, engine: LLMEngine,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npu_runner.serving.replicas.inline_replica._MAX_WAITING_BYTES", 5 << 20)
    prepare = server.endpoint._prepare
    monkeypatch.setattr(server.endpoint, "_prepare", lambda task: prepare(task).__class__(
        **{**vars(prepare(task)), "num_bytes": 1 << 20}))
    submit(server, engine, [[number % 90 + 1] * 20 for number in range(100)])
    server.poll(0.0)
    assert engine.num_waiting + MAX_NUM_SEQS >= 5 >= engine.num_waiting
