"""Pages per second: `npu-runner read`, from PDFs to Markdown, beside vLLM with images that were rendered beforehand.

Models have the shapes of two page readers, and random weights. Half of the pages are scans. An answer has a fixed
number of tokens, which both engines make into text. Time counts from a model that is ready to the last Markdown file.
The time that rows took before it, and that of the pages prepared while it loads, is added, as if the device had waited.
vLLM's time is that of LLM.chat alone. Shares are of the time that the job serves; the tower's is measured by events on
the device. A profiled run of fewer pages gives the share of the time that the device idles, from the beginning of
serving to its last kernel. No draft of a random MTP head is accepted: the sides with -mtp show what drafts cost until
their rows pause them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from bench import common, peers
from bench.documents import write_documents, write_reader
from bench.profiler import describe_idle, device_profile, has_profiler
from bench.shapes import make_vision_model, vision_config
from bench.structured import write_vocabulary
from npu_runner import RunnerConfig
from npu_runner.cli import main as cli
from npu_runner.prompts.media.document_files import open_document
from npu_runner.prompts.media.page_options import PageOptions
from npu_runner.reports import report as _report  # noqa: F401 - imported here, since imports belong to the start
from npu_runner.runner.images import ImageEncoder
from npu_runner.serving.options import PreprocessingOptions
from npu_runner.serving.replicas.fleet import Fleet
from npu_runner.tables import make_rows, make_table

SIDES = ("npu_runner", "npu_runner-mtp", "profiled", "vllm", "vllm-mtp")
_MAX_MODEL_LEN, _MOST_TEXT_TOKENS = 8192, 64


class Shape(NamedTuple):
    """`longest`: pixels of a page's longer side."""

    model: str
    longest: int
    image_tokens: int
    answer_tokens: int
    prompt: str = ""
    temperature: float = 0.0


READERS = {"lighton-ocr-3": Shape("qwen3.5-0.8b", 1540, 1632, 1000, temperature=0.2),
           "chandra-ocr-2": Shape("qwen3.5-4b", 2560, 4560, 1400, "OCR this image to HTML."),
           "tiny": Shape("tiny-hybrid", 96, 6, 8, "Read.")}


def main() -> None:
    parser = common.make_parser(__doc__, repeats=2, platform="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--reader", nargs="+", choices=READERS, default=["lighton-ocr-3", "chandra-ocr-2"])
    parser.add_argument("--side", nargs="+", choices=SIDES, default=SIDES[:-1])
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--profiled-pages", type=int, default=128)
    parser.add_argument("--mtp", type=int, default=1, metavar="N", help="drafts of a step; default: %(default)s")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        name, side, folder = arguments.measure
        measure = measure_vllm if side.startswith("vllm") else measure_read
        print(json.dumps(measure(READERS[name], side, Path(folder), arguments)))
        return
    can = {"profiled": has_profiler(arguments.platform), "vllm": peers.has_vllm(arguments.platform)}
    sides = [side for side in arguments.side if can.get(side.partition("-")[0], True)]
    results: dict[str, dict[str, list[Any]]] = {name: {} for name in arguments.reader}
    for name in arguments.reader:
        with tempfile.TemporaryDirectory() as folder:
            make_files(READERS[name], Path(folder), arguments.pages)
            for side in sides:
                count = arguments.repeats if side.startswith("npu_runner") else 1  # vLLM repeats in one process
                results[name][side] = [common.run_child("bench.pages", *sys.argv[1:], "--measure", name, side, folder)
                                       for _ in range(count)]
                sys.stderr.write(f"{name} {side}: {json.dumps(results[name][side])}\n")  # before a later one hangs
        print("\n".join(report(name, results[name], arguments.pages)), flush=True)
    common.print_result("pages", arguments, results=results)


