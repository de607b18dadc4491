"""The peers of bench.device, transformers and vLLM (vllm-ascend on an NPU): each a process of its own.

Both get the same shapes with random weights, the same prompts, lengths and images. transformers runs with the settings
that its authors recommend for speed: compiled, with flash attention where that is installed. vLLM has its defaults.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.common import versions
from bench.shapes import make_text_model, make_vision_model
from bench.work import Sizes, decode_prompts, longest_side, text_requests, write_images

_PATIENCE_SECONDS = 150.0
_MAX_MODEL_LEN = 4096
_VLLM_PACKAGES = {"cuda": ("vllm",), "npu": ("vllm", "vllm_ascend")}
Requests = list[tuple[list[int], int]]
"""(prompt, number of output tokens)."""


class PeerStoppedError(Exception):
    """The peer stopped early; the message says where."""


def has_vllm(platform: str) -> bool:
    """True if vLLM is installed for that platform; nothing is imported."""
    packages = _VLLM_PACKAGES.get(platform, ())
    return bool(packages) and all(importlib.util.find_spec(name) is not None for name in packages)


def measure(side: str, part: str, sizes: Sizes, settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    """One part on one side, "vllm" or "transformers"."""
    if part in ("pictures", "mixed"):
        return _vllm_images(sizes, settings, repeats, is_mixed=part == "mixed")
    measures: dict[tuple[str, str], Callable[[Sizes, dict[str, Any], int], dict[str, Any]]] = {
        ("vllm", "text"): _vllm_text, ("vllm", "decode"): _vllm_decode,
        ("transformers", "text"): _transformers_text, ("transformers", "decode"): _transformers_decode}
    try:
        return measures[side, part](sizes, settings, repeats)
    except PeerStoppedError as stopped:
        return {"failed": str(stopped)}


def _transformers_text(sizes: Sizes, settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Continuous batching as `generate_batch` runs it, but each request with its own length."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    model = _transformers(sizes.text_model, settings)
    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        raise PeerStoppedError("transformers has no continuous batching for Gated DeltaNet")
    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=0, max_new_tokens=sizes.most_tokens,
                              eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(default_compile_level=int(settings["platform"] == "cuda"))
    hints = WorkloadHints(sizes.most_tokens, sizes.most_tokens, sizes.num_texts)  # what generate_batch gives
    with model.continuous_batching_context_manager(generation_config=config, continuous_batching_config=batching,
                                                   workload_hints=hints) as manager:
        _run_batch(manager, [([1] * sizes.least_tokens, 4)])  # warm-up
        rates = _rates(lambda requests: _run_batch(manager, requests), sizes, model.config.vocab_size, range(repeats))
    return {"output_tokens_per_second": rates, "note": model.config._attn_implementation}


def _rates(run: Callable[[Requests], int], sizes: Sizes, vocab_size: int, repeats: range) -> list[float]:
    """Output tokens per second of each repeat; `run` returns the number of tokens that came."""
    rates = []
    for repeat in repeats:
        requests = text_requests(sizes, vocab_size, repeat)
        started = time.perf_counter()
        count = run(requests)
        rates.append(count / (time.perf_counter() - started))
        assert count == sum(wanted for _, wanted in requests), f"{count} tokens came"
    return rates


def _transformers_decode(sizes: Sizes, settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    """`generate` over a static cache, compiled."""
    model = _transformers(sizes.decode_model, settings)

    def seconds(prompts: list[list[int]], num_tokens: int) -> float:
        return _generate(model, torch.tensor(prompts, device=model.device), num_tokens)

    # Two warm-ups: compilation, then its graph.
    return {"batches": _decode(seconds, sizes, model.config.vocab_size, repeats, num_warm_ups=2)}


def _decode(seconds: Callable[[list[list[int]], int], float], sizes: Sizes, vocab_size: int, repeats: int,
            num_warm_ups: int) -> dict[str, Any]:
    """What `decode_steps` more tokens cost, in milliseconds a step, for each batch size."""
    batches = {}
    for batch_size in sizes.decode_batches:
        prompts = decode_prompts(batch_size, sizes.context - sizes.decode_steps // 2, vocab_size)
        counts = (2 + sizes.decode_steps, 2)  # the larger first: a static cache keeps its size
        milliseconds = []
        for repeat in range(repeats + num_warm_ups):
            many, few = (seconds(prompts, count) for count in counts)
            if repeat >= num_warm_ups:
                milliseconds.append(1e3 * (many - few) / sizes.decode_steps)
        batches[str(batch_size)] = {"milliseconds": milliseconds}
    return batches


def _transformers(name: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(make_text_model(Path(folder), name))
    torch.manual_seed(0)
    with torch.device(settings["platform"]):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings["dtype"])).eval()


def _generate(model: Any, inputs: torch.Tensor, num_tokens: int) -> float:
    """Seconds of one call over a static cache."""
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                                max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0,
                                cache_implementation="static")
    output.cpu()
    return time.perf_counter() - started


def _run_batch(manager: Any, requests: Requests) -> int:
    """The number of tokens that came back."""
    for prompt, count in requests:
        manager.add_request(prompt, max_new_tokens=count)
    num_tokens = num_finished = 0
    started = time.monotonic()
    while num_finished < len(requests):
        seconds = time.monotonic() - started
        if seconds > _PATIENCE_SECONDS or not manager.is_running():
            raise PeerStoppedError(f"stopped: {num_finished} of {len(requests)} requests, {num_tokens} tokens of "
                                   f"these, in {seconds:.0f} s")
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise PeerStoppedError(str(result.error))
            num_finished += 1
            num_tokens += len(result.generated_tokens)
    return num_tokens


def open_vllm(path: Path, settings: dict[str, Any], max_model_len: int = _MAX_MODEL_LEN, **more: Any) -> Any:
    """vLLM's LLM with random weights and its own defaults. No prefix of a repeat may come out of its cache."""
    from vllm import LLM

    # On Hopper vLLM takes FlashInfer's delta rule, installed or not, and its first prefill fails.
    if torch.cuda.is_available() and importlib.util.find_spec("flashinfer") is None:
        more["additional_config"] = {"gdn_prefill_backend": "triton"}
    return LLM(str(path), load_format="dummy", dtype=settings["dtype"], max_model_len=max_model_len, seed=0,
               enable_prefix_caching=False, model_impl=settings.get("model_impl", "auto"), **more)


