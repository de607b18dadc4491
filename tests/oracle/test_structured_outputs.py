"""Answers that parse: jsonschema says whether they fit, transformers with llguidance's own mask which tokens come."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from npu_runner import LLM, StructuredOutputsParams
from npu_runner.errors import RequestError
from npu_runner.grammars.compile import json_options, with_grammar
from npu_runner.grammars.matchers import Matchers
from npu_runner.runner.model_runner import ModelRunner
from tests.full_set import examples, is_fast, only_full
from tests.oracle import reference
from tests.oracle.random_schemas import random_schema
from tests.oracle.ruled_requests import DRAWN, FREE, GREEDY, RULED, SHAPE, WORDS, same
from tests.oracle.running import need_devices
from tests.runner.failing_steps import failing

SETTINGS: dict[str, Any] = {"platform": "cpu", "dtype": "float32", "max_num_seqs": 16, "max_model_len": 512,
                            "preprocessing_workers": 0}  # fmt: skip


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module", params=[True, *only_full("one step under way; two stay, as by default", False)],
                ids=["two steps", "one step"])
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(path, async_scheduling=request.param, kv_cache_bytes=64 << 20, **SETTINGS) as llm:
        yield llm


def fits(schema: Any, text: str) -> None:
    """Raises where the answer is not JSON that fits its schema."""
    kind = jsonschema.Draft202012Validator
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


def check_random_schemas(llm: LLM, count: int, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    params = [(DRAWN if index % 2 else GREEDY).replace(structured_outputs={"json": schema}, seed=index)
              for index, schema in enumerate(schemas)]  # fmt: skip
    outputs = llm.generate([WORDS[index % len(WORDS)] for index in range(count)], params)
    stopped = [(schema, output) for schema, output in zip(schemas, outputs, strict=True)
               if output.finish_reason == "stop"]  # fmt: skip
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    assert len(stopped) >= count / 2, f"{len(stopped)} of {count} answers have an end"
    for schema, output in stopped:
        fits(schema, output.text)


def test_every_answer_that_ends_fits_its_schema(llm: LLM) -> None:
    check_random_schemas(llm, max(examples(30), 12), seed=1)  # enough for half of them to end


@pytest.mark.full("a thousand schemas take minutes; ten of them stay")
def test_every_answer_of_a_thousand_schemas_fits(llm: LLM) -> None:
    check_random_schemas(llm, 1000, seed=2)


# -- the oracle --------------------------------------------------------------------------------------------------------


class OwnMask:
    """llguidance's own use of a grammar as a logits processor of transformers, for one sequence."""

    def __init__(self, path: Path, grammar: str, num_prompt_tokens: int):
        import llguidance.hf
        from llguidance import LLMatcher
        from transformers import AutoTokenizer

        model = reference.load_model(path)
        self._num_prompt_tokens = num_prompt_tokens
        self._vocab_size = model.config.vocab_size
        tokens = llguidance.hf.from_tokenizer(AutoTokenizer.from_pretrained(path), n_vocab=self._vocab_size)
        self._matcher = LLMatcher(tokens, grammar)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        from llguidance import numpy as masks

        if input_ids.shape[1] > self._num_prompt_tokens:
            assert self._matcher.consume_token(int(input_ids[0, -1])), self._matcher.get_error()
        bits = masks.allocate_token_bitmask(1, self._vocab_size)
        masks.fill_next_token_bitmask(self._matcher, bits)
        logits = scores.numpy().copy()
        masks.apply_token_bitmask_inplace_kernel(logits, bits)
        return torch.from_numpy(logits)


def theirs(path: Path, prompt: list[int], grammar: str) -> list[int]:
    """Greedy tokens of transformers, up to the end token and with it."""
    ids = reference.load_model(path).generate(
        **reference.model_inputs(path, prompt), max_new_tokens=GREEDY.max_tokens, do_sample=False, pad_token_id=0,
        logits_processor=[OwnMask(path, grammar, len(prompt))])  # fmt: skip
    return [int(token) for token in ids[0, len(prompt):]]