def make_files(shape: Shape, folder: Path, num_pages: int) -> None:
    """A model without weights, documents and a reader."""
    write_documents(folder / "documents", num_pages)
    write_reader(folder / "reader.json", {"longest": shape.longest, "shortest": shape.longest}, shape.prompt,
                 temperature=shape.temperature, ignore_eos=True, max_tokens=shape.answer_tokens)
    special = json.loads((common.SHAPES_VL / "tokenizer.json").read_text())["added_tokens"]
    write_vocabulary(make_vision_model(folder, shape.model, shape.longest), vision_config(shape.model)["text_config"],
                     special={token["id"]: token["content"] for token in special})


def time_tower(platform: str) -> Callable[[], float]:
    """The seconds that the device spends in the vision tower from now on, of the encoder that is used last: the others
    profile memory."""
    spans, encode = list[tuple[ImageEncoder, Any, Any]](), ImageEncoder.encode
    device: Any = None if platform == "cpu" else getattr(torch, platform)

    def mark() -> Any:
        if device is None:
            return time.perf_counter()
        event = device.Event(enable_timing=True)
        event.record()
        return event

    def timed(encoder: ImageEncoder, images: Any) -> Any:
        begin = mark()
        found = encode(encoder, images)
        spans.append((encoder, begin, mark()))
        return found

    ImageEncoder.encode = timed  # type: ignore[method-assign, assignment]
    return lambda: sum(end - begin if device is None else begin.elapsed_time(end) / 1e3
                       for encoder, begin, end in spans if encoder is spans[-1][0])


def take_times(owner: Any, name: str) -> list[tuple[float, float]]:
    """(begin, end) of each later call of this function, in seconds."""
    call, spans = getattr(owner, name), list[tuple[float, float]]()

    def taken(*arguments: Any, **keywords: Any) -> Any:
        began = time.perf_counter()
        found = call(*arguments, **keywords)
        spans.append((began, time.perf_counter()))
        return found

    setattr(owner, name, taken)
    return spans


