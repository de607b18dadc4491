"""Steps with drafts of models that keep a state: answers and states are those of one token a step.

The oracle is the plain run: its answers, and the states that it leaves behind each token.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner import LLM, SamplingParams
from npu_runner.platforms import pick_platform
from npu_runner.request.outputs import RequestOutput
from tests.cuda.gated_delta_work import state_in_ring
from tests.oracle.mixed_requests import few_blocks
from tests.oracle.running import runner_of
from tests.runner.drafted_answers import (
    DRAWN,
    FORCED,
    SETTINGS,
    KnowsWhatFollows,
    assert_every_feature_is_as_without,
    assert_same,
    assert_two_ranks_answer_as_one_without,
    counted_replays,
    knows,
    requests,
)

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(autouse=True)
def on_the_platform(platform_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if pick_platform(platform_name).state_facts.most_drafts == 0:
        pytest.skip("drafts of models with states are refused there")
    monkeypatch.setitem(SETTINGS, "platform", platform_name)


def states_of(llm: LLM) -> dict[tuple[str, int, int], tuple[Tensor, Tensor]]:
    """Of each running sequence, by request, index and tokens that its state has seen: what lies in its slot, and what
    the ring beside it adds."""
    pool: Any = runner_of(llm).states
    rows = llm.engine.scheduler._table.states
    found: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}
    for seq in llm.engine.scheduler.running:
        assert seq.slot is not None
        slot = seq.slot if rows is None else int(rows._slot_of_row[seq.slot])
        key = seq.request_id, seq.index, seq.num_computed_tokens
        if pool.rings is None:
            found[key] = pool.states[:, slot].clone(), pool.conv_states[:, slot].clone()
            continue
        length, columns = seq.num_computed_tokens, pool.conv_states.shape[2]
        tail = [position % columns for position in range(length - runner_of(llm).delta_shape.conv_kernel_size + 1,
                                                         length)]
        found[key] = (torch.stack([state_in_ring(state[slot], pool.rings.for_layer(layer), slot, length)
                                   for layer, state in enumerate(pool.states)]), pool.conv_states[:, slot, tail].cpu())
    return found


def answers_and_states(llm: LLM, pairs: list[tuple[Any, SamplingParams]]) -> tuple[list[RequestOutput], dict[Any, Any]]:
    """Answers in order, and the states behind every step."""
    engine = llm.engine
    outputs: dict[str, RequestOutput] = {}
    states: dict[Any, Any] = {}
    for index, (params, prompt) in enumerate(pairs):
        engine.add_request(f"r-{index}", prompt, engine.processor.resolve_params(params))
    while engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in engine.step()})
        states.update(states_of(llm))
    return [outputs[f"r-{index}"] for index in range(len(pairs))], states


def test_the_states_behind_drafts_are_those_of_plain_steps(checkpoint: Any) -> None:
    """Greedy and drawn rows with penalties, schemas and several answers, in few blocks: some are preempted."""
    path: Path = checkpoint("qwen3_5_text")
    settings = SETTINGS | few_blocks(path, SETTINGS["platform"])
    long = DRAWN.replace(max_tokens=60, ignore_eos=True)
    params = [long.replace(temperature=0.0), long.replace(repetition_penalty=1.3, presence_penalty=0.5, n=2),
              DRAWN.replace(structured_outputs={"regex": "[a-z]{4,9}(,[0-9]{3})*"}, max_tokens=30)]
    with LLM(path, **settings, async_scheduling=False) as llm:
        prompts = [llm.engine.processor.from_text(text) for text in ("a b c " * 3, "which of the pictures " * 4)]
        pairs = [(each, prompt) for each, prompt in itertools.product(params, prompts)]
        plain, expected = answers_and_states(llm, pairs)
    with LLM(path, speculative_config=FORCED, **settings) as llm:
        knows(llm, plain, 3, 0.2)
        drafted, found = answers_and_states(llm, pairs)
        stats = llm.stats()
    assert_same(drafted, plain)
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 50
    assert stats.num_preemptions > 0 or SETTINGS["platform"] != "cpu"
    assert len(found) > 100
    for key, both in found.items():
        for mine, theirs in zip(both, expected[key], strict=True):
            assert (mine - theirs).abs().max() <= 1e-4 * theirs.abs().max(), key


@pytest.mark.full("every field of a request; states and some fields stay")
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5", "qwen3_next"])
def test_every_feature_answers_as_without(model_type: str, checkpoint: Any) -> None:
    """With images too, in few blocks, over prompts that are cut and prefixes that have snapshots. A state carries what
    all tokens before it were rounded by.

    Rings are written into states at other tokens than without drafts, so sums differ in their last digits. Of 1,000
    draws some lie that near to an edge: one of qwen3_5 4e-7 of all weights beside it.
    """
    has_rings = pick_platform(SETTINGS["platform"]).state_facts.ring_length > 0
    assert_every_feature_is_as_without(checkpoint(model_type), model_type, tolerance=5e-5,
                                       most_at_edges=2 if has_rings else 0)


@pytest.mark.full("more settings: few spare states, no snapshot; the usual ones stay")
@pytest.mark.parametrize("settings", [{"max_num_seqs": 2, "max_state_snapshots": 0}, {"max_state_snapshots": 1}])
def test_few_spare_states_and_snapshots_change_no_answer(settings: dict[str, Any], checkpoint: Any,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    path: Path = checkpoint("qwen3_5_text")
    settings = SETTINGS | settings
    with LLM(path, **settings) as llm:
        pairs = requests(llm, "qwen3_5_text")[:30]
        plain = llm.generate([prompt for _, prompt in pairs], [each for each, _ in pairs])
    with LLM(path, speculative_config=FORCED, **settings) as llm:
        knows(llm, plain, 4)
        states: Any = llm.engine.scheduler._table.states
        if states is not None:  # else drafts leave no states
            states._free = states._free[:5]
        assert_same(llm.generate([prompt for _, prompt in pairs], [each for each, _ in pairs]), plain)
        assert states is None or (len(states._free), states._lent) == (5, {})
        assert llm.stats().num_accepted_tokens > 0


def test_memory_that_runs_out_in_a_step_with_drafts_changes_no_answer(checkpoint: Any) -> None:
    assert_memory_that_runs_out_changes_nothing(checkpoint("qwen3_5_text"), "make_result")


@pytest.mark.full("two more phases of a step; the one in which drafts are drawn stays")
@pytest.mark.parametrize("name", ["launch", "_output"])
def test_memory_that_runs_out_elsewhere_changes_no_answer(name: str, checkpoint: Any) -> None:
    assert_memory_that_runs_out_changes_nothing(checkpoint("qwen3_5_text"), name)


def assert_memory_that_runs_out_changes_nothing(path: Path, name: str) -> None:
    """Behind the writes of its states: its sequences begin anew."""
    params = [DRAWN.replace(ignore_eos=True, repetition_penalty=1.3), DRAWN.replace(temperature=0.0, ignore_eos=True)]
    with LLM(path, **SETTINGS) as llm:
        plain = llm.generate(["a b", "which of"], params)
    with LLM(path, speculative_config=FORCED, **SETTINGS) as llm:
        knows(llm, plain, 3)
        steps: Any = runner_of(llm).steps
        run = getattr(steps, name)
        failures: list[str] = []

        def fail_once(*arguments: Any) -> Any:
            result = run(*arguments)
            if steps._verified is not None and not failures:
                failures.append(steps._verified.batch.describe())
                raise MemoryError("can't allocate memory")
            return result

        setattr(steps, name, fail_once)
        assert_same(llm.generate(["a b", "which of"], params), plain)
        stats, guard = llm.stats(), runner_of(llm).guard
    assert failures
    assert (guard.num_retries, stats.num_accepted_tokens > 0) == (0, True)


def test_the_ledger_has_the_states_of_drafts_and_a_step_has_no_more_drafts(checkpoint: Any) -> None:
    """Where 1 GiB does not hold so many, a row's own stay at least."""
    path: Path = checkpoint("qwen3_5_text")
    with LLM(path, speculative_config=NGRAM, **SETTINGS) as llm:
        pool: Any = runner_of(llm).states
        plan, has_rings = pool.plan, pool.rings is not None
        assert plan.num_spares == (0 if has_rings else 3 * SETTINGS["max_num_seqs"])
        spares = "" if has_rings else f"{plan.num_spares} for drafts, "
        assert f"{plan.num_padding} padded rows, {spares}{plan.num_snapshots} snapshots" in llm.engine.ledger
        assert pool.num_bytes == plan.num_bytes
        assert llm.engine.info.state is not None
        assert llm.engine.info.state.spares == plan.spares
        llm.generate(["a b a b a b a b"] * 3, DRAWN.replace(temperature=0.0, ignore_eos=True, max_tokens=20))
        assert llm.stats().num_drafts > 0