def own_grammar(rule: StructuredOutputsParams) -> str:
    """The user's words as llguidance's own syntax has them; nothing is forced, as tokens are the model's to choose."""
    head = '%llguidance {"no_forcing": true}\n'
    if rule.json is not None:
        options = {name: value for name, value in json_options(rule).items() if value is not None}
        return f"{head}start: %json {json.dumps({**rule.json, 'x-guidance': options})}"
    return f"{head}start: /{rule.regex}/"


def test_greedy_equals_transformers_with_llguidances_own_mask(llm: LLM, path: Path) -> None:
    rng = random.Random(5)
    rules = [StructuredOutputsParams(json=random_schema(rng)) for _ in range(1 if is_fast else 10)]
    rules += [StructuredOutputsParams(regex="(ab|cd){2,9}[0-9]"), StructuredOutputsParams(
        json=SHAPE, disable_any_whitespace=True)]  # fmt: skip
    prompts = [WORDS[index % len(WORDS)] for index in range(len(rules))]
    outputs = llm.generate(prompts, [GREEDY.replace(structured_outputs=rule) for rule in rules])
    for prompt, rule, output in zip(prompts, rules, outputs, strict=True):
        ids = llm.engine.processor.from_text(prompt).token_ids
        assert output.token_ids == theirs(path, ids, own_grammar(rule)), rule
    assert {output.finish_reason for output in outputs} >= {"stop"}


# -- neighbours, and everything that a sequence may go through ---------------------------------------------------------


def test_rows_without_a_rule_keep_their_tokens_beside_rows_with_one(llm: LLM) -> None:
    alone = llm.generate(["b c"] * len(FREE), FREE)
    mixed = [params for pair in zip(FREE, RULED, strict=True) for params in pair]
    same(llm.generate(["b c"] * len(mixed), mixed)[::2], alone)


def test_a_rule_is_kept_whatever_happens_to_its_sequence(path: Path, llm: LLM) -> None:
    """Small steps, few blocks: prompts are cut, sequences preempted and computed again with what they have said."""
    prompts = [WORDS[index % len(WORDS)] + "a circle, " * 12 for index in range(len(RULED))]
    ruled = [params.replace(max_tokens=90) for params in RULED]
    expected = llm.generate(prompts, ruled)
    is_ahead = llm.engine.info.num_steps_under_way > 1
    small = {**SETTINGS, "max_num_seqs": 6, "max_model_len": 176, "max_num_batched_tokens": 32, "block_size": 16}
    with LLM(path, kv_cache_bytes=1 << 20, **small) as one_mib:
        per_block = (1 << 20) // one_mib.engine.info.num_blocks
    with LLM(path, async_scheduling=is_ahead, kv_cache_bytes=13 * per_block, **small) as few:
        again = [few.generate(prompts, ruled), few.generate(prompts, ruled)]
        for outputs in again:  # log probabilities are rounded otherwise where chunks are cut otherwise
            assert [[c.token_ids for c in output.completions] for output in outputs] == \
                   [[c.token_ids for c in output.completions] for output in expected]  # fmt: skip
        assert few.stats().num_preemptions > 0
        assert few.stats().prefix_cache_hits > 0
    lines = [output.text for output in expected]
    assert lines[3] in ("circle", "square, or not", "größe")
    assert expected[5].finish_reason == "stop"
    assert "e" not in lines[5]
    assert len(lines[5]) == 30


