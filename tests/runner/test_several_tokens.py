"""Steps with drafts: the answers are those of one token a step, whatever was drafted. The oracle is the plain run.

Here drafts are those of a drafter that knows the answers and errs now and then, so that rows with every kind of
parameters keep many and refuse some. Our own proposers are in tests/oracle/test_speculative.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.request.speculative import SpeculativeConfig
from tests.oracle.mixed_requests import (
    failing_once,
    few_blocks,
)
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


@pytest.fixture(autouse=True)
def on_the_platform(platform_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "platform", platform_name)


def test_every_feature_with_drafts_answers_as_without(checkpoint: Any) -> None:
    assert_every_feature_is_as_without(checkpoint("qwen3"), "qwen3")


@pytest.mark.full("the same with images in prompts; images with drafts stay with the embedded model")
def test_every_feature_with_images_and_drafts_answers_as_without(checkpoint: Any) -> None:
    assert_every_feature_is_as_without(checkpoint("qwen3_vl"), "qwen3_vl")


def test_steps_that_are_too_large_for_drafts_run_ahead(checkpoint: Any) -> None:
    """Of three rows and more. The longest answers end by themselves, in steps with drafts, one after the other."""
    path: Path = checkpoint("qwen3")
    off = {**FORCED, "num_speculative_tokens_per_batch_size": [[3, 64, 0]]}
    params = [DRAWN.replace(max_tokens=20 + 10 * number, ignore_eos=True, repetition_penalty=1.1)
              for number in range(4)]
    params.append(DRAWN.replace(structured_outputs={"regex": "([a-z]|(, and so on, ))*"}, max_tokens=50))
    prompts = [f"{word} b c" for word in "adefg"]
    with LLM(path, **SETTINGS) as llm:
        plain = llm.generate(prompts, params)
    with LLM(path, speculative_config=off, async_scheduling=True, **SETTINGS) as llm:
        knows(llm, plain, 4)
        llm.engine._drafter._config = SpeculativeConfig.from_mapping(off)  # type: ignore[union-attr]
        submit, seen = llm.engine._executor.submit, set()

        def noted(batch: Any) -> None:
            seen.add((len(llm.engine._under_way), batch.batch_size > 2, batch.has_drafts))
            submit(batch)

        llm.engine._executor.submit = noted  # type: ignore[method-assign]
        assert_same(llm.generate(prompts, params), plain)
        stats = llm.stats()
    assert {(2, True, False), (1, False, True)} <= seen
    assert not {step for step in seen if step[1:] == (True, True) or (step[0] == 2 and step[2])}
    assert stats.num_accepted_tokens > 10
    assert stats.kv_blocks_used == 0


@pytest.mark.full("what is looked up and refused for a while; steps that are too large for drafts run ahead alike")
def test_steps_whose_rows_have_no_drafts_for_now_run_ahead(checkpoint: Any) -> None:
    """What is looked up is refused, so it is paused, and comes back."""
    path: Path = checkpoint("qwen3")
    params, prompts = DRAWN.replace(max_tokens=90, ignore_eos=True, temperature=2.0), ["a b c d " * 6]
    ngram = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    with LLM(path, **SETTINGS) as llm:
        plain = llm.generate(prompts, params)
    with LLM(path, speculative_config=ngram, async_scheduling=True, **SETTINGS) as llm:
        submit, seen = llm.engine._executor.submit, []

        def noted(batch: Any) -> None:
            if not batch.is_prefill:
                seen.append((len(llm.engine._under_way), batch.has_drafts))
            submit(batch)

        llm.engine._executor.submit = noted  # type: ignore[method-assign]
        assert_same(llm.generate(prompts, params), plain)
    drafted = [number for number, step in enumerate(seen) if step == (1, True)]
    assert (2, True) not in seen
    assert (2, False) in seen[drafted[0] : drafted[-1]]


def test_places_that_are_drawn_at_once_are_those_of_plain_steps(checkpoint: Any, monkeypatch: Any) -> None:
    """Draws by temperature, from the most probable, under a grammar and an allowed list; wrong drafts among them."""
    path: Path = checkpoint("qwen3")
    params = [DRAWN.replace(ignore_eos=True), DRAWN.replace(top_p=0.8, top_k=20, min_p=0.02, n=3),
              DRAWN.replace(temperature=0.0, max_tokens=30), DRAWN.replace(allowed_token_ids=list(range(60, 90))),
              DRAWN.replace(structured_outputs={"regex": "[a-z]{4,9}(,[0-9]{3})*"}, max_tokens=30)]
    prompts = [f"{word} b c" for word in "adefg"]
    with LLM(path, **SETTINGS) as llm:
        plain = llm.generate(prompts, params)
    with LLM(path, speculative_config=FORCED, **SETTINGS) as llm:
        knows(llm, plain, 3, 0.3)
        monkeypatch.setattr(runner_of(llm).steps, "_sample", None)  # place by place
        assert_same(llm.generate(prompts, params), plain)
        stats = llm.stats()
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 20


@pytest.mark.full("two engines; rows with states that are preempted between drafts stay (test_drafts_of_states.py)")
def test_sequences_that_are_preempted_between_drafts_answer_as_without(checkpoint: Any) -> None:
    """Six rows grow to five blocks each, and there are seventeen."""
    path: Path = checkpoint("qwen3")
    settings, prompts = SETTINGS | few_blocks(path, SETTINGS["platform"]), [f"{word} b c" * 3 for word in "adefgh"]
    params = DRAWN.replace(max_tokens=64, ignore_eos=True, repetition_penalty=1.1)
    with LLM(path, **settings) as llm:
        plain = llm.generate(prompts, params)
    with LLM(path, speculative_config=FORCED, **settings) as llm:
        knows(llm, plain, 3)
        assert_same(llm.generate(prompts, params), plain)
        stats = llm.stats()
    assert stats.num_preemptions > 0 or SETTINGS["platform"] != "cpu"  # there the cache is as large as ever
    assert stats.num_accepted_tokens > 0
    assert stats.kv_blocks_used == 0


@pytest.mark.full("inductor compiles two graphs; captured ones stay on the emulated CANN")
@pytest.mark.slow
def test_steps_with_drafts_run_in_the_graphs_of_plain_ones(checkpoint: Any) -> None:
    """Of 3 rows and of 12, which only drafts fill; larger steps are eager."""
    path: Path = checkpoint("qwen3")
    graphs = {"graph_mode": "reduce-overhead", "graph_batch_sizes": [3, 12], "max_num_batched_tokens": 64}
    with LLM(path, **SETTINGS) as llm:
        pairs = requests(llm, "qwen3")
        plain = llm.generate([prompt for _, prompt in pairs], [each for each, _ in pairs])
    with LLM(path, speculative_config=FORCED, **SETTINGS | graphs) as llm:
        assert llm.engine.info.graphs.partition(";")[0] == "3, 12"
        knows(llm, plain, 3)
        used = counted_replays(runner_of(llm).steps.buckets)
        assert_same(llm.generate([prompt for _, prompt in pairs], [each for each, _ in pairs]), plain)
        assert llm.stats().num_accepted_tokens > 0
    assert used[3] > 0 < used[12]


def test_an_answer_takes_as_few_steps_as_its_drafts_allow(checkpoint: Any) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
    path: Path = checkpoint("qwen3")
    with LLM(path, speculative_config=FORCED, **SETTINGS) as llm:
        knows(llm, [], 0)  # no draft at all
        plain = llm.generate(["a b c"], greedy)
        before = llm.stats()
        assert (before.num_decode_steps, before.num_drafts) == (20, 0)
        llm.engine._drafter = llm.engine.scheduler.drafter = drafter = KnowsWhatFollows(plain, 4, 0.0)
        drafter._answers[1, 0] = plain[0].token_ids
        assert llm.generate(["a b c"], greedy)[0].token_ids == plain[0].token_ids
        after = llm.stats()
        assert after.num_decode_steps - before.num_decode_steps == 4
        assert after.num_decode_tokens - before.num_decode_tokens == 20
        assert (after.num_accepted_tokens, after.mean_acceptance_length) == (16, 5.0)


def test_memory_that_runs_out_between_two_draws_changes_no_answer(checkpoint: Any) -> None:
    assert_memory_that_runs_out_changes_nothing(checkpoint("qwen3"), "_sample", (3, 6))


@pytest.mark.full("two more phases of a step; the one in which drafts are drawn stays")
@pytest.mark.parametrize("name", ["launch", "_output"])
def test_memory_that_runs_out_elsewhere_in_a_step_with_drafts_changes_no_answer(name: str, checkpoint: Any) -> None:
    assert_memory_that_runs_out_changes_nothing(checkpoint("qwen3"), name, (2, 3, 6))


def assert_memory_that_runs_out_changes_nothing(path: Path, name: str, at_calls: tuple[int, ...]) -> None:
    """Some places of the step are drawn by then, and must not be drawn and counted again."""
    params = [DRAWN.replace(ignore_eos=True, repetition_penalty=1.3), DRAWN.replace(no_repeat_ngram_size=3)]
    with LLM(path, **SETTINGS) as llm:
        plain = llm.generate(["a b", "which of"], params)
    for at_call in at_calls:
        with LLM(path, speculative_config=FORCED, **SETTINGS) as llm:
            knows(llm, plain, 3)
            num_calls = failing_once(runner_of(llm).steps, name, at_call)
            assert_same(llm.generate(["a b", "which of"], params), plain)
            assert num_calls[0] > at_call


@pytest.mark.full("two ranks start; one rank stays, and what differs is a broadcast")
@pytest.mark.slow
def test_two_ranks_with_drafts_answer_as_one_without(checkpoint: Any, platform_name: str) -> None:
    assert_two_ranks_answer_as_one_without("qwen3", checkpoint, platform_name)
