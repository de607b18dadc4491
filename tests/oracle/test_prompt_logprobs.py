"""Log probabilities of prompts are transformers' log_softmax in float32, however prompts are cut or preempted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types import Completion

import npu_runner.runner.token_results as prompt_scores
from npu_runner import LLM, SamplingParams
from npu_runner.errors import RequestError
from npu_runner.request.outputs import PromptLogprobs, RequestOutput
from tests.oracle import reference
from tests.oracle.running import SMALL, need_devices, random_prompts, runner_of

Make = Callable[..., Path]
LENGTHS = (5, 1, 90, 33, 64, 2, 140)
TOLERANCE = 1e-4
SCORED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=4, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, seed=3)


@pytest.fixture(scope="module")
def path(checkpoint: Make) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def llm(path: Path, platform_name: str) -> Iterator[LLM]:
    """Prompts are cut into chunks of 48 tokens."""
    with LLM(path, platform=platform_name, max_num_batched_tokens=48, **SMALL) as llm:
        yield llm


@torch.inference_mode()
def expected(path: Path, token_ids: list[int]) -> torch.Tensor:
    """(T - 1, V): of what follows each token but the last."""
    logits = reference.load_model(path)(**reference.model_inputs(path, token_ids)).logits[0, :-1]
    return logits.float().log_softmax(-1)


def assert_right(path: Path, token_ids: list[int], found: PromptLogprobs | None, num_top: int) -> None:
    assert found is not None
    assert len(found) == len(token_ids)
    assert found[0] is None
    for place, log_probs in enumerate(expected(path, token_ids), start=1):
        position = found[place]
        assert position is not None
        assert position.token.token_id == token_ids[place]
        assert position.token.logprob == pytest.approx(log_probs[token_ids[place]].item(), abs=TOLERANCE)
        own = log_probs[token_ids[place]]
        assert int((log_probs > own + TOLERANCE).sum()) + 1 <= position.rank <= int((log_probs > own - TOLERANCE).sum())
        best = log_probs.topk(num_top).values.tolist() if num_top else []
        assert [token.logprob for token in position.top] == pytest.approx(best, abs=TOLERANCE)
        for token in position.top:
            assert token.logprob == pytest.approx(log_probs[token.token_id].item(), abs=TOLERANCE)


@pytest.mark.parametrize("num_top", [0, 4, 20])
def test_prompts_cut_and_mixed(llm: LLM, path: Path, prompts: list[list[int]], num_top: int) -> None:
    """Beside prompts that ask for none, whose answers stay as they are."""
    plain = SCORED.replace(prompt_logprobs=None)
    asked = [SCORED.replace(prompt_logprobs=num_top), plain] * len(prompts)
    doubled = [prompt for prompt in prompts for _ in range(2)]
    results = llm.generate(doubled, asked[: len(doubled)])
    for prompt, scored, beside in zip(prompts, results[::2], results[1::2], strict=True):
        assert_right(path, prompt, scored.prompt_logprobs, num_top)
        assert beside.prompt_logprobs is None
        assert beside.token_ids == scored.token_ids


def test_such_prompts_take_nothing_from_the_prefix_cache_and_leave_what_others_take(
        llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    longest = max(prompts, key=len)
    for _ in range(2):
        (scored,) = llm.generate([longest], SCORED)
        assert scored.num_cached_tokens == 0
        assert_right(path, longest, scored.prompt_logprobs, 4)
    (plain,) = llm.generate([longest], SCORED.replace(prompt_logprobs=None))
    assert plain.num_cached_tokens > 0
    assert plain.token_ids == scored.token_ids


def test_several_completions_share_them(llm: LLM, path: Path, prompts: list[list[int]]) -> None:
    (result,) = llm.generate([prompts[2]], SCORED.replace(n=3, temperature=1.0, seed=1))
    assert len(result.completions) == 3
    assert_right(path, prompts[2], result.prompt_logprobs, 4)


def test_preempted_prompts_are_scored_once_more_and_alike(
        path: Path, prompts: list[list[int]], platform_name: str) -> None:
    """A cache of 12 blocks of 16 tokens for prompts of 90 and answers of 40: somebody has to give way."""
    settings: dict[str, Any] = {**SMALL, "max_model_len": 176, "block_size": 16, "max_num_batched_tokens": 32}
    per_block = 3 * 2 * 16 * 2 * 16 * 4
    asked = SCORED.replace(max_tokens=40)
    with LLM(path, platform=platform_name, kv_cache_bytes=13 * per_block, **settings) as llm:
        wanted = [prompts[2], prompts[3], prompts[4], prompts[2][:50]]
        results = llm.generate(wanted, asked)
        assert llm.stats().num_preemptions > 0
    for prompt, result in zip(wanted, results, strict=True):
        assert_right(path, prompt, result.prompt_logprobs, 4)


@pytest.mark.parametrize("settings", [
    pytest.param({"async_scheduling": True}, id="ahead"),
    pytest.param({"tensor_parallel_size": 2}, id="ranks", marks=pytest.mark.ranks)])
def test_steps_ahead_and_two_ranks(path: Path, prompts: list[list[int]], platform_name: str,
                                   settings: dict[str, Any]) -> None:
    if "tensor_parallel_size" in settings:
        need_devices(platform_name)
    with LLM(path, platform=platform_name, max_num_batched_tokens=48, **settings, **SMALL) as llm:
        for prompt, result in zip(prompts, llm.generate(prompts, SCORED), strict=True):
            assert_right(path, prompt, result.prompt_logprobs, 4)


def test_a_model_with_states_and_one_with_images(checkpoint: Make, platform_name: str) -> None:
    for model_type in ("qwen3_5_text", "qwen3_vl"):
        path = checkpoint(model_type)
        with LLM(path, platform=platform_name, max_num_batched_tokens=64, **SMALL) as llm:
            prompt = [*range(100)]
            for _ in ("cold", "warm"):
                (result,) = llm.generate([prompt], SCORED)
                assert_right(path, prompt, result.prompt_logprobs, 4)


def test_no_more_rows_of_logits_are_made_at_once_than_a_decode_step_has(
        llm: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    model: Any = runner_of(llm).model
    compute = type(model).compute_logits

    def counted(self: Any, hidden_BD: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_BD))
        logits: torch.Tensor = compute(self, hidden_BD)
        return logits

    monkeypatch.setattr(type(model), "compute_logits", counted)
    llm.generate(prompts, SCORED)
    assert max(sizes) <= SMALL["max_num_seqs"] <= prompt_scores.MAX_ROWS
    assert sum(sizes) > sum(LENGTHS) - len(LENGTHS)


def test_more_than_an_answer_may_hold_is_refused(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    with LLM(path, platform=platform_name, max_logprobs_per_request=100, **SMALL) as llm:
        with pytest.raises(RequestError, match=r"33 prompt tokens x .4 most probable . 1. is 165 log probabilities"):
            llm.generate([prompts[3]], SCORED)
        assert llm.generate([prompts[3]], SCORED.replace(prompt_logprobs=2))[0].prompt_logprobs is not None


def rows_of(llm: LLM, path: Path, tmp_path: Path) -> dict[str, Any]:
    """Answers of a job with the fields of both endpoints."""
    from npu_runner.cli import main as cli
    from tests.batch.scripted import completion_row, read_rows, row, write_rows

    text = "what colour is the picture?"
    write_rows(tmp_path / "rows.jsonl", [
        completion_row("echo", text, echo=True, logprobs=2, max_tokens=3),
        completion_row("own", text, prompt_logprobs=1, max_tokens=1),
        row("chat", text, prompt_logprobs=1, max_tokens=1),
        row("none", text, max_tokens=1),
        completion_row("both", text, echo=True, logprobs=2, prompt_logprobs=1),
    ])  # fmt: skip
    options = ["--model", str(path), "--platform", "cpu", "--max-model-len", "512", "--progress", "off"]
    cli.main(["batch", "-i", str(tmp_path / "rows.jsonl"), "-o", str(tmp_path / "out.jsonl"), *options])
    return {item["custom_id"]: item for item in read_rows(tmp_path / "out.jsonl")}


def test_rows_write_them_as_openai_and_vllm_do(llm: LLM, path: Path, tmp_path: Path, platform_name: str) -> None:
    text = "what colour is the picture?"
    answers = rows_of(llm, path, tmp_path)
    (result,) = llm.generate([text], SCORED.replace(prompt_logprobs=2, logprobs=2))
    assert result.prompt_logprobs is not None
    body = answers["echo"]["response"]["body"]
    (choice,) = body["choices"]
    lists = choice["logprobs"]
    assert "".join(lists["tokens"]) == choice["text"] == text + result.text
    assert lists["text_offset"] == [len("".join(lists["tokens"][:place])) for place in range(len(lists["tokens"]))]
    _check_lists(lists, result)
    # All but the first token, which OpenAI's API has given null and its types do not know.
    for name in lists:
        del lists[name][0]
    Completion.model_validate_json(json.dumps(body))
    for member in (answers["own"]["response"]["body"]["choices"][0], answers["chat"]["response"]["body"]):
        first, *others = member["prompt_logprobs"]
        assert first is None
        assert all(1 <= len(position) <= 2 for position in others)
    for position, ours in zip(answers["own"]["response"]["body"]["choices"][0]["prompt_logprobs"][1:],
                              list(result.prompt_logprobs)[1:], strict=True):
        assert ours is not None
        own = position[str(ours.token.token_id)]
        assert own["rank"] == ours.rank
        assert own["decoded_token"] == ours.token.token
        assert own["logprob"] == pytest.approx(ours.token.logprob, abs=TOLERANCE)
    assert "prompt_logprobs" not in answers["none"]["response"]["body"]
    assert answers["both"]["error"]["param"] == "prompt_logprobs"


def _check_lists(lists: dict[str, list[Any]], result: RequestOutput) -> None:
    assert result.prompt_logprobs is not None
    assert result.logprobs is not None
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    prompt = [position.token.logprob for position in result.prompt_logprobs if position is not None]
    generated = [position.sampled.logprob for position in result.logprobs]
    assert lists["token_logprobs"][1:] == pytest.approx(prompt + generated, abs=TOLERANCE)