@pytest.mark.full("steps are made again without grammars, too (tests/runner/test_culprits.py); preempted rules stay")
def test_steps_that_fail_are_made_again_with_grammars_where_they_were(llm: LLM) -> None:
    """The culprit is looked for in halves: everybody begins anew several times, in the middle of his answer."""
    prompts = [WORDS[index % len(WORDS)] for index in range(len(RULED))]
    expected = llm.generate(prompts, RULED)
    num_steps, failures = 0, []

    def fault(ids: torch.Tensor) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps in (9, 14, 40):
            failures.append(len(ids))
            raise ValueError("for once")

    with failing(llm, fault):
        again = llm.generate(prompts, RULED)
    assert len(failures) == 3
    assert [[(c.token_ids, c.finish_reason) for c in output.completions] for output in again] == \
           [[(c.token_ids, c.finish_reason) for c in output.completions] for output in expected]  # fmt: skip


def test_an_abort_leaves_the_slot_to_others(llm: LLM) -> None:
    engine, rule = llm.engine, GREEDY.replace(structured_outputs={"regex": "[a-z]{90}"})
    free = GREEDY.replace(max_tokens=12, ignore_eos=True)
    (expected,) = llm.generate(["a"], free)
    prompt = engine.processor.from_text("a")
    engine.add_request("ruled", prompt, engine.processor.resolve_params(rule))
    for _ in range(6):
        assert engine.step() == []
    engine.abort_request("ruled")
    engine.add_request("free", prompt, free)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs["ruled"].finish_reason == "abort"
    assert outputs["free"].token_ids == expected.token_ids


@pytest.mark.full("two ranks start; two ranks without grammars stay, and only the first of them knows of grammars")
@pytest.mark.ranks
def test_two_ranks_follow_the_grammars_of_the_first(path: Path, llm: LLM, platform_name: str) -> None:
    need_devices(platform_name)
    if llm.engine.info.num_steps_under_way == 1:
        pytest.skip("ranks are started once, with two steps under way")
    prompts = [WORDS[index % len(WORDS)] for index in range(len(RULED))]
    settings = {**SETTINGS, "platform": platform_name}
    with LLM(path, async_scheduling=True, tensor_parallel_size=2, kv_cache_bytes=32 << 20, **settings) as ranks:
        ruled = ranks.generate(prompts, [params.replace(temperature=0.0, logprobs=None) for params in RULED])
    same(ruled, llm.generate(prompts, [params.replace(temperature=0.0, logprobs=None) for params in RULED]))


# -- what cannot be served ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [
    {"structured_outputs": {"choice": ["yes"]}, "min_tokens": 20},
    {"structured_outputs": {"regex": "aaa"}, "bad_words": ("a",)},
])  # fmt: skip
def test_what_leaves_a_grammar_nothing_is_an_error_of_that_row_by_name(llm: LLM, asked: dict[str, Any]) -> None:
    free = GREEDY.replace(max_tokens=12, ignore_eos=True)
    (alone,) = llm.generate(["b c"], free)
    ruled, beside = llm.generate(["a", "b c"], [GREEDY.replace(**asked), free])
    completion = ruled.completions[0]
    assert (completion.finish_reason, completion.error_code) == ("error", "no_token_left")
    assert completion.error is not None
    assert "min_tokens, bad_words, no_repeat_ngram_size or allowed_token_ids" in completion.error
    assert beside.token_ids == alone.token_ids


def test_a_grammar_that_has_no_way_to_go_on_says_so(llm: LLM) -> None:
    (output,) = llm.generate(["a"], GREEDY.replace(structured_outputs={"grammar": 'start: A\nA: /a+/ & /b+/\n'}),
                             return_errors=True)  # fmt: skip
    assert output.finish_reason == "error"


