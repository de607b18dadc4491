"""SmolLM2-135M writes real sentences: its answers to 25 chats are those of transformers, however they are served.

Its checkpoint is made below .cache on first use. Where pip cannot have its packages the tests are skipped by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.cli import main as cli
from npu_runner.request.outputs import RequestOutput
from scripts.quantised.writing import quantise
from scripts.smollm2_checkpoint import PackagesError, make_checkpoint
from tests.oracle import reference
from tests.oracle.real_chats import ANIMAL, ANIMALS, CHATS
from tests.oracle.running import need_devices

pytestmark = [pytest.mark.full("135 million weights, a download of 93 MB; tiny checkpoints stay"), pytest.mark.slow]

NUM_TOKENS = 32
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 25, "kv_cache_bytes": 256 << 20}
BLOCK_BYTES = 2 * 30 * 16 * 3 * 64 * 4
"""Keys and values of one block: layers, block_size, kv heads, head dim, bytes of float32."""
FORMATS = {"w8a16": (64, 0.01), "fp8-dynamic": (64, 0.03), "w4a16": (32, 0.6)}
"""For each format: the group size, and the most that the answers' mean log probability may fall."""


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return make_checkpoint()
    except PackagesError as error:
        pytest.skip(str(error))


@lru_cache(maxsize=1)
def tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def prompt_of(path: Path, messages: list[dict[str, Any]]) -> list[int]:
    return list(tokenizer(path).apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@torch.inference_mode()
def logits_behind(path: Path, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """(A + 1, V) float32: transformers' logits before each token of the answer, and behind its last one."""
    ids = torch.tensor([[*prompt, *answer]])
    return reference.load_model(path)(input_ids=ids).logits[0, len(prompt) - 1:]


def answers(path: Path, platform_name: str, **settings: Any) -> tuple[list[RequestOutput], Any]:
    with LLM(path, platform=platform_name, **(SETTINGS | settings)) as llm:
        return llm.chat(CHATS, GREEDY), llm.stats()


@pytest.fixture(scope="module")
def whole(path: Path, platform_name: str) -> list[RequestOutput]:
    return answers(path, platform_name)[0]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def test_every_token_is_the_one_that_transformers_takes(path: Path, whole: list[RequestOutput]) -> None:
    end = tokenizer(path).eos_token_id
    for messages, output in zip(CHATS, whole, strict=True):
        tokens = list(output.token_ids)
        best = logits_behind(path, prompt_of(path, messages), tokens).argmax(-1).tolist()
        assert best[: len(tokens)] == tokens, messages
        if output.finish_reason == "stop":
            assert end in (tokens[-1], best[-1])
        else:
            assert (output.finish_reason, len(tokens)) == ("length", NUM_TOKENS)
        assert output.text == tokenizer(path).decode(tokens, skip_special_tokens=True)
    assert "Paris" in whole[0].text
    assert {output.finish_reason for output in whole} == {"stop", "length"}


@pytest.mark.parametrize("settings", [
    pytest.param({"max_num_batched_tokens": 64, "max_num_seqs": 8}, id="in chunks"),
    pytest.param({"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}, id="drafts"),
    pytest.param({"tensor_parallel_size": 3}, id="three ranks"),
])
def test_the_way_of_serving_changes_no_token(settings: dict[str, Any], path: Path, whole: list[RequestOutput],
                                             platform_name: str) -> None:
    need_devices(platform_name, settings.get("tensor_parallel_size", 1))
    outputs, stats = answers(path, platform_name, **settings)
    assert tokens_of(outputs) == tokens_of(whole)
    assert ("speculative_config" in settings) == (stats.num_ngram_drafted > 0)


def test_preempted_chats_end_as_if_undisturbed(path: Path, whole: list[RequestOutput], platform_name: str) -> None:
    outputs, stats = answers(path, platform_name, block_size=16, kv_cache_bytes=50 * BLOCK_BYTES, max_model_len=768,
                             enable_prefix_caching=False)
    assert tokens_of(outputs) == tokens_of(whole)
    assert stats.num_preemptions > 0, "the test must force preemption"


def chat_row(name: str, messages: list[dict[str, Any]], **body: Any) -> str:
    body = {"model": "m", "messages": messages, "temperature": 0, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"


def test_a_job_answers_chats_alike_and_animals_by_their_schema(path: Path, whole: list[RequestOutput], tmp_path: Path,
                                                               platform_name: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "animal", "schema": ANIMAL}}
    asked = {name: [{"role": "user", "content": f"Describe a {name} as JSON with name, legs and can_fly."}]
             for name in ANIMALS}
    with open(tmp_path / "rows.jsonl", "w") as file:
        for number, messages in enumerate(CHATS):
            file.write(chat_row(str(number), messages, max_completion_tokens=NUM_TOKENS))
        for name, messages in asked.items():
            file.write(chat_row(name, messages, max_completion_tokens=80, response_format=schema, logprobs=True))
    status = cli.main(["batch", "-i", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "answers.jsonl"), "--model",
                       str(path), "--platform", platform_name, "--dtype", "float32", "--max-model-len", "1024",
                       "--kv-cache-bytes", "256M", "--progress", "off"])
    assert status == 0
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    choices = {row["custom_id"]: row["response"]["body"]["choices"][0] for row in rows}
    assert [choices[str(number)]["message"]["content"] for number in range(len(CHATS))] == [
        output.text for output in whole]
    for name, messages in asked.items():
        choice = choices[name]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), ANIMAL)
        assert_best_of_the_allowed(path, prompt_of(path, messages), choice["message"]["content"])


def assert_best_of_the_allowed(path: Path, prompt: list[int], text: str) -> None:
    """Before each token of the answer, whatever transformers prefers is shut out by the schema."""
    import llguidance.hf
    from llguidance import LLMatcher
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    library = llguidance.hf.from_tokenizer(tokenizer(path))
    matcher = LLMatcher(library, LLMatcher.grammar_from_json_schema(ANIMAL, overrides={"whitespace_flexible": True}))
    tokens = tokenizer(path).encode(text, add_special_tokens=False)
    mask = allocate_token_bitmask(1, library.vocab_size)
    for token, logits in zip(tokens, logits_behind(path, prompt, tokens).numpy(), strict=False):
        fill_next_token_bitmask(matcher, mask, 0)
        allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
        assert int(np.where(allowed, logits, -np.inf).argmax()) == token
        assert matcher.consume_token(token)
    assert matcher.is_accepting()


def mean_logprob(path: Path, platform_name: str, prompts: list[list[int]], answered: list[list[int]]) -> float:
    """Mean over all tokens of the answers, scored as the end of a prompt."""
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(path, platform=platform_name, **SETTINGS) as llm:
        outputs = llm.generate([[*prompt, *answer] for prompt, answer in zip(prompts, answered, strict=True)], scored)
    found = [position.token.logprob for output, prompt in zip(outputs, prompts, strict=True)
             for position in output.prompt_logprobs[len(prompt):]]
    return float(np.mean(found))


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_copy_finds_the_answers_nearly_as_likely(name: str, path: Path, whole: list[RequestOutput],
                                                             tmp_path: Path, platform_name: str) -> None:
    group_size, most = FORMATS[name]
    with torch.inference_mode():
        quantise(path, tmp_path / name, name, group_size=group_size)
    prompts, answered = [prompt_of(path, messages) for messages in CHATS], tokens_of(whole)
    plain = mean_logprob(path, platform_name, prompts, answered)
    loss = plain - mean_logprob(tmp_path / name, platform_name, prompts, answered)
    print(f"{name}: the mean log probability falls by {loss:.4f} from {plain:.4f}")
    assert loss < most