@pytest.mark.full("two engines; made-up steps beside states and rings stay")
def test_made_up_steps_leave_the_states_of_moved_sequences_alone(checkpoint: Any) -> None:
    """Their states may lie where drafts left them, or in part in rings."""
    path: Path = checkpoint("qwen3_5_text")
    params = DRAWN.replace(temperature=0.0, ignore_eos=True, max_tokens=30)
    with LLM(path, **SETTINGS) as llm:
        plain = llm.generate(["a b", "which of"], params)
    with LLM(path, speculative_config=FORCED, **SETTINGS) as llm:
        llm.engine._drafter = llm.engine.scheduler.drafter = KnowsWhatFollows(plain, 3, 0.0)
        for index, text in enumerate(("a b", "which of")):
            llm.engine.add_request(f"r-{index}", llm.engine.processor.from_text(text), params)
        rows: Any = llm.engine.scheduler._table.states
        for _ in range(4):
            llm.engine.step()
        while rows is not None and max(rows._slot_of_row) < SETTINGS["max_num_seqs"]:
            llm.engine.step()
        assert len(llm.engine.scheduler.running) == 2
        before = states_of(llm)
        runner_of(llm).profile_run()
        runner_of(llm).dummy_run(64, 3, expected_decode_len=2)
        after = states_of(llm)
        assert all(torch.equal(mine, theirs) for key in before
                   for mine, theirs in zip(after[key], before[key], strict=True))
        found: list[RequestOutput] = []
        while llm.engine.has_unfinished_requests():
            found += llm.engine.step()
    assert [each.token_ids for each in sorted(found, key=lambda each: each.request_id)] == [
        each.token_ids for each in plain]


