"""npu-runner's side of bench_device: each function is one measurement, in a process of its own."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bench_common import measure_head_start
from bench_device_bandwidth import measure_read_bandwidth
from bench_device_bytes import RouterRecord, bytes_per_step
from bench_device_idle import device_profile
from bench_device_shapes import make_text_model, make_vision_model
from bench_device_work import Sizes, decode_prompts, longest_side, text_requests, write_images

from npu_runner import LLM, RunnerConfig, SamplingParams
from npu_runner.request.prompt_inputs import PromptInputs

_WARM_UP_STEPS = 8
_PHASES = ("prepare", "launch", "sample", "wait")


def measure_text(sizes: Sizes, settings: dict[str, Any], repeats: int, *, is_profiled: bool) -> dict[str, Any]:
    """(a): output tokens per second of one call, for each repeat; profiled, the share of one that the device idles."""
    with tempfile.TemporaryDirectory() as name:
        path = make_text_model(Path(name), sizes.text_model)
        with LLM(path, load_format="dummy", max_model_len=2 * sizes.most_tokens, **settings) as llm:
            warm_up = SamplingParams(max_tokens=4, ignore_eos=True)
            llm.generate([PromptInputs([1] * sizes.least_tokens)], warm_up)
            if is_profiled:
                with device_profile(settings["platform"]) as profile:
                    _, seconds = _text(llm, sizes, 0)
                return profile.idle(seconds)
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


def measure_decode(sizes: Sizes, settings: dict[str, Any], repeats: int, *, is_profiled: bool) -> dict[str, Any]:
    """(b): for each batch size the milliseconds of a decode step, where they go, and the bytes the step must move.

    Profiled: for each batch size the share of the steps' time that the device idles.
    """
    with tempfile.TemporaryDirectory() as name, RouterRecord(settings["platform"]) as chosen:
        path = make_text_model(Path(name), sizes.decode_model)
        with LLM(path, load_format="dummy", max_model_len=2 * sizes.context + 4 * sizes.decode_steps,
                 max_num_seqs=max(sizes.decode_batches), **settings) as llm:
            if is_profiled:
                return {str(size): _decode_idle(llm, size, sizes, settings["platform"])
                        for size in sizes.decode_batches}
            batches = {}
            # Graphs of an NPU are compiled code; those of a GPU are recorded from steps that the record has seen.
            is_seen = settings["platform"] != "npu" or llm.engine.info.graphs == "eager"
            for size in sizes.decode_batches:
                batch = _decode_steps(llm, size, sizes, repeats)
                moved = bytes_per_step(_runner(llm), size, sizes.context, chosen if is_seen else None)
                batches[str(size)] = {**batch, "bytes": moved}
            device = torch.device("cpu" if settings["platform"] == "cpu" else settings["platform"])
            graphs = llm.engine.info.graphs
    bandwidth, reader = measure_read_bandwidth(device, sizes.bandwidth_bytes)
    return {"batches": batches, "graphs": graphs, "read_bytes_per_second": bandwidth, "read_by": reader}


def measure_images(sizes: Sizes, settings: dict[str, Any], *, is_mixed: bool,
                   is_profiled: bool) -> dict[str, Any]:
    """(c), (d): the batch job over image files; profiled, the share of the time that the device does nothing.

    What the workers prepare while the model loads is added to the time, as if the device had waited for it.
    """
    from npu_runner.batch.job.options import BatchOptions
    from npu_runner.batch.job.run import run_batch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        requests = write_images(folder, sizes, is_mixed=is_mixed)
        path = make_vision_model(folder, sizes.vision_model, longest_side(sizes, is_mixed=is_mixed))
        config = RunnerConfig.from_keywords(path, load_format="dummy", max_model_len=2048, **settings)
        options = BatchOptions(input=str(requests), output=str(folder / "answers.jsonl"), allowed_media_dir=folder,
                               progress="off")
        if is_profiled:
            with device_profile(settings["platform"]) as profile:
                summary = run_batch(config, options).to_json()
            idle = profile.idle(summary["seconds"]["serve"])
        else:
            summary, idle = run_batch(config, options).to_json(), {}
        head_start = measure_head_start(config, requests) / summary["preprocessing"]["workers"]
    assert summary["rows"]["answered"] == sizes.num_pictures, summary["rows"]
    serve = summary["seconds"]["serve"]
    seconds = serve + head_start
    if idle.get("idle_share") is not None:  # the device waits for the head start, too
        idle["idle_share"] = (idle["idle_share"] * serve + head_start) / seconds
    return {**idle, "pictures_per_second": sizes.num_pictures / seconds,
            "output_tokens_per_second": summary["tokens"]["completion"] / seconds,
            "seconds": {**summary["seconds"], "head_start": head_start}}


def _decode_steps(llm: LLM, batch_size: int, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Steps of `batch_size` sequences whose contexts pass through `sizes.context`."""
    engine = llm.engine
    medians, parts = [], []
    for repeat in range(repeats):
        _begin_decoding(llm, batch_size, sizes, repeat)
        before = engine.stats()
        steps = _timed_steps(llm, sizes.decode_steps)
        after = engine.stats()
        medians.append(1e3 * statistics.median(steps))
        parts.append(_parts(asdict(before), asdict(after), sum(steps), sizes.decode_steps))
        _finish(llm)
    typical = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    return {"milliseconds": medians, "parts": typical, "context": sizes.context}


def _decode_idle(llm: LLM, batch_size: int, sizes: Sizes, platform: str) -> dict[str, Any]:
    _begin_decoding(llm, batch_size, sizes, 0)
    with device_profile(platform) as profile:
        seconds = sum(_timed_steps(llm, sizes.decode_steps))
    _finish(llm)
    return profile.idle(seconds)


def _begin_decoding(llm: LLM, batch_size: int, sizes: Sizes, repeat: int) -> None:
    """The sequences have their prompts behind them, and their first steps."""
    engine = llm.engine
    num_prompt = sizes.context - sizes.decode_steps // 2 - _WARM_UP_STEPS
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=_WARM_UP_STEPS + sizes.decode_steps + 2)
    for index, prompt in enumerate(decode_prompts(batch_size, num_prompt, engine.model_config.vocab_size)):
        engine.add_request(f"{batch_size}-{repeat}-{index}", PromptInputs(prompt), params)
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(_WARM_UP_STEPS):
        engine.step()


def _timed_steps(llm: LLM, count: int) -> list[float]:
    """Seconds of each."""
    steps = []
    for _ in range(count):
        started = time.perf_counter()
        llm.engine.step()
        steps.append(time.perf_counter() - started)
    return steps


def _finish(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def _parts(before: dict[str, Any], after: dict[str, Any], seconds: float, count: int) -> dict[str, float]:
    """Mean milliseconds of a step by phase; `engine` is scheduling, text and bookkeeping."""
    spent = {phase: after[f"{phase}_seconds"] - before[f"{phase}_seconds"] for phase in _PHASES}
    spent["engine"] = seconds - sum(spent.values())
    return {phase: 1e3 * value / count for phase, value in spent.items()}


def _runner(llm: LLM) -> Any:
    """The ModelRunner in this process."""
    return llm.engine._executor._runner  # type: ignore[attr-defined]
