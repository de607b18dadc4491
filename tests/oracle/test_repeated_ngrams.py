"""No n-gram comes twice in an answer. The oracle is transformers' NoRepeatNGramLogitsProcessor over output tokens
alone, which `generate` gives it where the prompt comes as embeddings. With a window it is the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.request.outputs import RequestOutput
from tests.full_set import is_fast, only_full
from tests.oracle import reference
from tests.oracle.banned_ngrams import Ban
from tests.oracle.running import SMALL
from tests.oracle.scheduled_prompts import NUM_BLOCKS

TEXTS = ["b which of the pictures ", "c which of the pictures which of the pictures "][:1 if is_fast else 2]
NUM_TOKENS = 28
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Drawn, and as likely to repeat itself as a greedy answer.
DRAWN = GREEDY.replace(temperature=0.05, seed=5, n=4)
ONE_STEP: dict[str, Any] = {"async_scheduling": False, "max_num_seqs": 5, "max_model_len": 72}
RULES: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 4},
    {"no_repeat_ngram_size": 2, "no_repeat_ngram_window": 7},
]


@torch.inference_mode()
def expected(path: Path, prompt: list[int], **rule: Any) -> list[int]:
    """Greedy tokens under a rule of SamplingParams' fields."""
    model = reference.load_model(path)
    exempt_ids, window = rule.get("no_repeat_ngram_exempt_ids", ()), rule.get("no_repeat_ngram_window")
    with_window = exempt_ids or window
    ban: dict[str, Any] = {"no_repeat_ngram_size": rule.get("no_repeat_ngram_size", 0)}
    if with_window:
        ban = {"logits_processor": [Ban(rule["no_repeat_ngram_size"], window or NUM_TOKENS, exempt_ids)]}
    embedded = model.get_input_embeddings()(torch.tensor([prompt]))
    tokens = model.generate(inputs_embeds=embedded, attention_mask=torch.ones(1, len(prompt)), do_sample=False,
                            max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, eos_token_id=None, pad_token_id=0,
                            **ban)
    return [int(token) for token in tokens[0]]


@pytest.fixture(scope="module")
def path(checkpoint: Any) -> Path:
    return checkpoint("qwen3")  # type: ignore[no-any-return]


def answers(path: Path, platform_name: str, ask: Any, **settings: Any) -> tuple[list[RequestOutput], int]:
    with LLM(path, platform=platform_name, **{**SMALL, **settings}) as llm:
        prompts = [llm.engine.processor.from_text(text) for text in TEXTS]
        outputs = ask(llm, prompts)
        return outputs, llm.stats().num_preemptions


def all_rules(llm: LLM, prompts: list[Any]) -> list[RequestOutput]:
    """Every prompt by every rule, and by none, greedy and drawn, in one batch as far as it goes."""
    params = [base.replace(**rule) for base in (GREEDY, DRAWN) for rule in (*RULES, {})]
    return llm.generate([prompt for prompt in prompts for _ in params], params * len(prompts))


def test_greedy_tokens_are_those_of_transformers(path: Path, platform_name: str) -> None:
    with LLM(path, platform=platform_name, **SMALL) as llm:
        prompts = [llm.engine.processor.from_text(text) for text in TEXTS]
        pairs = [(prompt, rule) for prompt in prompts for rule in (*RULES, {})]
        outputs = llm.generate([prompt for prompt, _ in pairs], [GREEDY.replace(**rule) for _, rule in pairs])
        wanted = [expected(path, prompt.token_ids, **rule) for prompt, rule in pairs]
        assert [output.token_ids for output in outputs] == wanted
        free = wanted[len(RULES) :: len(RULES) + 1]
        for number, rule in enumerate(RULES):
            assert wanted[number :: len(RULES) + 1] != free, f"{rule} must be broken without it"

        exempt = {**RULES[0], "no_repeat_ngram_exempt_ids": sorted({token for tokens in free for token in tokens})[::2]}
        with_exempt = llm.generate(prompts, GREEDY.replace(**exempt))
        assert [output.token_ids for output in with_exempt] == [
            expected(path, prompt.token_ids, **exempt) for prompt in prompts]
        assert [output.token_ids for output in with_exempt] != wanted[:: len(RULES) + 1]


@pytest.fixture(scope="module")
def undisturbed(path: Path, platform_name: str) -> list[RequestOutput]:
    return answers(path, platform_name, all_rules, **ONE_STEP)[0]


@pytest.mark.parametrize("change", [
    "few blocks", *only_full("steps under way without preemption; both together stay", "two steps")])
def test_what_is_done_beside_a_step_changes_no_token(change: str, path: Path, platform_name: str,
                                                     undisturbed: list[RequestOutput]) -> None:
    """Steps under way; then preemption as well. Slots change hands, and answers of one prompt run side by side."""
    settings = {**ONE_STEP, "async_scheduling": True}
    if change == "few blocks":
        settings |= {"block_size": 4, "kv_cache_bytes": NUM_BLOCKS["qwen3"] * 2 * 3 * 4 * 2 * 16 * 4,
                     "enable_prefix_caching": False}  # fmt: skip
    found, num_preemptions = answers(path, platform_name, all_rules, **settings)
    assert num_preemptions > 0 or change == "two steps" or platform_name != "cpu"
    for one, two in zip(undisturbed, found, strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in two.outputs]


def test_no_drawn_answer_has_an_ngram_twice(undisturbed: list[RequestOutput]) -> None:
    rules = [*RULES, {}] * 2 * len(TEXTS)
    num_broken = 0
    for rule, output in zip(rules, undisturbed, strict=True):
        size, window = rule.get("no_repeat_ngram_size", 2), rule.get("no_repeat_ngram_window", NUM_TOKENS)
        for completion in output.outputs:
            tokens = completion.token_ids
            broken = [at for at, token in enumerate(tokens) if token in Ban(size, window, ()).banned(tokens[:at])]
            assert not (broken and rule)
            num_broken += len(broken)
    assert num_broken > 0, "without a rule they do repeat themselves"
