"""transformers' side of bench_device: each function is one measurement, in a process of its own.

The same shapes with random weights, built on the device; the same prompts and lengths. On a GPU with the settings that
its authors recommend for speed: compiled, and flash attention where that is installed, which it picks by itself.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_device_shapes import make_text_model
from bench_device_work import Sizes, decode_prompts, text_requests

_PATIENCE_SECONDS = 150.0
_REPORT_SECONDS = 10.0
_PADDED_BATCH = 64


class PeerStoppedError(Exception):
    """The peer did not do its work; the message says how far it came."""


def measure_text(sizes: Sizes, settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    """(a) through continuous batching as `generate_batch` runs it, but each request with its own length."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    model = _model(sizes.text_model, settings)
    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        return _measure_padded_text(model, sizes)  # continuous batching refuses it
    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=0, max_new_tokens=sizes.most_tokens,
                              eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(default_compile_level=int(settings["platform"] == "cuda"))
    hints = WorkloadHints(sizes.most_tokens, sizes.most_tokens, sizes.num_texts)  # what generate_batch gives
    rates = []
    with model.continuous_batching_context_manager(generation_config=config, continuous_batching_config=batching,
                                                   workload_hints=hints) as manager:
        _run_batch(manager, [([1] * sizes.least_tokens, 4)])  # warm-up
        for repeat in range(repeats):
            requests = text_requests(sizes, model.config.vocab_size, repeat)
            started = time.perf_counter()
            count = _run_batch(manager, requests)
            rates.append(count / (time.perf_counter() - started))
            assert count == sum(wanted for _, wanted in requests), f"{count} tokens came"
        attention = model.config._attn_implementation
    return {"output_tokens_per_second": rates, "attention": attention}


def _measure_padded_text(model: Any, sizes: Sizes) -> dict[str, Any]:
    """(e), (f): one batch of the first requests, padded on the left, until the longest has its tokens; once."""
    requests = text_requests(sizes, model.config.vocab_size)[:_PADDED_BATCH]
    longest = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests], device=model.device)
    is_token = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests],
                            device=model.device)
    counts = [count for _, count in requests]
    for num_tokens in (4, max(counts)):  # the first one warms up
        seconds = _generate(model, ids, num_tokens, is_token=is_token, cache_implementation=None)
    return {"output_tokens_per_second": [sum(counts) / seconds],
            "attention": f"one padded batch of {len(requests)} through generate, which has no continuous batching here"}


def measure_decode(sizes: Sizes, settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    """(b) through `generate` over a static cache, compiled: what `decode_steps` more tokens cost, a step."""
    model = _model(sizes.decode_model, settings)
    batches = {}
    for batch_size in sizes.decode_batches:
        prompts = decode_prompts(batch_size, sizes.context - sizes.decode_steps // 2, model.config.vocab_size)
        inputs = torch.tensor(prompts, device=model.device)
        counts = (2 + sizes.decode_steps, 2)  # the larger first: the cache keeps its size
        for count in (*counts, *counts):  # warm-up: compilation, then its graph
            _generate(model, inputs, count)
        milliseconds = []
        for _ in range(repeats):
            many, few = (_generate(model, inputs, count) for count in counts)
            milliseconds.append(1e3 * (many - few) / sizes.decode_steps)
        batches[str(batch_size)] = {"milliseconds": milliseconds}
    return {"batches": batches}


def _model(name: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = getattr(torch, settings["dtype"])
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(make_text_model(Path(folder), name))
    torch.manual_seed(0)
    with torch.device(settings["platform"]):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _generate(model: Any, inputs: torch.Tensor, num_tokens: int, is_token: torch.Tensor | None = None,
              cache_implementation: str | None = "static") -> float:
    """Seconds."""
    mask = torch.ones_like(inputs) if is_token is None else is_token
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(input_ids=inputs, attention_mask=mask, do_sample=False,
                                max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0,
                                cache_implementation=cache_implementation)
    output.cpu()
    return time.perf_counter() - started


def _run_batch(manager: Any, requests: list[tuple[list[int], int]]) -> int:
    """Number of tokens that came back."""
    for prompt, count in requests:
        manager.add_request(prompt, max_new_tokens=count)
    num_tokens = num_finished = 0
    started = reported = time.monotonic()
    while num_finished < len(requests):
        now = time.monotonic()
        progress = f"{num_finished} of {len(requests)} requests, {num_tokens} tokens of these, in {now - started:.0f} s"
        if now - reported > _REPORT_SECONDS:
            print(f"transformers: {progress}", file=sys.stderr, flush=True)
            reported = now
        if now - started > _PATIENCE_SECONDS or not manager.is_running():
            raise PeerStoppedError(f"stopped: {progress}")
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise PeerStoppedError(str(result.error))
            num_finished += 1
            num_tokens += len(result.generated_tokens)
    return num_tokens
