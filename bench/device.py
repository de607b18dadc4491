"""npu-runner on random weights of real shapes, with transformers and, where it is installed, vLLM in the same run.

Made for one device: --platform cuda, or npu on an Ascend host (vLLM is then vllm-ascend).
(a) text: the Qwen3-0.6B shape, 256 requests with prompts and outputs of 100 to 1,024 tokens; peers: transformers'
    continuous batching, which is what its generate_batch runs, compiled (it takes flash attention where a package
    for it is installed; without one it takes minutes a repeat and is stopped), and vLLM's LLM.generate.
(b) decode: the Qwen3-8B shape at batch 1, 8 and 64 and a context of 512; milliseconds a step, where the host spends
    them, and the share of the memory bandwidth (the bytes of weights and KV cache that a step must read, over the read
    bandwidth measured in the same run by the best of several kernels); peers: generate with a static cache, compiled,
    and what more tokens cost vLLM.
(c) pictures: the Qwen3-VL-4B shape, 256 JPEG files of 896 x 672 with 32 tokens of text each, 128 tokens of answer,
    through the batch job, files to answers, with the time for what it prepares while the model loads; peer: vLLM's
    LLM.chat over the same files.
(d) mixed: (c) with images of 597 to 1,193 by 448 to 895, nearly each of a size of its own.
(e) moe: (a), (b) and (c) with the shape of Qwen3.6-35B-A3B: Gated DeltaNet and 256 experts. Only the bytes of the
    experts that a step chose count.
(f) hybrid: (a), (b) and (c) with a 9B qwen3_5 shape: Gated DeltaNet and dense layers.
(g) prompts, by name only: milliseconds from the call to the last token, of short and long prompts, nothing cached.
(h) structured, by name only: a step of the largest batch whose rows have different schemas, beside the same without.
In each part one more run of ours goes under the vendor's profiler, for the share of the time that the device idles and
for --kernels: it is slower by a few per cent, so no other figure comes from it. "not available" says why there is none.
--model, --checkpoint, --quantization, --kv-cache-dtype, --generic and --mtp change (a), (b) and (g). With --mtp every
row has drafts of the model's head in every step, and none is accepted: what a step with drafts costs.
Every measurement has a process of its own. `--sizes tiny --platform cpu` shows in a minute that the program works; its
figures mean nothing. `--sizes host --platform cpu --part decode --peer` shows what a decode step costs the host,
whatever the model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import peers
from bench.common import make_parser, print_result, run_child, show
from bench.profiler import describe_idle, has_profiler, not_profiled
from bench.shapes import FORMS, TEXT
from bench.work import SIZES, Sizes
from npu_runner import strategies

FAMILIES = {"moe": "(e)", "hybrid": "(f)"}
TITLES = {"text": "(a) text", "decode": "(b) decode", "pictures": "(c) images", "mixed": "(d) mixed images",
          **{f"{family}-{kind}": f"{letter} {family} {kind}" for family, letter in FAMILIES.items()
             for kind in ("text", "decode", "pictures")}}
BY_NAME = {"prompts": "(g) prompts", "structured": "(h) structured"}
OURS, AGAINST, PROFILED, TRANSFORMERS, VLLM = "npu_runner", "against", "profiled", "transformers", "vllm"
_WHILE_DEVICE_WORKS = ("launch", "sample", "wait")
_SETTINGS = ("graph_mode", "attention_backend", "quantization", "kv_cache_dtype")


def main() -> None:
    parser = make_parser(__doc__, repeats=3, platform="cuda", compares_trees=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--graph-mode", help="ours: eager, reduce-overhead or max-autotune; default: its own")
    parser.add_argument("--attention-backend", help="ours: one that the platform names; default: its own")
    parser.add_argument("--quantization", help="ours: int8 or fp8, made while loading")
    parser.add_argument("--kv-cache-dtype", help="ours: fp8")
    parser.add_argument("--checkpoint", dest="form", choices=FORMS, help="ours: the form of the checkpoint's weights")
    parser.add_argument("--mtp", type=int, metavar="N", help="ours: drafts of the model's head in each step")
    parser.add_argument("--model", choices=TEXT, help="another shape")
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="of decode steps")
    parser.add_argument("--prompts", type=_prompts, nargs="+", metavar="COUNTxTOKENSxANSWER", help="of (g)")
    parser.add_argument("--generic", action="store_true", help="through transformers' modules, vLLM too")
    parser.add_argument("--sizes", choices=tuple(SIZES), default="real")
    parser.add_argument("--part", choices=(*TITLES, *FAMILIES, *BY_NAME), action="append",
                        help="may be repeated; moe and hybrid mean all of theirs; default: (a) to (f)")
    parser.add_argument("--peer", nargs="*", choices=(TRANSFORMERS, VLLM), default=[TRANSFORMERS, VLLM],
                        help="those beside ours; without a name none; default: both")
    parser.add_argument("--kernels", action="store_true", help="print the longest kernels of the profiled run")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        part, side = arguments.measure
        print(json.dumps(measure(part, side, arguments)))
        return
    results: dict[str, dict[str, Any]] = {}
    wanted = set(arguments.part or TITLES)
    for part in [part for part in TITLES | BY_NAME if {part, part.partition("-")[0]} & wanted]:
        results[part] = {side: measure_side(part, side, arguments) for side in sides(part, arguments)}
        print("\n".join(report(part, results[part])), flush=True)
        if arguments.kernels:
            print("\n".join(report_kernels(results[part].get(PROFILED, {}))), flush=True)
    print_result("device", arguments, results=results)


def _prompts(text: str) -> tuple[int, ...]:
    count, tokens, answer = map(int, text.split("x"))
    return count, tokens, answer


def sides(part: str, arguments: argparse.Namespace) -> list[str]:
    """The sides that can be measured."""
    wanted = [OURS] if part == "structured" else [OURS, PROFILED]
    wanted += [AGAINST] if arguments.against else []
    if part not in BY_NAME:
        can = {TRANSFORMERS: not is_images(part), VLLM: peers.has_vllm(arguments.platform)}
        wanted += [peer for peer in arguments.peer if can[peer]]
    return wanted


def measure_side(part: str, side: str, arguments: argparse.Namespace) -> Any:
    if side == PROFILED and not has_profiler(arguments.platform):
        return not_profiled(arguments.platform)
    # A job of images is a process each.
    is_several = side in (OURS, AGAINST) and is_images(part)
    results = [measure_in_child(part, side, arguments.against if side == AGAINST else None)
               for _ in range(arguments.repeats if is_several else 1)]
    return results if is_several else results[0]


def measure_in_child(part: str, side: str, tree: Path | None) -> dict[str, Any]:
    """What the child measured, or {"failed": why}: a peer or profiler that cannot run must not end the run."""
    result = run_child("bench.device", *sys.argv[1:], "--measure", part, side, tree=tree)
    sys.stderr.write(f"{part} {side}: {json.dumps(result)}\n")  # not lost when a later one hangs
    if result is None and side == OURS:
        raise SystemExit(f"{part} of {side} failed")
    return dict(result or {"failed": "the process failed"})


def measure(part: str, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One measurement, in the child process."""
    family, _, part = part.rpartition("-")
    sizes: Sizes = SIZES[arguments.sizes]
    if family or arguments.model:
        sizes = sizes.with_model(family or arguments.model)
    sizes = replace(sizes, decode_batches=tuple(arguments.batch_sizes or sizes.decode_batches),
                    prompts=tuple(arguments.prompts or sizes.prompts))
    settings: dict[str, Any] = {"platform": arguments.platform, "dtype": arguments.dtype}
    if side in (VLLM, TRANSFORMERS):
        settings |= {"model_impl": "transformers"} if arguments.generic else {}
        return peers.measure(side, part, sizes, settings, arguments.repeats)
    settings |= {name: value for name in _SETTINGS if (value := getattr(arguments, name)) is not None}
    from bench import ours

    if arguments.generic:
        strategies.find_strategy = lambda model_type: None
    if is_images(part):
        return ours.measure_images(sizes, settings, is_mixed=part == "mixed", is_profiled=side == PROFILED)
    if part == "structured":
        from bench.structured import measure_structured

        return measure_structured(sizes, settings, arguments.repeats)
    settings |= {"form": arguments.form} if arguments.form else {}
    if arguments.mtp:
        settings["speculative_config"] = {"method": "mtp", "num_speculative_tokens": arguments.mtp}
    measure_ours = {"text": ours.measure_text, "decode": ours.measure_decode, "prompts": ours.measure_prompts}[part]
    return measure_ours(sizes, settings, arguments.repeats, is_profiled=side == PROFILED)


