"""Runs our side of an oracle comparison: greedy tokens and the logits behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.platforms import pick_platform
from npu_runner.platforms.graphs import DecodeForward, GraphCompiler
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.runner.model_runner import ModelRunner
from tests import full_set
from tests.oracle import reference

MAX_NEW_TOKENS = 12
FEW_TOKENS = 6 if full_set.is_fast else MAX_NEW_TOKENS
"""Of an answer that is compared with transformers; the fast set has the first half of it."""
LOGITS_TOLERANCE = 2e-5
"""Of the largest logit. transformers' own float32 is up to 1.3e-5 of it away from its float64 (qwen3_5_moe, CPU)."""
SMALL = {"max_num_seqs": 8, "max_model_len": 1024, "dtype": "float32"}


class UncompiledGraphs(GraphCompiler):
    """Padding and buckets without a compiler: what is under test is what surrounds the graph."""

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        return forward


def need_devices(platform_name: str, num_ranks: int = 2) -> None:
    """Skips the test where the ranks have no device each."""
    count = pick_platform(platform_name).devices.count()
    if count < num_ranks:
        pytest.skip(f"{num_ranks} ranks need a device each, {platform_name} has {count} here")


def greedy(count: int = MAX_NEW_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Token ids, a prompt for each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 290, length).tolist() for length in lengths]


def runner_of(llm: LLM) -> ModelRunner:
    """The rank that lives in this process."""
    return llm.engine._executor._runner  # type: ignore[attr-defined,return-value]


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """The logits (B, V) that every step inside samples from, in order, whether a graph made them or not."""
    steps: list[torch.Tensor] = []
    runner: Any = runner_of(llm).steps
    sample = runner.sample

    def record(step: Any, logits_BV: torch.Tensor) -> Any:
        steps.append(logits_BV.float().cpu().clone())
        return sample(step, logits_BV)

    runner.sample = record
    try:
        yield steps
    finally:
        del runner.sample


def assert_equals_reference(path: Path, llm: LLM, prompts: Sequence[PromptInputs],
                            images: Sequence[Sequence[Any]] | None = None, *, num_tokens: int = FEW_TOKENS,
                            tolerance: float = LOGITS_TOLERANCE) -> None:
    """All prompts together give, each, the tokens that transformers gives it alone; and alone, the same logits."""
    images = images or [[] for _ in prompts]
    expected = [reference.generate(path, prompt.token_ids, images, max_new_tokens=num_tokens)
                for prompt, images in zip(prompts, images, strict=True)]
    together = llm.generate(prompts, greedy(num_tokens))
    for index, (output, (tokens, _)) in enumerate(zip(together, expected, strict=True)):
        assert output.token_ids == tokens, f"prompt {index} of {len(prompts)}"
        assert output.finish_reason == "length"
    assert_logits_equal(llm, prompts[-1], *expected[-1], tolerance=tolerance)


def assert_logits_equal(llm: LLM, prompt: PromptInputs, tokens: list[int], logits: torch.Tensor, *,
                        tolerance: float = LOGITS_TOLERANCE) -> None:
    with recorded_logits(llm) as steps:
        (alone,) = llm.generate([prompt], greedy(len(tokens)))
    assert alone.token_ids == tokens
    ours = torch.cat([step for step in steps if len(step)])
    assert ours.shape == logits.shape
    worst = (ours - logits).abs().max().item()
    assert worst < tolerance * logits.abs().max().item(), f"logits differ by {worst:.2e}"


@torch.inference_mode()
def assert_prompt_rows_equal(path: Path, llm: LLM, token_ids: list[int], *,
                             tolerance: float = LOGITS_TOLERANCE) -> None:
    """Logits of all tokens of a prompt that is not cached are those of transformers. Greedy tokens show the last row
    only, which a wrong mask may leave as it is."""
    model: Any = runner_of(llm).model
    chunks: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda _, args, hidden_TD: chunks.append(hidden_TD.clone()))
    llm.generate([token_ids], greedy(1))
    hook.remove()
    ours = model.compute_logits(torch.cat(chunks)[: len(token_ids)]).float().cpu()
    logits = reference.load_model(path)(torch.tensor([token_ids])).logits[0].float()
    assert ours.shape == logits.shape, "the prompt must not be cached"
    worst = (ours - logits).abs().max().item()
    assert worst < tolerance * logits.abs().max().item(), f"logits differ by {worst:.2e}"
