"""Whatever interrupts a step, the next call answers as if nothing had been."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from npu_runner import LLM
from npu_runner.assets import SHAPES_VL
from npu_runner.engine.executors import shared_memory
from npu_runner.engine.executors.executor import Executor
from npu_runner.engine.generation import Generation
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests import full_set, zygote
from tests.faults.interrupts import PARAMS, PROMPTS, SETTINGS, answers
from tests.faults.lines import Injected, raising
from tests.full_set import only_full, some_of
from tests.oracle.running import greedy, runner_of


def assert_recovers(llm: LLM, expected: Any) -> None:
    assert answers(llm) == expected
    stats = llm.stats()
    assert (stats.kv_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)


@pytest.fixture(scope="module")
def expected(checkpoint: Any) -> Any:
    with LLM(checkpoint("qwen3"), **SETTINGS) as llm:
        return answers(llm)


@pytest.mark.parametrize("moments", [
    "first and later", *only_full("one more moment of each place; its first call and a later one stay", "second")])
def test_after_an_exception_in_a_step_the_next_call_answers_as_a_fresh_one(moments: str, checkpoint: Any,
                                                                           expected: Any) -> None:
    assert_every_place_recovers(1, checkpoint, expected, (2,) if moments == "second" else (1, 7))


def test_after_an_exception_at_two_places_of_two_ranks_the_next_call_answers_as_a_fresh_one(checkpoint: Any,
                                                                                            expected: Any) -> None:
    with LLM(checkpoint("qwen3"), tensor_parallel_size=2, **SETTINGS) as llm:
        ranks = llm.engine._executor._ranks  # type: ignore[attr-defined]
        for owner, name in ((ranks[1].wire, "send"), (ranks[0].wire, "pop")):
            with raising(owner, name, 7), pytest.raises(Injected):
                answers(llm)
            assert_recovers(llm, expected)


@pytest.mark.slow
@pytest.mark.full("some thirty exceptions over two ranks; all places of one rank stay, and two of two ranks")
def test_after_an_exception_in_a_step_of_two_ranks_the_next_call_answers_as_a_fresh_one(checkpoint: Any,
                                                                                        expected: Any) -> None:
    assert_every_place_recovers(2, checkpoint, expected)


def assert_every_place_recovers(size: int, checkpoint: Any, expected: Any, calls: Sequence[int] = (1, 2, 7)) -> None:
    """Before the first call, behind the second one, either at the seventh.

    Steps 1 to 4 are prefills and their chunks, later ones mostly decode.
    """
    with LLM(checkpoint("qwen3"), tensor_parallel_size=size, **SETTINGS) as llm:
        executor: Executor = llm.engine._executor
        scheduler = llm.engine.scheduler
        places: list[tuple[Any, str]] = [(executor, "submit"), (executor, "collect"), (scheduler, "schedule"),
                                         (scheduler, "complete"), (llm.engine.block_manager, "commit"),
                                         (Generation, "append"), (llm.engine, "_book")]
        if size == 1:
            runner = runner_of(llm)
            sampler: Any = runner.steps.sampler
            places += [(runner.steps, name) for name in ("admit", "prepare", "launch", "sample", "record_tokens",
                                                         "collect")]
            places += [(runner.model, "compute_logits"), (sampler, "add"), (sampler._state, "_make_plan"),
                       (sampler._state, "plan"), (sampler._state, "prepare_advance")]
        else:
            ranks = executor._ranks  # type: ignore[attr-defined]
            places += [(executor._calls, "write"), (ranks[0].wire, "send"), (ranks[1].wire, "send"),  # type: ignore
                       (ranks[0].wire, "peek"), (ranks[1].wire, "peek"), (ranks[0].wire, "pop"), (ranks[0], "book"),
                       (ranks[1], "book"), (ranks[0], "result"), (shared_memory, "wait")]
        moments = [(*place, at_call) for place in places for at_call in calls]
        if calls == (1, 7) and full_set.is_fast:  # each place at one of the two
            moments = [moment for index, moment in enumerate(moments) if index % 4 in (0, 3)]
        for owner, name, at_call in moments:
            after = at_call == 2 or (at_call == 7 and bool(len(name) % 2))
            try:
                with raising(owner, name, at_call, after=after):
                    answers(llm)
                assert at_call == 7, f"{name} is not called {at_call} times"
            except Injected:
                assert_recovers(llm, expected)


def test_an_interrupt_while_it_is_cleaned_up_loses_nothing(checkpoint: Any, expected: Any) -> None:
    with LLM(checkpoint("qwen3"), **SETTINGS) as llm:
        with raising(llm.engine, "reset", 1), raising(Generation, "append", 7), pytest.raises(Injected):
            answers(llm)
        assert_recovers(llm, expected)


def test_an_interrupted_step_of_the_engine_is_made_again(checkpoint: Any, expected: Any) -> None:
    with LLM(checkpoint("qwen3"), **SETTINGS) as llm:
        engine = llm.engine
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(str(index), engine.processor.from_text(prompt), engine.processor.resolve_params(params))
        found: dict[str, Any] = {}
        num_injected = 0
        while engine.has_unfinished_requests():
            name = ("submit", "collect")[num_injected // 2 % 2]
            try:
                with raising(engine._executor, name, 4, after=num_injected % 2 == 1):
                    for _ in range(5):
                        found.update((output.request_id, output) for output in engine.step())
            except Injected:
                num_injected += 1
        assert num_injected > 5
        assert [[c.token_ids for c in found[str(i)].completions] for i in range(len(PROMPTS))] == expected


def test_images_that_were_under_way_are_seen_as_before() -> None:
    """A prefill cut through an image pins it; the tower, the cache and the first layers are each interrupted."""
    conversations = [draw_example(seed).conversation() for seed in TEST_SEEDS[:2]]
    with LLM(SHAPES_VL, platform="cpu", max_model_len=512, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        expected = [output.token_ids for output in llm.chat(conversations, greedy(3))]
        runner = runner_of(llm)
        places = [(owner, name, after) for after in (False, True) for owner, name in (
            (runner.strategy, "encode_images"), (runner.vision_cache, "put"), (runner.vision_cache, "pin_only"),
            (runner.model, "compute_logits"))]
        for owner, name, after in some_of(places, 3):
            llm.engine.reset()  # nothing is cached: the tower has work
            with raising(owner, name, 1, after=after), pytest.raises(Injected):
                llm.chat(conversations, greedy(3))
            assert [output.token_ids for output in llm.chat(conversations, greedy(3))] == expected
            cache = runner.vision_cache
            assert cache.counters.num_bytes == sum(value.num_bytes for value in cache._values.values())


@pytest.mark.parametrize(("size", "num_interrupts"), [
    (1, 3), *only_full("more of them, and two ranks; three of one rank stay, and exceptions with two", (1, 6), (2, 2))])
def test_ctrl_c_at_random_moments(size: int, num_interrupts: int, checkpoint: Any) -> None:
    assert_goes_on(size, num_interrupts, 2, checkpoint)


@pytest.mark.full("one step under way, and more moments of two ranks; two steps under way of one rank stay")
@pytest.mark.parametrize(("size", "steps_under_way"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_ctrl_c_at_more_moments(size: int, steps_under_way: int, checkpoint: Any) -> None:
    assert_goes_on(size, 12, steps_under_way, checkpoint)


@pytest.mark.slow
@pytest.mark.full("two hundred interrupts; three of one replica stay")
@pytest.mark.parametrize("steps_under_way", [1, 2])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_ctrl_c_at_two_hundred_moments(num_replicas: int, steps_under_way: int, checkpoint: Any) -> None:
    assert_goes_on(1, 50, steps_under_way, checkpoint, num_replicas)


def assert_goes_on(size: int, num_interrupts: int, steps_under_way: int, checkpoint: Any,
                   num_replicas: int = 1) -> None:
    command = [sys.executable, "-m", "tests.faults.interrupts", str(checkpoint("qwen3")), str(size),
               str(num_interrupts), str(steps_under_way), str(num_replicas)]
    done = zygote.run(command, stdout=subprocess.PIPE, start_new_session=True, timeout=500)
    assert done.returncode == 0
    assert json.loads(done.stdout) == [True] * num_interrupts


@pytest.mark.full("Ctrl-C without images stays; an interrupted call of workers too (runner/test_llm_workers.py)")
def test_ctrl_c_at_random_moments_while_images_are_prepared() -> None:
    assert_goes_on_with_images(1, 3)


@pytest.mark.slow
@pytest.mark.full("two ranks start; Ctrl-C without images stays, and an interrupted call of workers")
def test_ctrl_c_with_two_ranks_while_images_are_prepared() -> None:
    assert_goes_on_with_images(2)


def assert_goes_on_with_images(size: int, num_interrupts: int = 6) -> None:
    command = [sys.executable, "-m", "tests.faults.interrupts", SHAPES_VL.name, str(size), str(num_interrupts), "1"]
    done = zygote.run(command, stdout=subprocess.PIPE, start_new_session=True, timeout=500)
    assert done.returncode == 0
    assert json.loads(done.stdout) == [True] * num_interrupts
