"""While a rule is built nobody waits for it but its own row; a rule that cannot be built ends that row by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.batch.rows.openai_response import why_unanswered
from npu_runner.core.sequence import Sequence
from npu_runner.engine.rule_room import RuleRoom
from npu_runner.grammars import matchers
from npu_runner.grammars.matchers import expected_bytes
from npu_runner.request.limits import LIMITS
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.structured_outputs import StructuredOutputsParams
from tests.full_set import only_full
from tests.oracle.running import runner_of
from tests.runner.failing_steps import failing

SETTINGS: dict[str, Any] = {"platform": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256,
                            "preprocessing_workers": 0, "kv_cache_bytes": 16 << 20}  # fmt: skip
FREE = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
RULED = SamplingParams(temperature=1.0, seed=1, max_tokens=60, structured_outputs={"regex": "(ab|cd){4,9}"})


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(params=[True, *only_full("one step under way; two stay", False)], ids=["two steps", "one step"])
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(path, async_scheduling=request.param, **SETTINGS) as llm:
        yield llm


@contextmanager
def building_held(llm: LLM) -> Iterator[threading.Event]:
    """No grammar is built before the event: what builds them is busy."""
    builders: Any = runner_of(llm)._matchers
    builders.start()
    builders._tokens.result()
    gate = threading.Event()
    busy: list[Future[Any]] = [builders._threads.submit(gate.wait) for _ in range(2)]
    try:
        yield gate
    finally:
        gate.set()
        for one in busy:
            one.result()


def add(llm: LLM, name: str, params: SamplingParams) -> None:
    processor = llm.engine.processor
    llm.engine.add_request(name, processor.from_text("which"), processor.resolve_params(params))


def run(llm: LLM, until: Callable[[dict[str, RequestOutput]], bool] = lambda found: False,
        most: int = 2000) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    for _ in range(most):
        if not llm.engine.has_unfinished_requests() or until(found):
            return found
        found |= {output.request_id: output for output in llm.engine.step()}
    raise AssertionError(f"{sorted(found)} ended in {most} steps")


def test_others_are_answered_while_a_rule_is_built(llm: LLM) -> None:
    (free,) = llm.generate(["which"], FREE)
    with building_held(llm) as gate:
        add(llm, "ruled", RULED.replace(n=2))
        add(llm, "free", FREE)
        before = llm.stats().num_decode_steps
        found = run(llm, until=lambda found: "free" in found, most=40)
        assert found["free"].token_ids == free.token_ids
        assert llm.stats().num_decode_steps - before >= FREE.max_tokens - 1
        assert llm.stats().num_waiting == 2, "both completions of the rule"
        for _ in range(2):  # nobody else is left: it is waited for a moment at a time
            assert llm.engine.step() == []
        gate.set()
        found = run(llm)
    assert len(found["ruled"].completions) == 2
    again = llm.generate(["which"], RULED.replace(n=2))[0]
    assert [c.token_ids for c in found["ruled"].completions] == [c.token_ids for c in again.completions]
    assert {c.finish_reason for c in again.completions} == {"stop"}


def test_a_row_whose_rule_is_built_is_ended_by_an_abort(llm: LLM) -> None:
    with building_held(llm) as gate:
        for name in ("first", "second"):
            add(llm, name, RULED)
        llm.engine.step()
        llm.engine.abort_request("first")
        assert [output.finish_reason for output in llm.engine.step()] == ["abort"]
        assert llm.stats().num_waiting == 1
        gate.set()
        assert run(llm)["second"].finish_reason == "stop"


def test_a_reset_and_a_failing_step_lose_no_rule_that_is_built(llm: LLM) -> None:
    """What steps carried is asked for again; a call that was given up leaves nobody waiting."""
    with building_held(llm) as gate:
        add(llm, "gone", RULED.replace(structured_outputs={"regex": "x{5}"}))
        llm.engine.step()
        llm.engine.reset()
        assert not llm.engine.has_unfinished_requests()
        failures = []

        def fault(ids: Any) -> None:
            if not failures:
                failures.append(len(ids))
                raise ValueError("for once")

        add(llm, "free", FREE)
        add(llm, "ruled", RULED)
        with failing(llm, fault):
            assert run(llm, until=lambda found: "free" in found)["free"].finish_reason == "length"
        assert failures
        gate.set()
        assert run(llm)["ruled"].finish_reason == "stop"


def test_an_interrupt_while_a_rule_is_waited_for_loses_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with building_held(llm) as gate:
        add(llm, "ruled", RULED)
        executor: Any = llm.engine._executor
        build_rules, calls = executor.build_rules, []

        def interrupted(*arguments: Any) -> Any:
            answers = build_rules(*arguments)
            calls.append(answers)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return answers

        monkeypatch.setattr(executor, "build_rules", interrupted)
        llm.engine.step()
        gate.set()
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
        assert run(llm)["ruled"].finish_reason == "stop"


def test_a_rule_that_cannot_be_built_ends_its_row_by_name_and_no_other(llm: LLM) -> None:
    """It stands for what the check of a rule does not see: here nothing was checked."""
    bad = StructuredOutputsParams(regex="a", compiled="start: nothing_of_that_name")
    (free,) = llm.generate(["which"], FREE)
    add(llm, "free", FREE)
    add(llm, "bad", RULED.replace(structured_outputs=bad, n=2))
    found = run(llm)
    assert found["free"].token_ids == free.token_ids
    error = why_unanswered(found["bad"])
    assert error is not None
    assert (error.code, error.status_code) == ("invalid_structured_outputs", 400)
    assert "nothing_of_that_name" in error.message
    assert llm.stats().num_waiting == 0


def test_a_rule_that_fails_while_it_is_followed_is_its_rows_own_error(llm: LLM,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """More alternatives at once than the library goes along with, which are 100 here, behind a beginning that fits."""
    from llguidance import LLParserLimits

    monkeypatch.setattr(matchers, "parser_limits", lambda: LLParserLimits(max_items_in_row=100, verbose_errors=False))
    branches = " | ".join(f'"{number:03}" /[a-z]+/' for number in range(200))
    rule = StructuredOutputsParams(grammar="start: x", compiled=f"start: /[a-z]{{3}}/ b\nb: {branches}")
    (free,) = llm.generate(["which"], FREE)
    add(llm, "free", FREE)
    add(llm, "bad", RULED.replace(structured_outputs=rule))
    found = run(llm)
    assert found["free"].token_ids == free.token_ids
    error = why_unanswered(found["bad"])
    assert error is not None
    assert (error.code, error.status_code) == ("invalid_structured_outputs", 400)
    assert "items" in error.message


def properties(count: int) -> StructuredOutputsParams:
    names = {f"property_{number}": {"type": "string", "maxLength": 3} for number in range(count)}
    return StructuredOutputsParams(json={"type": "object", "properties": names, "additionalProperties": False})


@pytest.mark.full("two ranks start, 6 s; one rank in the engine's own process stays")
def test_two_ranks_step_on_while_the_first_builds(path: Path) -> None:
    """A rule that takes a fifth of a second, really built; then one that fails there."""
    with LLM(path, async_scheduling=True, tensor_parallel_size=2, **SETTINGS) as llm:
        (free,) = llm.generate(["which"], FREE)
        add(llm, "ruled", SamplingParams(temperature=0.0, max_tokens=5, structured_outputs=properties(1000)))
        add(llm, "free", FREE.replace(max_tokens=3))
        add(llm, "bad", RULED.replace(structured_outputs=StructuredOutputsParams(regex="a", compiled="start: no_such")))
        found = run(llm)
        assert found["free"].token_ids == free.token_ids[:3]
        assert list(found).index("free") < list(found).index("ruled")
        assert found["ruled"].finish_reason == "length"
        assert found["bad"].completions[0].error_code == "invalid_structured_outputs"
        assert llm.engine._rules.num_waiting == 0


# -- the room itself ------------------------------------------------------------------------------------------------


def sequence(number: int, grammar: str) -> Sequence:
    rule = StructuredOutputsParams(regex="a", compiled=grammar) if grammar else None
    return Sequence(number, number, str(number), 0, PromptInputs([1]), SamplingParams(structured_outputs=rule), 0)


def test_no_more_is_built_ahead_than_fits() -> None:
    """A third of the room each: two are asked for, the third once the first has entered a step, or has ended."""
    room, size = RuleRoom(), LIMITS.max_matcher_bytes // 6 // 160
    several = [sequence(number, str(number) * size) for number in range(4)]
    assert all(room.holds(one) for one in several)
    assert [number for number, _ in room.to_ask()] == [0, 1]
    assert room.to_ask() == []
    room.record({0: None, 7: None})
    assert room.pop_ready() == several[:1]
    assert room.to_ask() == [], "it is built, and takes its room until it has a slot"
    several[0].slot = 3
    assert [number for number, _ in room.to_ask()] == [2]
    room.leave(several[1])
    assert [number for number, _ in room.to_ask()] == [3]
    assert room.num_waiting == 2
    assert not room.holds(sequence(9, str(0) * size)), "built"


def test_one_that_is_larger_than_all_room_is_built_alone() -> None:
    room = RuleRoom()
    large = "x" * LIMITS.max_matcher_bytes
    assert expected_bytes(large) > LIMITS.max_matcher_bytes
    for number, grammar in enumerate((large, "a", "b")):
        assert room.holds(sequence(number, grammar))
    assert [number for number, _ in room.to_ask()] == [0]
    room.ask_again()
    assert [number for number, _ in room.to_ask()] == [0], "lost with a step that was given up"
    assert not room.holds(sequence(4, ""))
