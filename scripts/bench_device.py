"""npu-runner on random weights of real shapes, with transformers and, where it is installed, vLLM in the same run.

Made for one device: --platform cuda, or npu on an Ascend host (vLLM is then vllm-ascend).

(a) text: the Qwen3-0.6B shape, 256 requests with prompts and outputs of 100 to 1,024 tokens; peers: transformers'
    continuous batching, which is what its generate_batch runs, compiled (it takes flash attention where a package
    for it is installed; without one it takes minutes a repeat and is stopped), and vLLM's LLM.generate.
(b) decode: the Qwen3-8B shape at batch 1, 8 and 64 and a context of 512; milliseconds a step, where the host spends
    them, and the share of the memory bandwidth (the bytes of weights and KV cache that a step must read, over the read
    bandwidth measured in the same run by the best of several kernels); peers: generate with a static cache, compiled,
    and what more tokens cost vLLM.
(c) images: the Qwen3-VL-4B shape, 256 JPEG files of 896 x 672 with 32 tokens of text each, 128 tokens of answer,
    through the batch job, files to answers, with the time for what it prepares while the model loads; peer: vLLM's
    LLM.chat over the same files.
(d) mixed: (c) with images of 597 to 1,193 by 448 to 895, nearly each of a size of its own.
(e) moe: (a), (b) and (c) with the shape of Qwen3.6-35B-A3B: Gated DeltaNet and 256 experts. Of the experts only the
    bytes of those count that a step chose.
(f) hybrid: (a), (b) and (c) with a 9B qwen3_5 shape: Gated DeltaNet and dense layers.

In each part one more run of ours goes under the vendor's profiler, for the share of the time that the device idles: it
is slower by a few per cent, so no other figure is taken from it. "not available" says why where there is none.

Every measurement has a process of its own. Prints a table, then one JSON line. `--sizes tiny --platform cpu` shows in a
minute that the script works; its figures mean nothing. `--sizes host --platform cpu --part decode --no-peer` shows what
a decode step costs the host, whatever the model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

import bench_device_vllm as vllm
from bench_common import ROOT, commit, versions
from bench_device_idle import describe_idle, has_profiler, not_profiled
from bench_device_work import SIZES, Sizes

FAMILIES = {"moe": "(e)", "hybrid": "(f)"}
TITLES = {"text": "(a) text", "decode": "(b) decode", "pictures": "(c) images", "mixed": "(d) mixed images",
          **{f"{family}-{kind}": f"{letter} {family} {kind}" for family, letter in FAMILIES.items()
             for kind in ("text", "decode", "pictures")}}
OURS, PROFILED, TRANSFORMERS, VLLM = "npu_runner", "profiled", "transformers", "vllm"
_NOT_ASKED_FOR = {"idle_share": None, "why": "not asked for"}
_RESULT = "bench_device result: "
# From a graph's launch to its tokens the device works, while the host launches the sampler and waits.
_WHILE_DEVICE_WORKS = ("launch", "sample", "wait")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cuda", help="cuda (default), npu or cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--graph-mode", default="auto", help="ours: auto, eager, reduce-overhead or max-autotune")
    parser.add_argument("--graph-batch-sizes", type=int, nargs="+", help="ours: the batches to capture; default: all")
    parser.add_argument("--attention-backend", default="auto", help="ours: auto, or one that the platform names")
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction, help="ours; default: its own")
    parser.add_argument("--sizes", choices=tuple(SIZES), default="real")
    parser.add_argument("--part", choices=(*TITLES, *FAMILIES), action="append",
                        help="may be repeated; moe and hybrid mean all of theirs; default: all")
    parser.add_argument("--repeats", type=int, default=3, help="of each part")
    parser.add_argument("--peer-repeats", type=int, help="of the peers' parts; as --repeats unless given")
    parser.add_argument("--commit", default=commit(), help="to be reported; default: the checkout's (%(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers and vLLM out")
    parser.add_argument("--side", choices=(OURS, PROFILED, TRANSFORMERS, VLLM), action="append",
                        help="only this one; may be repeated")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        part, side = arguments.measure
        print(_RESULT + json.dumps(measure(part, side, arguments)))
        return
    results: dict[str, dict[str, Any]] = {}
    wanted = arguments.part or list(TITLES)
    for part in [title for title in TITLES if {title, title.partition("-")[0]} & set(wanted)]:
        results[part] = measure_part(part, arguments)
        print("\n".join(report(part, results[part])), flush=True)
    print(json.dumps({"bench": "bench_device", "commit": arguments.commit, "device": device_name(arguments.platform),
                      "versions": versions("torch", "torch-npu", "triton", "transformers", "flashinfer-python", "vllm",
                                           "vllm-ascend", "npu-runner"),
                      "sizes": arguments.sizes, "platform": arguments.platform, "dtype": arguments.dtype,
                      "graph_mode": arguments.graph_mode, "attention_backend": arguments.attention_backend,
                      "async_scheduling": arguments.async_scheduling,
                      "repeats": arguments.repeats, "results": results}))


def measure_part(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Results by side: ours, ours under the profiler, and the peers."""
    return {side: measure_side(part, side, arguments) for side in sides(part, arguments)}