@pytest.mark.full("inductor compiles a graph; captured ones stay on the emulated CANN")
@pytest.mark.slow
def test_plain_steps_run_in_graphs_and_those_with_drafts_without(checkpoint: Any) -> None:
    path: Path = checkpoint("qwen3_5_text")
    graphs = {"graph_mode": "reduce-overhead", "graph_batch_sizes": [6]}
    with LLM(path, **SETTINGS) as llm:
        pairs = requests(llm, "qwen3_5_text")[:24]
        plain = llm.generate([prompt for _, prompt in pairs], [each for each, _ in pairs])
    with LLM(path, speculative_config=FORCED, **SETTINGS | graphs) as llm:
        assert llm.engine.info.graphs == "6"
        knows(llm, plain, 3)
        used = counted_replays(runner_of(llm).steps.buckets)
        assert_same(llm.generate([prompt for _, prompt in pairs], [each for each, _ in pairs]), plain)
        stats = llm.stats()
    assert stats.num_accepted_tokens > 0
    assert 0 < used[6] < stats.num_decode_steps


@pytest.mark.full("two ranks start; one rank stays")
@pytest.mark.slow
def test_two_ranks_answer_as_one_without(checkpoint: Any, platform_name: str) -> None:
    assert_two_ranks_answer_as_one_without("qwen3_5_text", checkpoint, platform_name)
