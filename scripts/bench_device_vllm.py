"""vLLM's side of bench_device, with vllm-ascend on an NPU: each function is one measurement, in a process of its own.

With its own defaults: the same shapes with random weights, the same prompts, lengths and images.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_device_shapes import make_text_model, make_vision_model
from bench_device_work import Sizes, decode_prompts, longest_side, text_requests, write_images

_MAX_MODEL_LEN = 4096
_PACKAGES = {"cuda": ("vllm",), "npu": ("vllm", "vllm_ascend")}


def is_installed(platform: str) -> bool:
    """Whether vLLM for that platform is; nothing is imported."""
    packages = _PACKAGES.get(platform, ())
    return bool(packages) and all(importlib.util.find_spec(name) is not None for name in packages)


def measure_text(sizes: Sizes, settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    """(a): output tokens per second of one call, for each repeat."""
    from vllm import SamplingParams

    with tempfile.TemporaryDirectory() as name:
        llm = _make(make_text_model(Path(name), sizes.text_model), settings, skip_tokenizer_init=True)
        vocab_size = llm.llm_engine.model_config.get_vocab_size()
        rates = []
        for repeat in range(-1, repeats):  # the first one warms up
            requests = text_requests(sizes, vocab_size, repeat % (repeats + 1))
            params = [SamplingParams(temperature=0.6, ignore_eos=True, detokenize=False, max_tokens=count)
                      for _, count in requests]
            started = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
            seconds = time.perf_counter() - started
            counts = [len(output.outputs[0].token_ids) for output in outputs]
            assert counts == [count for _, count in requests], "every request gets the tokens it asked for"
            if repeat >= 0:
                rates.append(sum(counts) / seconds)
    return {"output_tokens_per_second": rates, "note": _version()}


def measure_decode(sizes: Sizes, settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    """(b): what `decode_steps` more tokens cost, a step."""
    with tempfile.TemporaryDirectory() as name:
        llm = _make(make_text_model(Path(name), sizes.decode_model), settings, skip_tokenizer_init=True)
        vocab_size = llm.llm_engine.model_config.get_vocab_size()
        batches = {}
        for batch_size in sizes.decode_batches:
            prompts = decode_prompts(batch_size, sizes.context - sizes.decode_steps // 2, vocab_size)
            counts = (2 + sizes.decode_steps, 2)
            for count in counts:  # warm-up
                _seconds(llm, prompts, count)
            milliseconds = []
            for _ in range(repeats):
                many, few = (_seconds(llm, prompts, count) for count in counts)
                milliseconds.append(1e3 * (many - few) / sizes.decode_steps)
            batches[str(batch_size)] = {"milliseconds": milliseconds}
    return {"batches": batches, "note": _version()}


def measure_images(sizes: Sizes, settings: dict[str, Any], repeats: int, *, is_mixed: bool) -> dict[str, Any]:
    """(c), (d): LLM.chat over the files, which it reads and prepares within the call."""
    from vllm import SamplingParams

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [json.loads(line)["body"] for line in
                write_images(folder, sizes, is_mixed=is_mixed).read_text().splitlines()]
        model = make_vision_model(folder, sizes.vision_model, longest_side(sizes, is_mixed=is_mixed))
        llm = _make(model, settings, allowed_local_media_path=str(folder), limit_mm_per_prompt={"image": 1, "video": 0})
        for body in rows:
            part = body["messages"][0]["content"][0]
            part["image_url"]["url"] = f"file://{part['image_url']['url']}"
        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=sizes.answer_tokens)
        conversations = [body["messages"] for body in rows]
        llm.chat(conversations[: len(rows) // 4], params, use_tqdm=False)
        rates = []
        for _ in range(repeats):
            llm.reset_prefix_cache()
            llm.reset_mm_cache()
            started = time.perf_counter()
            outputs = llm.chat(conversations, params, use_tqdm=False)
            rates.append(len(rows) / (time.perf_counter() - started))
            assert all(len(output.outputs[0].token_ids) == sizes.answer_tokens for output in outputs)
    return {"pictures_per_second": rates,
            "output_tokens_per_second": statistics.median(rates) * sizes.answer_tokens, "note": _version()}


def _make(path: Path, settings: dict[str, Any], **more: Any) -> Any:
    from vllm import LLM

    # No prefix of a repeat may come out of its cache.
    return LLM(str(path), load_format="dummy", dtype=settings["dtype"], max_model_len=_MAX_MODEL_LEN, seed=0,
               enable_prefix_caching=False, **more)


def _seconds(llm: Any, prompts: list[list[int]], num_tokens: int) -> float:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=num_tokens)
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return time.perf_counter() - started


def _version() -> str:
    names = [name for name in ("vllm", "vllm-ascend") if importlib.util.find_spec(name.replace("-", "_")) is not None]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