def is_images(part: str) -> bool:
    return part.endswith(("pictures", "mixed"))


def report(part: str, results: dict[str, Any]) -> Iterator[str]:
    title = (TITLES | BY_NAME)[part]
    reports = {"text": report_text, "decode": report_decode, "pictures": report_images, "mixed": report_images,
               "prompts": report_prompts, "structured": report_structured}
    reported = reports[part.rpartition("-")[2]]
    yield from reported(results, title)
    if AGAINST in results:
        yield from reported({PROFILED: {"why": "not measured"}, OURS: results[AGAINST]}, f"{title}, the other tree")


def report_text(results: dict[str, Any], title: str) -> Iterator[str]:
    yield f"{title}: output tokens/s, median and range"
    for side in (OURS, TRANSFORMERS, VLLM):
        if side in results:
            yield _report_rates(side, results[side], "output_tokens_per_second")
    yield f"    device idle: {describe_idle(results[PROFILED])}"


def _report_rates(side: str, result: dict[str, Any], name: str) -> str:
    if "failed" in result:
        return f"    {side:<20}failed: {result['failed']}"
    note = f"  ({result['note']})" if result.get("note") else ""
    return f"    {side:<20}{show(result[name], 2)}{note}"


def report_decode(results: dict[str, Any], title: str) -> Iterator[str]:
    ours, peer_sides = results[OURS], [side for side in (TRANSFORMERS, VLLM) if side in results]
    bandwidth = ours["read_bytes_per_second"]
    yield f"{title}: {bandwidth / 1e9:.0f} GB/s read ({ours['read_by']}); {ours['graphs']}"
    yield (f"    {'batch':>5}{'ms/step':>25}{'GB moved':>10}{'of bandwidth':>14}  host ms: " +
           " ".join(f"{name:>8}" for name in next(iter(ours["batches"].values()))["parts"]) + "  device ms" +
           "".join(f"{side + ' ms':>18}" for side in peer_sides) + "  device idle")
    for size, batch in ours["batches"].items():
        milliseconds, parts = batch["milliseconds"], batch["parts"]
        yield (f"    {size:>5} {show(milliseconds):>24}"
               f"{_moved(batch['bytes'], bandwidth, statistics.median(milliseconds) / 1e3)}           " +
               " ".join(f"{value:>8.3f}" for value in parts.values()) +
               f"{sum(parts[name] for name in _WHILE_DEVICE_WORKS):>11.3f}" +
               "".join(f"{_milliseconds(results[side], size):>18}" for side in peer_sides) +
               f"  {describe_idle(results[PROFILED].get(size, results[PROFILED]))}")