def measure_read(shape: Shape, side: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of the command."""
    settings: dict[str, Any] = {"load_format": "dummy", "platform": arguments.platform, "dtype": arguments.dtype,
                                "max_model_len": _MAX_MODEL_LEN}
    if side.endswith("mtp"):
        settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": arguments.mtp}
    sample = min(arguments.profiled_pages, arguments.pages) if side == "profiled" else None
    flags = {"model": folder / shape.model, "reader": folder / "reader.json", "progress": "off", **settings}
    words = [word for key, value in (flags | ({"sample": sample} if sample else {})).items() for word in (
        f"--{key.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value))]
    tower_seconds, rows_made = time_tower(arguments.platform), take_times(make_rows, "make_rows")
    was_ready, results_written = take_times(Fleet, "serve"), take_times(make_table, "make_table")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        with device_profile(arguments.platform) if sample else nullcontext() as profile:
            status = cli.main(["read", str(folder / "documents"), "-o", name, *words])
        assert status == 0, f"read ended with {status}"
        served_ns = time.time_ns() - int((time.perf_counter() - was_ready[0][0]) * 1e9)
        output = Path(name, f"sample-{sample}" if sample else "")
        summary = json.loads((output / "summary.json").read_text())
        config = RunnerConfig.from_keywords(str(folder / shape.model), **settings)
        prepare_seconds, num_prepared = common.measure_head_start(config, output / "pages.jsonl", folder / "documents")
    num_pages, (job,) = summary["pages"]["total"], summary["jobs"]
    seconds, tokens = job["seconds"], job["tokens"]
    assert tokens["completion"] == num_pages * shape.answer_tokens, tokens
    assert 0 < tokens["prompt"] / num_pages - shape.image_tokens < _MOST_TEXT_TOKENS, tokens
    workers = PreprocessingOptions().num_workers(common.num_cores())
    shares = {"tower": tower_seconds(), "rest of prefills": seconds["prefill"] - tower_seconds(),
              "decode": seconds["decode"], "waiting for pages": seconds["preprocessing_wait"]}
    rows_seconds, results_seconds = (end - began for (began, end) in (*rows_made, *results_written))
    total = results_written[0][1] - was_ready[0][0] + rows_seconds + prepare_seconds / workers
    return {**(profile.report(profile.seconds_since(served_ns)) if profile else {}),
            "pages_per_second": [num_pages / total],
            "prompt_tokens": tokens["prompt"] / num_pages, "tokens": tokens, "workers": workers,
            "page_seconds": prepare_seconds / num_prepared, "num_prepared": num_prepared,
            "seconds": {**seconds, "rows": rows_seconds, "results": results_seconds, "total": total},
            "shares": {part: value / seconds["serve"] for part, value in shares.items()}}


def render(page: tuple[Path, int], longest: int) -> Image.Image:
    with open_document(page[0].open("rb")) as document:
        return document.render(page[1], PageOptions(longest=longest, shortest=longest)).image


def measure_vllm(shape: Shape, side: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """LLM.chat over all pages, whose images are in memory."""
    pages = [(path, index) for path in sorted((folder / "documents").iterdir())
             for index in range(open_document(path.open("rb")).num_pages)]
    with ProcessPoolExecutor() as pool:
        images = list(pool.map(partial(render, longest=shape.longest), pages))
    text = [{"type": "text", "text": shape.prompt}] if shape.prompt else []
    chats = [[{"role": "user", "content": [{"type": "image_pil", "image_pil": image}, *text]}] for image in images]
    more = {"speculative_config": {"method": "mtp", "num_speculative_tokens": arguments.mtp}} if "mtp" in side else {}
    llm = peers.open_vllm(folder / shape.model, {"dtype": arguments.dtype}, _MAX_MODEL_LEN,
                          limit_mm_per_prompt={"image": 1, "video": 0}, **more)
    llm.chat(chats[: len(chats) // 8], peers.vllm_params(shape.answer_tokens // 8), use_tqdm=False)  # warm-up
    params, rates = peers.vllm_params(shape.answer_tokens, shape.temperature, detokenize=True), []
    for _ in range(arguments.repeats):
        llm.reset_prefix_cache()
        llm.reset_mm_cache()
        started = time.perf_counter()
        outputs = llm.chat(chats, params, use_tqdm=False)
        rates.append(len(chats) / (time.perf_counter() - started))
        assert all(len(output.outputs[0].token_ids) == shape.answer_tokens for output in outputs)
    return {"pages_per_second": rates, "prompt_tokens": statistics.mean(len(each.prompt_token_ids) for each in outputs),
            "note": peers.vllm_version()}


def report(name: str, results: dict[str, list[Any]], num_pages: int) -> Iterator[str]:
    shape, rates = READERS[name], dict[str, list[float]]()
    yield (f"{name}: {shape.model} shape, {num_pages} pages, {shape.image_tokens} image tokens and "
           f"{shape.answer_tokens} of an answer each; pages/s, median and range")
    for side, runs in results.items():
        if None in runs:
            yield f"    {side:<16}failed"
            continue
        first, rates[side] = runs[0], [rate for each in runs for rate in each["pages_per_second"]]
        yield f"    {side:<16}{common.show(rates[side], 2):>22}, {first['prompt_tokens']:.0f} tokens of a prompt"
        if "shares" in first:
            drafts = {key: count for key, count in first["tokens"].items() if key.startswith("draft_")}
            yield ("        serving: " + ", ".join(f"{part} {share:.1%}" for part, share in first["shares"].items()) +
                   f"; {first['seconds']['rows']:.1f} s for rows, {first['seconds']['results']:.1f} s for results of "
                   f"{first['seconds']['total']:.1f} s; rendering "
                   f"{1e3 * first['page_seconds']:.0f} ms a page of a core, {first['workers']} workers"
                   f"{f'; {drafts}' if drafts else ''}")
        if side == "profiled":
            yield f"        device idle: {describe_idle(first)}"
    if {"npu_runner", "vllm"} <= rates.keys():
        ratio = statistics.median(rates["npu_runner"]) / statistics.median(rates["vllm"])
        yield f"    npu_runner reads {ratio:.2f} times as many pages as vLLM"
    yield "    published, of other pages and answers, on an H100: LightOnOCR-2 5.71, Surya 2.5 4.5, chandra-ocr-2 1.44"


if __name__ == "__main__":
    main()
