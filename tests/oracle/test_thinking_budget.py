"""Thinking under control: the end token comes when the budget is spent, and rules are for what comes behind it.

The oracle is transformers, given the prompt with the thoughts and the end token that were forced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.errors import RequestError
from tests.oracle import reference
from tests.oracle.thinking_checkpoints import LEAVES_IT, OPENS, make_thinking

NUM_TOKENS = 14
CHAT = [{"role": "user", "content": "which of the two pictures shows a circle?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
RULED = GREEDY.replace(ignore_eos=False, max_tokens=80)
SETTINGS: dict[str, Any] = {"platform": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8,
                            "kv_cache_bytes": 16 << 20, "preprocessing_workers": 0}  # fmt: skip


@dataclass(frozen=True)
class Thinker:
    path: Path
    llm: LLM
    prompt: list[int]
    start_id: int
    end_id: int
    thoughts: list[int]
    """What transformers generates where nobody stops it."""


def make_thinker(path: Path, llm: LLM) -> Thinker:
    tokens = llm.engine.processor.reasoning_tokens
    assert tokens is not None
    prompt = llm.engine.processor(CHAT).token_ids
    thoughts, _ = reference.generate(path, prompt, max_new_tokens=NUM_TOKENS)
    assert tokens.end_id not in thoughts, "another seed: it would end by itself"
    return Thinker(path, llm, prompt, tokens.start_id, tokens.end_id, thoughts)


@pytest.fixture(scope="module", params=[False, True], ids=["one step", "two steps"])
def thinker(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory,
            request: pytest.FixtureRequest) -> Iterator[Thinker]:  # fmt: skip
    path = make_thinking(checkpoint, tmp_path_factory.mktemp("thinking") / "model", OPENS)
    with LLM(path, async_scheduling=request.param, **SETTINGS) as llm:
        yield make_thinker(path, llm)


@pytest.fixture(scope="module")
def unsaid(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    """Its template leaves both tags to the model."""
    path = make_thinking(checkpoint, tmp_path_factory.mktemp("unsaid") / "model", LEAVES_IT)
    with LLM(path, async_scheduling=True, **SETTINGS) as llm:
        yield make_thinker(path, llm)


def continued(thinker: Thinker, forced: list[int]) -> list[int]:
    """What transformers says behind the prompt and `forced`, these included."""
    count = NUM_TOKENS - len(forced)
    return forced + reference.generate(thinker.path, thinker.prompt + forced, max_new_tokens=count)[0]


def test_a_spent_budget_forces_the_end_token_and_the_answer_goes_on(thinker: Thinker) -> None:
    budgets = (0, 1, 5, NUM_TOKENS - 2)
    params = [GREEDY.replace(max_thinking_tokens=budget) for budget in budgets]
    outputs = thinker.llm.chat([CHAT] * len(budgets), params)
    for budget, output in zip(budgets, outputs, strict=True):
        thoughts = thinker.thoughts[:budget]
        assert output.token_ids == continued(thinker, [*thoughts, thinker.end_id])
        assert output.completions[0].num_reasoning_tokens == budget


def test_a_budget_that_is_not_spent_changes_nothing_nor_does_one_for_who_may_not_think(thinker: Thinker) -> None:
    (free,) = thinker.llm.chat(CHAT, GREEDY.replace(max_thinking_tokens=NUM_TOKENS))
    assert free.token_ids == thinker.thoughts
    kwargs = {"enable_thinking": False}
    plain, budgeted = thinker.llm.chat([CHAT] * 2, [GREEDY, GREEDY.replace(max_thinking_tokens=0)],
                                       chat_template_kwargs=kwargs)  # fmt: skip
    assert plain.token_ids == budgeted.token_ids


def test_the_budget_is_exact_beside_others_and_for_every_completion(thinker: Thinker) -> None:
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    (alone,) = thinker.llm.chat(CHAT, drawn.replace(n=3))
    beside = [drawn.replace(n=3, max_thinking_tokens=4), drawn.replace(n=3), GREEDY.replace(max_thinking_tokens=2)]
    forced, free, _ = thinker.llm.chat([CHAT] * 3, beside)
    assert [c.token_ids for c in free.completions] == [c.token_ids for c in alone.completions]
    for ours, theirs in zip(forced.completions, alone.completions, strict=True):
        assert ours.token_ids[:4] == theirs.token_ids[:4]
        assert ours.token_ids[4] == thinker.end_id
        assert ours.num_reasoning_tokens == 4


def test_a_rule_is_for_what_comes_behind_the_reasoning(thinker: Thinker) -> None:
    rules: list[dict[str, Any]] = [{"choice": ["circle", "square"]}, {"regex": "[a-z]{9}"}, {"json": {
        "type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"],
        "additionalProperties": False}, "disable_any_whitespace": True}]  # fmt: skip
    params = [RULED.replace(structured_outputs=rule, max_thinking_tokens=6) for rule in rules]
    choice, regex, parsed = thinker.llm.chat([CHAT] * 3, params)
    for output in (choice, regex, parsed):
        assert output.token_ids[:7] == [*thinker.thoughts[:6], thinker.end_id]
        assert output.finish_reason == "stop"
        assert output.reasoning_content
    assert choice.text in ("circle", "square")
    assert len(regex.text) == 9
    assert list(json.loads(parsed.text)) == ["n"]


def test_who_only_thinks_has_no_answer_and_says_length(thinker: Thinker) -> None:
    """No end token comes before the answer, however much it is wanted."""
    end_of_text = {token: 60.0 for token in thinker.llm.engine._eos_token_ids}
    params = RULED.replace(structured_outputs={"json_object": True}, max_tokens=20, logit_bias=end_of_text)
    (output,) = thinker.llm.chat(CHAT, params)
    assert (output.finish_reason, output.text, len(output.token_ids)) == ("length", "", 20)


def test_where_the_template_leaves_the_tags_to_the_model_it_may_think_first(unsaid: Thinker) -> None:
    rule = RULED.replace(structured_outputs={"regex": "[a-z]{9}"}, max_thinking_tokens=3)
    wants, does_not = unsaid.llm.chat([CHAT] * 2, [rule.replace(logit_bias={unsaid.start_id: 90.0}), rule])
    assert wants.token_ids[0] == unsaid.start_id
    assert wants.token_ids[4] == unsaid.end_id
    assert wants.reasoning_content is not None
    for output in (wants, does_not):
        assert (output.finish_reason, len(output.text)) == ("stop", 9)
    assert does_not.reasoning_content is None
    free = GREEDY.replace(max_thinking_tokens=3)
    (output,) = unsaid.llm.chat(CHAT, free)
    assert output.token_ids == unsaid.thoughts, "nobody said that it thinks"


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_tags_do_not_occur_in_a_ruled_answer(
    checkpoint: Callable[..., Path], tmp_path: Path, tags: tuple[str, str]
) -> None:
    """A string of JSON may hold any text, and what ends the reasoning would split it."""
    path = make_thinking(checkpoint, tmp_path / "model", OPENS, tags)
    with LLM(path, **SETTINGS) as llm:
        tokens = llm.engine.processor.reasoning_tokens
        assert tokens is not None
        bias = {tokens.start_id: 90.0, tokens.end_id: 90.0}
        rule = RULED.replace(structured_outputs={"json": {"type": "string", "maxLength": 12}}, logit_bias=bias)
        (output,) = llm.chat(CHAT, rule.replace(max_thinking_tokens=0))
    assert output.token_ids[0] == tokens.end_id
    assert not {tokens.start_id, tokens.end_id} & set(output.token_ids[1:])
    assert output.finish_reason == "stop"
    assert isinstance(json.loads(output.text), str)


def test_a_budget_that_would_limit_nothing_is_refused(thinker: Thinker, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(RequestError, match="max_thinking_tokens: a raw prompt does not say where reasoning begins"):
        thinker.llm.generate("a", GREEDY.replace(max_thinking_tokens=3))
    with LLM(checkpoint("qwen3"), **SETTINGS) as llm, pytest.raises(RequestError, match="no end-of-thinking token"):
        llm.chat(CHAT, GREEDY.replace(max_thinking_tokens=3))
    with pytest.raises(RequestError, match="max_thinking_tokens: -1 is outside 0"):
        GREEDY.replace(max_thinking_tokens=-1)


def test_an_end_that_is_banned_is_an_error_by_name(thinker: Thinker) -> None:
    (output,) = thinker.llm.chat(CHAT, GREEDY.replace(max_thinking_tokens=2, bad_words_token_ids=[[thinker.end_id]]))
    completion = output.completions[0]
    assert (completion.finish_reason, completion.error_code) == ("error", "no_token_left")
    assert "max_thinking_tokens" in str(completion.error)