def _moved(num_bytes: dict[str, int | None], bandwidth: float, seconds: float) -> str:
    """GB that a step moves, and the share of the bandwidth; the experts of compiled code are unknown."""
    known = [value for value in num_bytes.values() if value is not None]
    if len(known) < len(num_bytes):
        return f"{'-':>10}{'not seen':>14}"
    return f"{sum(known) / 1e9:>10.2f}{sum(known) / bandwidth / seconds:>14.1%}"


def _milliseconds(peer: dict[str, Any], size: str) -> str:
    return f"{statistics.median(peer['batches'][size]['milliseconds']):.3f}" if "batches" in peer else peer["failed"]


def report_images(results: dict[str, Any], title: str) -> Iterator[str]:
    rates, tokens = ([run[name] for run in results[OURS]]
                     for name in ("pictures_per_second", "output_tokens_per_second"))
    yield (f"{title}: {show(rates, 2)} images/s, {statistics.median(tokens):.0f} output tokens/s, "
           f"device idle: {describe_idle(results[PROFILED])}")
    if VLLM in results:
        yield _report_rates(VLLM, results[VLLM], "pictures_per_second")


def report_prompts(results: dict[str, Any], title: str) -> Iterator[str]:
    yield f"{title}: count x tokens x answer, ms; host's ms by phase"
    for name, case in results[OURS]["cases"].items():
        profile = results[PROFILED].get(name, results[PROFILED])
        yield (f"    {name:<18}{show(case['milliseconds'], 2):>32}  " +
               " ".join(f"{phase} {value:.2f}" for phase, value in case["parts"].items()) +
               f"  device busy {profile.get('busy_ms', float('nan')):.2f} ms")


def report_structured(results: dict[str, Any], title: str) -> Iterator[str]:
    ours = results[OURS]
    for kind, values in ours["milliseconds"].items():
        yield f"{title}: {kind:<8} {show(values)} ms a step"
    yield (f"    a step of {ours['batch_size']} rows with different schemas takes {ours['ratio']:.3f} times as long; "
           f"the first batch, with what it builds, took {ours['first_batch_seconds']:.1f} s")


def report_kernels(profile: dict[str, Any]) -> Iterator[str]:
    cases = {"": profile} if "kernels" in profile else {name: one for name, one in profile.items()
                                                        if isinstance(one, dict)}
    for name, case in cases.items():
        for microseconds, calls, kernel in case.get("kernels", ()):
            yield f"    {name:<16}{microseconds:>10.1f} us {calls:>7.1f} calls  {kernel}"


if __name__ == "__main__":
    main()