def sides(part: str, arguments: argparse.Namespace) -> list[str]:
    """Those that are asked for and can be measured."""
    found = [OURS, PROFILED]
    if not arguments.no_peer:
        found += [] if is_images(part) else [TRANSFORMERS]
        found += [VLLM] if vllm.is_installed(arguments.platform) else []
    return [side for side in found if side in (arguments.side or found)]


def measure_side(part: str, side: str, arguments: argparse.Namespace) -> Any:
    if side == OURS and is_images(part):  # a job each
        return [run_child(part, side) for _ in range(arguments.repeats)]
    if side == PROFILED and not has_profiler(arguments.platform):
        return not_profiled(arguments.platform)
    return run_child(part, side)


def measure(part: str, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One measurement, in the child process."""
    family, _, part = part.rpartition("-")
    sizes: Sizes = SIZES[arguments.sizes].of_family(family)
    settings = {"platform": arguments.platform, "dtype": arguments.dtype}
    peer_repeats = arguments.peer_repeats or arguments.repeats
    if side == VLLM:
        if is_images(part):
            return vllm.measure_images(sizes, settings, peer_repeats, is_mixed=part == "mixed")
        return {"text": vllm.measure_text, "decode": vllm.measure_decode}[part](sizes, settings, peer_repeats)
    if side == TRANSFORMERS:
        import bench_device_peers as peers

        measure_peer = {"text": peers.measure_text, "decode": peers.measure_decode}[part]
        try:
            return measure_peer(sizes, settings, peer_repeats)
        except peers.PeerStoppedError as stopped:
            return {"failed": str(stopped)}
    import bench_device_ours as ours

    settings |= {name: getattr(arguments, name) for name in ("graph_mode", "graph_batch_sizes", "attention_backend",
                                                             "async_scheduling")}
    if is_images(part):
        return ours.measure_images(sizes, settings, is_mixed=part == "mixed", is_profiled=side == PROFILED)
    measure_ours = {"text": ours.measure_text, "decode": ours.measure_decode}[part]
    return measure_ours(sizes, settings, arguments.repeats, is_profiled=side == PROFILED)


def run_child(part: str, side: str) -> dict[str, Any]:
    """What the child measured, or {"failed": why}: a peer or profiler that cannot run must not end the run."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", part, side]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode == 0 and lines:
        sys.stderr.write(f"{part} {side}: {lines[-1].removeprefix(_RESULT)}\n")  # not lost when a later one hangs
        return dict(json.loads(lines[-1].removeprefix(_RESULT)))
    if side == OURS:
        raise SystemExit(f"{part} of {side} ended with status {done.returncode}")
    return {"failed": f"ended with status {done.returncode}"}


def is_images(part: str) -> bool:
    return part.endswith(("pictures", "mixed"))