@pytest.mark.parametrize(("schema", "place", "what"), [
    ({"properties": {"a": {"items": {"not": {"type": "string"}}}}}, "#/properties/a/items", "not"),
    ({"anyOf": [{"type": "string"}, {"type": "strin"}]}, "#/anyOf/1", "strin"),
    ({"$defs": {"x/y": {"uniqueItems": True}}, "properties": {"q": {"$ref": "#/$defs/x~1y"}}}, "#/$defs/x~1y",
     "uniqueItems"),
    ({"type": "object", "properties": {"p": {"type": "string", "pattern": "(?=a)b"}}}, "#/properties/p", "look-around"),
    ({"type": "object", "properties": {"p": {"$ref": "https://example.com/s"}}}, "#/properties/p", "example.com"),
    ({"type": "object", "properties": {"p": {"minimum": 5, "maximum": 3, "type": "integer"}}, "required": ["p"]},
     "#/properties/p", "unsatisfiable"),
])  # fmt: skip
def test_a_schema_that_cannot_be_served_is_refused_with_the_place(schema: Any, place: str, what: str) -> None:
    with pytest.raises(RequestError) as refusal:
        with_grammar(StructuredOutputsParams(json=schema))
    assert f"at {place}:" in refusal.value.message
    assert what in refusal.value.message
    assert (refusal.value.code, refusal.value.param) == ("invalid_structured_outputs", "structured_outputs")


@pytest.mark.parametrize(("asked", "what"), [
    ({}, "one of json, regex, choice, grammar, json_object is needed, not none of them"),
    ({"json": {}, "regex": "a"}, "not json and regex"),
    ({"regex": "(a"}, "unclosed group"),
    ({"grammar": "start: nothing_of_that_name"}, "nothing_of_that_name"),
    ({"grammar": "hello"}, "grammar: "),
    ({"choice": []}, "is not a list of texts"),
    ({"choice": ["a", 1]}, "1 is not a non-empty string"),
    ({"choice": ["a"] * 5000}, "5000 entries, at most 4096 are allowed"),
    ({"json": "{"}, "not JSON"),
    ({"json": [1]}, "is no JSON schema"),
    ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance: unknown keyword"),
    ({"json": {"enum": ["x" * 300_000]}}, "characters of JSON, at most 262144 are allowed"),
    ({"regex": "a" * 20_000}, "20000 characters, at most 16384 are allowed"),
    ({"structural_tag": "x"}, "structural_tag: unknown field"),
])  # fmt: skip
def test_what_is_no_rule_is_refused_before_anything_runs(asked: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError) as refusal:
        with_grammar(StructuredOutputsParams.from_value(asked))
    assert what in refusal.value.message


def test_end_tokens_that_end_nothing_go_with_no_rule() -> None:
    with pytest.raises(RequestError, match="ignore_eos: with structured_outputs nothing comes behind"):
        GREEDY.replace(structured_outputs={"json_object": True}, ignore_eos=True)


def test_masks_leave_out_what_the_model_has_and_the_tokenizer_has_not(checkpoint: Callable[..., Path]) -> None:
    """A vocabulary that is no multiple of 32, with ids behind the tokenizer's last."""
    with LLM(checkpoint("qwen3", vocab_size=333), kv_cache_bytes=16 << 20, **SETTINGS) as llm:
        outputs = llm.generate(WORDS, DRAWN.replace(structured_outputs={"regex": "(.|\\n){20}"}))
    assert all(max(output.token_ids) < 320 for output in outputs)
    assert np.all([output.finish_reason == "stop" for output in outputs])


@pytest.mark.parametrize("is_told", [False, True])
def test_the_table_of_tokens_is_made_once_and_while_the_weights_load_if_somebody_says_so(
    path: Path, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    made: list[object] = []
    load, make = ModelRunner.load_model, Matchers._make_tokens

    def load_model(runner: ModelRunner) -> None:
        begun.append(runner._matchers._tokens is not None)
        load(runner)

    monkeypatch.setattr(ModelRunner, "load_model", load_model)
    monkeypatch.setattr(Matchers, "_make_tokens", lambda matchers: made.append(matchers) or make(matchers))
    with LLM(path, kv_cache_bytes=16 << 20, prepare_structured_outputs=is_told, **SETTINGS) as llm:
        assert begun == [is_told]
        outputs = llm.generate(WORDS, GREEDY.replace(structured_outputs={"choice": ["circle"]}))
    assert len(made) == 1
    assert {output.text for output in outputs} == {"circle"}