def vllm_params(num_tokens: int, temperature: float = 0.0, *, detokenize: bool = False) -> Any:
    """vLLM's SamplingParams of an answer with this number of tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=temperature, ignore_eos=True, detokenize=detokenize, max_tokens=num_tokens)


def _vllm_text(sizes: Sizes, settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        llm = open_vllm(make_text_model(Path(name), sizes.text_model), settings, skip_tokenizer_init=True)

        def run(requests: Requests) -> int:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests],
                                   [vllm_params(count, 0.6) for _, count in requests], use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        vocab_size = llm.llm_engine.model_config.get_vocab_size()
        _rates(run, sizes, vocab_size, range(repeats, repeats + 1))  # warm-up
        rates = _rates(run, sizes, vocab_size, range(repeats))
    return {"output_tokens_per_second": rates, "note": vllm_version()}


def _vllm_decode(sizes: Sizes, settings: dict[str, Any], repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        llm = open_vllm(make_text_model(Path(name), sizes.decode_model), settings, skip_tokenizer_init=True)

        def seconds(prompts: list[list[int]], num_tokens: int) -> float:
            started = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], vllm_params(num_tokens),
                                   use_tqdm=False)
            assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
            return time.perf_counter() - started

        vocab_size = llm.llm_engine.model_config.get_vocab_size()
        return {"batches": _decode(seconds, sizes, vocab_size, repeats, num_warm_ups=1), "note": vllm_version()}


def _vllm_images(sizes: Sizes, settings: dict[str, Any], repeats: int, *, is_mixed: bool) -> dict[str, Any]:
    """LLM.chat over the files, which it reads and prepares within the call."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [json.loads(line)["body"] for line in
                write_images(folder, sizes, is_mixed=is_mixed).read_text().splitlines()]
        model = make_vision_model(folder, sizes.vision_model, longest_side(sizes, is_mixed=is_mixed))
        llm = open_vllm(model, settings, allowed_local_media_path=str(folder),
                        limit_mm_per_prompt={"image": 1, "video": 0})
        for body in rows:
            part = body["messages"][0]["content"][0]
            part["image_url"]["url"] = f"file://{part['image_url']['url']}"
        conversations = [body["messages"] for body in rows]
        llm.chat(conversations[: len(rows) // 4], vllm_params(sizes.answer_tokens), use_tqdm=False)
        rates = []
        for _ in range(repeats):
            llm.reset_prefix_cache()
            llm.reset_mm_cache()
            started = time.perf_counter()
            outputs = llm.chat(conversations, vllm_params(sizes.answer_tokens), use_tqdm=False)
            rates.append(len(rows) / (time.perf_counter() - started))
            assert all(len(output.outputs[0].token_ids) == sizes.answer_tokens for output in outputs)
    return {"pictures_per_second": rates,
            "output_tokens_per_second": statistics.median(rates) * sizes.answer_tokens, "note": vllm_version()}


def vllm_version() -> str:
    """The version of vLLM, and that of vllm-ascend where it is installed."""
    return ", ".join(f"{name} {version}" for name, version in versions().items() if name.startswith("vllm"))
