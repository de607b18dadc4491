"""Generates for a list of cases on one platform and writes what came out, as JSON.

    python -m tests.npu.programs.generate CASES.json RESULTS.json

The tests run it twice: on the npu platform in a process of its own, and on the cpu platform in theirs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from npu_runner import LLM, SamplingParams
from npu_runner.platforms import pick_platform
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.oracle.running import runner_of

WORDS = ["which", "of", "the", "two", "pictures", "shows", "a", "circle,", "and", "what", "colour", "is", "it"]


@dataclasses.dataclass
class Case:
    """One engine and what it is asked. prompts: "shapes", "texts", "long texts", "images" or "videos", as many as
    `count`."""

    model: str
    settings: dict[str, Any]
    prompts: str
    count: int
    max_tokens: int = 16
    logprobs: int | None = None
    ignore_eos: bool = True
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    """More fields of SamplingParams."""
    is_null_block_poisoned: bool = False
    stale: float | None = None
    """Fills the cache before: keys and values that no length counts."""
    has_npugraph_ex: bool = True


def run_case(case: Case) -> dict[str, Any]:
    if not case.has_npugraph_ex:
        # An older torch_npu has only torchair's own mode for captured graphs; this one has both.
        from npu_runner.platforms.npu import torchair

        torchair.has_npugraph_ex = lambda: False
    with LLM(case.model, **case.settings) as llm:
        prompts = make_prompts(llm, case)
        if case.is_null_block_poisoned:
            with torch.inference_mode():
                for cache in (runner_of(llm).k_cache, runner_of(llm).v_cache):
                    cache[:, 0] = float("nan")
        if case.stale is not None:
            with torch.inference_mode():
                for cache in (runner_of(llm).k_cache, runner_of(llm).v_cache):
                    cache.fill_(case.stale)
        has_ranks = "tensor_parallel_size" in case.settings
        eager_drafts, eager_heads = ([], []) if has_ranks else (drafts_without_graph(llm), heads_without_graph(llm))
        before = snapshot()
        outputs = llm.generate(prompts, [parameters(case, index) for index in range(len(prompts))])
        stats = llm.stats()
        return {
            "tokens": [output.token_ids for output in outputs],
            "texts": [output.text for output in outputs],
            "logprobs": [[dict(top_of(place)) for place in output.logprobs or []] for output in outputs],
            "hidden_states": [{str(layer): states.tolist() for layer, states in (output.hidden_states or {}).items()}
                              for output in outputs],
            "memory": memory_of(case.settings["platform"]),
            "graphs": llm.engine.info.graphs,
            "before": before, "after": snapshot(),
            "num_accepted_tokens": stats.num_accepted_tokens, "eager_drafts": eager_drafts,
            "eager_heads": eager_heads,
            "num_preemptions": stats.num_preemptions, "prefix_cache_hits": stats.prefix_cache_hits,
        }


def memory_of(platform: str) -> dict[str, int] | None:
    """The device's memory as anybody may ask for it."""
    info = pick_platform(platform).memory_info()
    return info and {"used": info.used_bytes, **dataclasses.asdict(info)}


def heads_without_graph(llm: LLM) -> list[int]:
    """Fills itself with the rows of each pass of the model's own head, but over prompts, that no graph runs."""
    steps: Any = runner_of(llm).steps
    found: list[int] = []
    if steps.head_step is not None:
        run = steps._pass

        def run_and_note(bucket: Any, inputs: Any, plan: Any) -> None:
            if bucket is None:
                found.append(len(inputs.positions))
            run(bucket, inputs, plan)

        steps._pass = run_and_note
    return found


def drafts_without_graph(llm: LLM) -> list[int]:
    """Fills itself with the tokens of each step with drafts that no graph runs."""
    steps: Any = runner_of(llm).steps
    prepare = steps.prepare
    found: list[int] = []

    def prepare_and_note(batch: Any, *arguments: Any) -> Any:
        step = prepare(batch, *arguments)
        if batch.has_drafts and step.bucket is None:
            found.append(batch.num_tokens)
        return step

    steps.prepare = prepare_and_note
    return found


def parameters(case: Case, index: int) -> SamplingParams:
    """Different lengths, so that the batch shrinks through every size."""
    length = case.max_tokens if case.prompts == "shapes" else max(2, case.max_tokens - index % case.max_tokens)
    return SamplingParams(**{"temperature": 0, "max_tokens": length, "ignore_eos": case.ignore_eos,
                             "logprobs": case.logprobs, **case.sampling})


def make_prompts(llm: LLM, case: Case) -> list[Any]:
    processor = llm.engine.processor
    if case.prompts == "shapes":
        return [processor(draw_example(seed).conversation()) for seed in TEST_SEEDS[: case.count]]
    if case.prompts == "texts":
        lines = [" ".join(WORDS[: 1 + (7 * index) % 13] * (1 + index)) for index in range(case.count)]
        return [processor.from_text(line) for line in lines]
    if case.prompts == "long texts":
        return [processor.from_text(" ".join((WORDS * 12)[: 3 + 24 * index])) for index in range(case.count)]
    if case.prompts == "videos":
        return [processor(conversation(index, has_video=True)) for index in range(case.count)]
    assert case.prompts == "images", case.prompts
    return [processor(conversation(index)) for index in range(case.count)]


def conversation(index: int, *, has_video: bool = False) -> list[dict[str, Any]]:
    """0, 1 or 2 images of odd sizes around some words, and a video."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": " ".join(WORDS[: 2 + index % 9])}]
    images = draw_example(TEST_SEEDS[300 + index]).images[: index % 3]
    for number, image in enumerate(images):
        parts.insert((index + number) % (len(parts) + 1), {"type": "image", "image": image})
    if has_video:
        from tests.videos import moving_frames, video_of

        # Without loss, because each process encodes: x264 decides with floats, and not the same in all of them.
        frames = moving_frames(5 + 7 * index, 60 + 20 * index, 90, seed=index)
        data = video_of(frames, kind="matroska", codec="ffv1")
        parts.insert(index % (len(parts) + 1), {"type": "video", "video": data})
    return [{"role": "user", "content": parts}]


def top_of(place: Any) -> list[tuple[str, float]]:
    return [(str(entry.token_id), entry.logprob) for entry in place.top]


def snapshot() -> dict[str, Any]:
    """Graphs traced by dynamo in this process and, on the emulated device, captured ones and compiled ones.

    There also operators that left the AI core, sorted or transposed, for want of a kernel.
    """
    import torch._dynamo

    traced = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if "CANN_EMU" not in os.environ:
        return {"traced": traced}
    from tests.cann.programs.emulation import calls, fallbacks

    return {"traced": traced, "captured": calls("graphs").get("captured", 0), "compiled": calls("ge").get("compile", 0),
            "fallbacks": fallbacks()}


def main(cases_path: str, results_path: str) -> None:
    cases = [Case(**entry) for entry in json.loads(Path(cases_path).read_text())]
    Path(results_path).write_text(json.dumps([run_case(case) for case in cases]))


if __name__ == "__main__":
    main(*sys.argv[1:])
