"""npu-runner's side of bench.device: each `measure_` function is one measurement, in a process of its own."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch

from bench.bandwidth import measure_read_bandwidth
from bench.bytes_moved import bytes_per_step, recorded_routes
from bench.common import measure_head_start
from bench.profiler import device_profile
from bench.shapes import make_text_model, make_vision_model
from bench.work import NUM_TOKEN_IDS, Sizes, decode_prompts, longest_side, text_requests, write_images
from npu_runner import LLM, RunnerConfig, SamplingParams
from npu_runner.request.prompt_inputs import PromptInputs

WARM_UP_STEPS = 8
PHASES = ("prepare", "launch", "sample", "wait")
Settings = dict[str, Any]
"""Settings of LLM; `form` is that of the checkpoint's weights."""


@contextmanager
def text_llm(name: str, settings: Settings, **more: Any) -> Iterator[LLM]:
    """An LLM of a text shape with random weights."""
    settings = {"load_format": "dummy", **more, **settings}
    with tempfile.TemporaryDirectory() as folder:
        path = make_text_model(Path(folder), name, settings.pop("form", None))
        with LLM(path, **settings) as llm:
            yield llm


def measure_text(sizes: Sizes, settings: Settings, repeats: int, *, is_profiled: bool) -> dict[str, Any]:
    """(a): output tokens per second of one call, for each repeat; profiled, the device's share and kernels of one."""
    with text_llm(sizes.text_model, settings, max_model_len=2 * sizes.most_tokens) as llm:
        warm_up = SamplingParams(max_tokens=4, ignore_eos=True)
        llm.generate([PromptInputs([1] * sizes.least_tokens)], warm_up)
        if is_profiled:
            with device_profile(settings["platform"]) as profile:
                _, seconds = _text(llm, sizes, 0)
            return profile.report(seconds)
        rates = [count / seconds for count, seconds in (_text(llm, sizes, repeat) for repeat in range(repeats))]
        stats = llm.stats()
    return {"output_tokens_per_second": rates, "preemptions": stats.num_preemptions,
            "prefill_seconds": stats.prefill_seconds, "decode_seconds": stats.decode_seconds}


def _text(llm: LLM, sizes: Sizes, repeat: int) -> tuple[int, float]:
    """(output tokens, seconds) of one call."""
    requests = text_requests(sizes, llm.engine.model_config.vocab_size, repeat)
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count) for _, count in requests]
    prompts = [PromptInputs(prompt) for prompt, _ in requests]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    counts = [len(output.token_ids) for output in outputs]
    assert counts == [count for _, count in requests], "every request gets the tokens it asked for"
    return sum(counts), seconds


def measure_decode(sizes: Sizes, settings: Settings, repeats: int, *, is_profiled: bool) -> dict[str, Any]:
    """(b): for each batch size the milliseconds of a decode step, where they go, and the bytes the step must move.

    Profiled: for each batch size the share of the steps' time that the device idles, and the kernels of a step.
    """
    platform, has_drafts = settings["platform"], "speculative_config" in settings
    if has_drafts:
        _never_pause_drafts()
    with recorded_routes(platform) as chosen, text_llm(
            sizes.decode_model, settings, max_model_len=2 * sizes.context + 4 * sizes.decode_steps,
            max_num_seqs=max(sizes.decode_batches)) as llm:
        if is_profiled:
            return {str(size): _profiled_steps(llm, size, sizes, platform) for size in sizes.decode_batches}
        graphs, batches = llm.engine.info.graphs, {}
        # Graphs of an NPU are compiled code; those of a GPU are recorded from steps that the record has seen.
        is_seen = (platform != "npu" or graphs == "eager") and not has_drafts
        for size in sizes.decode_batches:
            runner: Any = llm.engine._executor._runner  # type: ignore[attr-defined]
            batch = _decode_steps(llm, size, sizes, repeats)
            moved = bytes_per_step(runner, size, sizes.context, chosen if is_seen else None)
            batches[str(size)] = {**batch, "bytes": moved}
    device = torch.device("cpu" if platform == "cpu" else platform)
    bandwidth, reader = measure_read_bandwidth(device, sizes.bandwidth_bytes)
    return {"batches": batches, "graphs": graphs, "read_bytes_per_second": bandwidth, "read_by": reader}


def _never_pause_drafts() -> None:
    """Rows propose drafts in every step, although those of random weights are never accepted."""
    from npu_runner.core.draft_history import DraftHistory

    DraftHistory.pauses_at = lambda self, num_tokens: False  # type: ignore[method-assign]