def report(part: str, results: dict[str, Any]) -> list[str]:
    if OURS not in results:
        return [f"{TITLES[part]}, {side}: {json.dumps(result)}" for side, result in results.items()]
    reports = {"text": report_text, "decode": report_decode, "pictures": report_images, "mixed": report_images}
    return reports[part.rpartition("-")[2]]({PROFILED: _NOT_ASKED_FOR, **results}, TITLES[part])


def report_text(results: dict[str, Any], title: str) -> list[str]:
    lines = [f"{title:<20}{'output tokens/s':>20}{'min-max':>20}"]
    for side in (OURS, TRANSFORMERS, VLLM):
        if side in results:
            lines.append(_report_rates(side, results[side], "output_tokens_per_second"))
    return [*lines, f"    device idle: {describe_idle(results[PROFILED])}"]


def _report_rates(side: str, result: dict[str, Any], name: str) -> str:
    if "failed" in result:
        return f"    {side:<20}failed: {result['failed']}"
    rates = result[name]
    note = result.get("attention") or result.get("note")
    return (f"    {side:<20}{statistics.median(rates):>16.5g}{min(rates):>12.5g}-{max(rates):.5g}"
            + (f"  ({note})" if note else ""))


def report_decode(results: dict[str, Any], title: str) -> list[str]:
    ours, peers = results[OURS], [side for side in (TRANSFORMERS, VLLM) if side in results]
    bandwidth = ours["read_bytes_per_second"]
    lines = [f"{title}: {bandwidth / 1e9:.0f} GB/s read ({ours['read_by']}); {ours['graphs']}",
             f"    {'batch':>5}{'ms/step':>9}{'min-max':>16}{'GB moved':>10}{'of bandwidth':>14}  host ms: " +
             " ".join(f"{name:>8}" for name in next(iter(ours["batches"].values()))["parts"]) +
             "  device ms" + "".join(f"{side + ' ms':>18}" for side in peers) + "  device idle"]
    for size, batch in ours["batches"].items():
        steps = batch["milliseconds"]
        idle = results[PROFILED].get(size, results[PROFILED])
        lines.append(f"    {size:>5}{statistics.median(steps):>9.3f}{min(steps):>9.3f}-{max(steps):<6.3f}"
                     f"{_moved(batch['bytes'], bandwidth, statistics.median(steps) / 1e3)}           " +
                     " ".join(f"{value:>8.3f}" for value in batch["parts"].values()) +
                     f"{sum(batch['parts'][name] for name in _WHILE_DEVICE_WORKS):>11.3f}" +
                     "".join(f"{_milliseconds(results[side], size):>18}" for side in peers) +
                     f"  {describe_idle(idle)}")
    return lines


def _moved(num_bytes: dict[str, int | None], bandwidth: float, seconds: float) -> str:
    """GB that a step moves, and the share of the bandwidth; without the experts of compiled code nobody knows."""
    known = [value for value in num_bytes.values() if value is not None]
    if len(known) < len(num_bytes):
        return f"{'-':>10}{'not seen':>14}"
    return f"{sum(known) / 1e9:>10.2f}{sum(known) / bandwidth / seconds:>14.1%}"


def _milliseconds(peer: dict[str, Any], size: str) -> str:
    return f"{statistics.median(peer['batches'][size]['milliseconds']):.3f}" if "batches" in peer else peer["failed"]


def report_images(results: dict[str, Any], title: str) -> list[str]:
    rates, tokens = ([run[name] for run in results[OURS]]
                     for name in ("pictures_per_second", "output_tokens_per_second"))
    lines = [f"{title}: {statistics.median(rates):.2f} images/s ({min(rates):.2f}-{max(rates):.2f}), "
             f"{statistics.median(tokens):.0f} output tokens/s, "
             f"device idle: {describe_idle(results[PROFILED])}"]
    if VLLM in results:
        lines.append(_report_rates(VLLM, results[VLLM], "pictures_per_second"))
    return lines


def device_name(platform: str) -> str:
    from npu_runner.platforms import pick_platform

    described = pick_platform(platform).describe()
    return described.get("device", f"{platform}, {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
