"""Drafts of our own proposers: transformers' tokens, plain steps' answers, and what is refused before a model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.config import RunnerConfig
from npu_runner.engine.bounds import known_limits
from npu_runner.errors import ConfigError
from npu_runner.platforms import pick_platform
from npu_runner.request.outputs import EngineStats, RequestOutput
from npu_runner.strategies import open_checkpoint
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.oracle import reference
from tests.oracle.ruled_requests import FREE, RULED, SHAPE, WORDS, same
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, greedy
from tests.oracle.thinking_checkpoints import OPENS, make_thinking

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
WINDOW = {"sliding_window": 20}
FORCED: dict[str, Any] = {"method": "forced"}
SUFFIX: dict[str, Any] = {"method": "suffix"}
SETTINGS: dict[str, Any] = {"platform": "cpu", **SMALL, "kv_cache_bytes": 64 << 20, "preprocessing_workers": 0}


@pytest.fixture(autouse=True)
def on_the_platform(platform_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "platform", platform_name)


def answers(path: Path | str, prompts: list[Any], params: list[SamplingParams], speculative: dict[str, Any] | None,
            **settings: Any) -> tuple[list[RequestOutput], EngineStats]:
    with LLM(path, speculative_config=speculative, **(SETTINGS | settings)) as llm:
        outputs = llm.generate(prompts, params)
        stats = llm.stats()
    assert stats.kv_blocks_used == 0
    return outputs, stats


@pytest.mark.parametrize(("model_type", "changes"), [("qwen3", {}), ("mistral", WINDOW)])
def test_tokens_with_looked_up_drafts_are_those_of_transformers(model_type: str, changes: dict[str, Any],
                                                                checkpoint: Any) -> None:
    path: Path = checkpoint(model_type, **changes)
    with LLM(path, speculative_config=NGRAM, **SETTINGS) as llm:
        prompts = [llm.engine.processor.from_text(text) for text in ("a b a b a", "which " * 20, "a circle")]
        for prompt, output in zip(prompts, llm.generate(prompts, greedy()), strict=True):
            expected, _ = reference.generate(path, prompt.token_ids, [], max_new_tokens=MAX_NEW_TOKENS)
            assert output.token_ids == expected
        assert llm.stats().num_ngram_drafted > 0


def test_rules_with_drafts_leave_the_same_answers(checkpoint: Any) -> None:
    assert_rules_leave_the_same_answers(checkpoint("qwen3"), NGRAM)


@pytest.mark.full("what a grammar forces alone; it stays beside what is looked up")
def test_rules_with_forced_drafts_alone_leave_the_same_answers(checkpoint: Any) -> None:
    assert_rules_leave_the_same_answers(checkpoint("qwen3"), FORCED)


def assert_rules_leave_the_same_answers(path: Path, speculative: dict[str, Any]) -> None:
    params = [each for pair in zip(FREE, RULED, strict=True) for each in pair]
    prompts = [WORDS[index % len(WORDS)] for index in range(len(params))]
    plain, _ = answers(path, prompts, params, None)
    drafted, stats = answers(path, prompts, params, speculative)
    same(drafted, plain)
    assert stats.num_forced_accepted > 0.7 * stats.num_forced_drafted > 0
    assert (stats.num_ngram_drafted > 0) == (speculative is NGRAM)


def test_earlier_answers_are_drafts_of_later_ones(checkpoint: Any) -> None:
    """The same prompts again, and others: rows of every kind answer as without, and the first ones in few steps."""
    path: Path = checkpoint("qwen3")
    params = [params.replace(logprobs=None) for params in FREE]
    prompts = [WORDS[index % len(WORDS)] for index in range(len(params))]
    found = []
    for speculative in (None, SUFFIX):
        with LLM(path, speculative_config=speculative, **SETTINGS) as llm:
            found.append([[each.token_ids for output in llm.generate(prompts, params) for each in output.completions]
                          for _ in range(2)])
            first = llm.generate(["a b a b"], greedy())[0].token_ids
            before = llm.stats()
            assert llm.generate(["a b a b"], greedy())[0].token_ids == first
            after = llm.stats()
    assert found[0] == found[1]
    num_kept = after.num_suffix_accepted - before.num_suffix_accepted
    assert num_kept > 0
    assert after.num_decode_steps - before.num_decode_steps == len(first) - 1 - num_kept
    assert after.suffix_cache_bytes == 17 << 20


@pytest.mark.full("an embedded model, twice; rules with drafts stay with a tiny one")
def test_images_with_a_schema_and_drafts_are_answered_alike() -> None:
    assert_images_are_answered_alike("shapes-vl")


@pytest.mark.full("the other embedded model; states behind drafts are compared by themselves")
def test_images_with_a_schema_and_drafts_of_states_are_answered_alike(platform_name: str) -> None:
    if pick_platform(platform_name).state_facts.most_drafts == 0:
        pytest.skip("drafts of models with states are refused there")
    assert_images_are_answered_alike("shapes-hybrid")


def assert_images_are_answered_alike(model: str) -> None:
    """An embedded model, which knows what it sees: most of its answer is forced."""
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs={"json": SHAPE})
    conversations = []
    for number in range(4):
        example = draw_example(TEST_SEEDS[number])
        parts: list[dict[str, Any]] = [{"type": "image_pil", "image_pil": image} for image in example.images]
        conversations.append([{"role": "user", "content": [*parts, {"type": "text", "text": example.question}]}])
    found = []
    for speculative in (None, NGRAM):
        with LLM(model, speculative_config=speculative, **SETTINGS) as llm:
            found.append([output.token_ids for output in llm.chat(conversations, params)])
            stats = llm.stats()
    assert found[0] == found[1]
    assert stats.num_forced_accepted > 20
    assert stats.mean_acceptance_length > 2


def test_drafts_stop_at_the_sizes_that_say_so(checkpoint: Any) -> None:
    path: Path = checkpoint("qwen3")
    none = {**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 8, 0]]}
    assert answers(path, ["a b a b"] * 3, [greedy()] * 3, none)[1].num_drafts == 0


@pytest.mark.full("more families; what differs between them is computed for a token as in plain steps")
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3_moe", "olmo2", "glm4v", "qwen2_5_vl", "qwen3_vl_moe",
                                        "qwen3_5_text", "qwen3_next"])
def test_other_families_with_drafts_answer_as_without(model_type: str, checkpoint: Any) -> None:
    path: Path = checkpoint(model_type)
    params = [params.replace(logprobs=None) for params in FREE]
    prompts = [WORDS[index % len(WORDS)] for index in range(len(params))]
    plain, _ = answers(path, prompts, params, None)
    drafted, stats = answers(path, prompts, params, NGRAM)
    same(drafted, plain)
    assert stats.num_ngram_drafted > 0
    # Answers of qwen3_next repeat nothing here; test_drafts_of_states keeps drafts of it.
    assert stats.num_ngram_accepted > 0 or model_type == "qwen3_next"


@pytest.mark.full("two engines; rules behind no reasoning stay")
def test_reasoning_and_its_budget_with_drafts_are_as_without(checkpoint: Any, tmp_path: Path) -> None:
    path = make_thinking(checkpoint, tmp_path / "model", OPENS)
    rule = {"structured_outputs": {"json": SHAPE}, "max_thinking_tokens": 3, "max_tokens": 60}
    thinks = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    params = [*(thinks.replace(max_thinking_tokens=budget) for budget in (0, 1, 5)),
              SamplingParams(temperature=0.0, **rule), SamplingParams(temperature=1.0, seed=2, n=2, **rule)]
    found = []
    for speculative in (None, NGRAM):
        with LLM(path, speculative_config=speculative, **SETTINGS) as llm:
            outputs = llm.chat([[{"role": "user", "content": "which of the two?"}]] * len(params), params)
            found.append([(c.token_ids, c.text, c.reasoning_content) for each in outputs for c in each.completions])
            stats = llm.stats()
    assert found[0] == found[1]
    assert stats.num_forced_accepted > 0


@pytest.mark.parametrize(("model_type", "settings", "words"), [
    ("qwen3_5_text", {"platform": "npu", "speculative_config": FORCED}, "npu verifies at most 7 drafts of a row .* 8;"),
    ("qwen3_5_text", {"graph_mode": "reduce-overhead", "graph_batch_sizes": [8, 12], "max_num_seqs": 8},
     "no step has more than 8 rows"),
    ("qwen3", {"graph_mode": "reduce-overhead", "graph_batch_sizes": [8, 41], "max_num_seqs": 8},
     "no step has more than 40 rows"),
    ("qwen3", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, "mtp: qwen3 has no head for"),
    ("qwen3", {"runner": "pooling"}, "the model pools its prompts"),
])  # fmt: skip
def test_what_takes_no_drafts_is_refused_by_name(model_type: str, settings: dict[str, Any], words: str,
                                                 checkpoint: Any) -> None:
    def start() -> None:
        given = {"platform": "cpu", "speculative_config": NGRAM, **settings}
        known_limits(open_checkpoint(RunnerConfig.from_keywords(checkpoint(model_type), **given)))

    with pytest.raises(ConfigError, match=words):
        start()