def _decode_steps(llm: LLM, batch_size: int, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Steps of `batch_size` sequences whose contexts pass through `sizes.context`."""
    medians, parts = [], []
    for repeat in range(repeats):
        start_decoding(llm, batch_size, sizes, f"{repeat}")
        before = asdict(llm.stats())
        steps = timed_steps(llm, sizes.decode_steps)
        spent = phases(before, asdict(llm.stats()), len(steps))
        spent["engine"] = 1e3 * sum(steps) / len(steps) - sum(spent.values())
        medians.append(1e3 * statistics.median(steps))
        parts.append(spent)
        finish(llm)
    typical = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    return {"milliseconds": medians, "parts": typical, "context": sizes.context}


def phases(before: dict[str, Any], after: dict[str, Any], num_steps: int) -> dict[str, float]:
    """Mean milliseconds of a step by phase, from two `stats()`; the rest is scheduling, text and bookkeeping."""
    return {phase: 1e3 * (after[f"{phase}_seconds"] - before[f"{phase}_seconds"]) / num_steps for phase in PHASES}


def _profiled_steps(llm: LLM, batch_size: int, sizes: Sizes, platform: str) -> dict[str, Any]:
    start_decoding(llm, batch_size, sizes, "profiled")
    with device_profile(platform) as profile:
        seconds = sum(timed_steps(llm, sizes.decode_steps))
    finish(llm)
    return profile.report(seconds, sizes.decode_steps)


def start_decoding(llm: LLM, batch_size: int, sizes: Sizes, name: str,
                   params: Sequence[SamplingParams] | None = None) -> None:
    """Runs the prompts and the first steps of a full batch; after half of the measured steps contexts are
    `sizes.context` long."""
    num_prompt = sizes.context - sizes.decode_steps // 2 - WARM_UP_STEPS
    same = SamplingParams(temperature=0, ignore_eos=True, max_tokens=WARM_UP_STEPS + sizes.decode_steps + 2)
    for index, prompt in enumerate(decode_prompts(batch_size, num_prompt, llm.engine.model_config.vocab_size)):
        llm.engine.add_request(f"{batch_size}-{name}-{index}", PromptInputs(prompt), params[index] if params else same)
    while llm.stats().num_waiting:
        llm.engine.step()
    for _ in range(WARM_UP_STEPS):
        llm.engine.step()


def timed_steps(llm: LLM, count: int) -> list[float]:
    """Seconds of each step."""
    steps = []
    for _ in range(count):
        started = time.perf_counter()
        llm.engine.step()
        steps.append(time.perf_counter() - started)
    return steps


def finish(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def measure_prompts(sizes: Sizes, settings: Settings, repeats: int, *, is_profiled: bool) -> dict[str, Any]:
    """(g): milliseconds from the first request of an idle engine to the last token, for each of `sizes.prompts`;
    profiled, the device's share and kernels of one call."""
    length = max(tokens + answer for _, tokens, answer in sizes.prompts) + 16
    found: dict[str, Any] = {}
    with text_llm(sizes.decode_model, settings, max_model_len=length, enable_prefix_caching=False) as llm:
        for count, tokens, answer in sizes.prompts:
            name = f"{count}x{tokens}x{answer}"
            for repeat in range(2 if count * tokens <= 8192 else 1):  # warm-up
                _prompts(llm, count, tokens, answer, f"warm-up {repeat}")
            if is_profiled:
                with device_profile(settings["platform"]) as profile:
                    seconds = _prompts(llm, count, tokens, answer, "profiled")
                found[name] = profile.report(seconds)
                continue
            before = asdict(llm.stats())
            times = [_prompts(llm, count, tokens, answer, str(repeat)) for repeat in range(repeats)]
            found[name] = {"milliseconds": [1e3 * seconds for seconds in times],
                           "parts": phases(before, asdict(llm.stats()), repeats)}
        start = llm.engine.info.start_seconds
    return found if is_profiled else {"cases": found, "start_seconds": start}


def _prompts(llm: LLM, count: int, num_tokens: int, answer: int, name: str) -> float:
    random = Random(f"{count}-{num_tokens}-{name}")
    last_id = min(NUM_TOKEN_IDS, llm.engine.model_config.vocab_size - 1)
    prompts = [[random.randint(0, last_id) for _ in range(num_tokens)] for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(f"{num_tokens}-{name}-{index}", PromptInputs(prompt), params)
    finish(llm)
    return time.perf_counter() - started


def measure_images(sizes: Sizes, settings: Settings, *, is_mixed: bool, is_profiled: bool) -> dict[str, Any]:
    """(c), (d): the batch job over image files; profiled, the share of the time that the device does nothing.

    What the workers prepare while the model loads is added to the time, as if the device had waited for it.
    """
    from npu_runner.batch.job.options import BatchOptions
    from npu_runner.batch.job.run import run_batch

    def run_json(run: Any) -> dict[str, Any]:
        if hasattr(run, "to_json"):  # --against a tree before 0.6.0
            return dict(run.to_json())
        from npu_runner.reports.run_summary import run_json
        return run_json(run)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = write_images(folder, sizes, is_mixed=is_mixed)
        path = make_vision_model(folder, sizes.vision_model, longest_side(sizes, is_mixed=is_mixed))
        config = RunnerConfig.from_keywords(path, load_format="dummy", max_model_len=2048, **settings)
        options = BatchOptions(input=str(requests), output=str(folder / "answers.jsonl"), allowed_media_dir=folder,
                               progress="off")
        with device_profile(settings["platform"]) if is_profiled else nullcontext() as profile:
            summary = run_json(run_batch(config, options))
        idle = profile.report(summary["seconds"]["serve"]) if profile else {}
        head_start = measure_head_start(config, requests)[0] / summary["preprocessing"]["workers"]
    assert summary["rows"]["answered"] == sizes.num_pictures, summary["rows"]
    serve = summary["seconds"]["serve"]
    seconds = serve + head_start
    if idle.get("idle_share") is not None:  # the device waits for the head start, too
        idle["idle_share"] = (idle["idle_share"] * serve + head_start) / seconds
    return {**idle, "pictures_per_second": sizes.num_pictures / seconds,
            "output_tokens_per_second": summary["tokens"]["completion"] / seconds,
            "seconds": {**summary["seconds"], "head_start": head_start}}
